"""What agents ask each other survives the wire; what is short of a field is refused by name."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from kvstore import peer_messages
from kvstore.namespace import KvNamespace
from kvstore.peer_messages import (
    Door,
    LeaseGrant,
    LeaseProof,
    LeaseRefused,
    LeaseRelease,
    LeaseRequest,
    LeaseTerm,
    Offer,
)

MESSAGES: list[msgspec.Struct] = [
    LeaseRequest(
        reader="b",
        secret=bytes(16),
        request="r",
        namespace=KvNamespace(
            dtype="bfloat16",
            block_size=16,
            layers=30,
            kv_heads=3,
            head_dim=64,
            block_bytes=368_640,
            hash_algorithm="sha256",
            identity={"model": "m"},
        ),
        keys=bytes(64),
        ttl_s=10.0,
        transports=["shm", "tcp"],
    ),
    LeaseGrant(
        lease="l",
        ttl_s=10.0,
        slots=[1, 2],
        generations=[1, 2**64 - 1],
        pitch=4_096,
        offers=[Offer(transport="tcp", data=b"\xff")],
        door=Door(host="h", name=b"\x00n"),
    ),
    Door(host="h", name=b"\x00n"),
    Offer(transport="shm", data=b""),
    LeaseRefused(code="busy", reason="r"),
    LeaseProof(secret=bytes(16), copied=3),
    LeaseTerm(ttl_s=0.5),
    LeaseRelease(held=True),
]


def test_every_message_is_tried() -> None:
    structs = inspect.getmembers(peer_messages, lambda each: inspect.isclass(each) and issubclass(each, msgspec.Struct))
    assert {type(message) for message in MESSAGES} == {kind for _, kind in structs} - {KvNamespace}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_and_misses_nothing(message: msgspec.Struct) -> None:
    sent = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(sent, type=type(message)) == message
    required = [field.name for field in msgspec.structs.fields(message) if field.required]
    assert required
    for field in required:
        short = {name: value for name, value in msgspec.msgpack.decode(sent).items() if name != field}
        with pytest.raises(msgspec.ValidationError, match=f"`{field}`"):
            msgspec.msgpack.decode(msgspec.msgpack.encode(short), type=type(message))
