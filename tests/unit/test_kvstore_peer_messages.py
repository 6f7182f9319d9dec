"""What agents ask each other survives the wire; what is short of a field, or over a bound, is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect as shapes

from kvstore import peer_frames, peer_messages
from kvstore.errors import ProtocolError
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


def _unbounded(kind: Any, path: str) -> Iterator[str]:
    """Fields in which a peer could say as much, or as large a number, as it likes."""
    match kind:
        case shapes.StructType():
            for field in kind.fields:
                yield from _unbounded(field.type, f"{path}.{field.name}")
        case shapes.UnionType():
            for each in kind.types:
                yield from _unbounded(each, path)
        case shapes.ListType():
            yield from [path] if kind.max_length is None else []
            yield from _unbounded(kind.item_type, f"{path}[]")
        case shapes.DictType():
            yield from [path] if kind.max_length is None else []
            yield from _unbounded(kind.key_type, f"{path}{{}}")
            yield from _unbounded(kind.value_type, f"{path}{{}}")
        case shapes.BytesType():
            yield from [path] if kind.max_length is None else []
        case shapes.StrType():
            yield from [path] if kind.max_length is None and kind.pattern is None else []
        case shapes.IntType():  # msgpack has none above 64 bits
            yield from [path] if kind.ge is None else []
        case shapes.FloatType():
            yield from [path] if kind.le is None or (kind.ge is None and kind.gt is None) else []
        case _:
            assert isinstance(kind, shapes.BoolType | shapes.NoneType | shapes.LiteralType), kind


def test_every_length_and_number_has_a_bound() -> None:
    kinds = [type(message) for message in MESSAGES] + [peer_frames.Knock, peer_frames.Ask, peer_frames.Tell]
    found = [path for kind in kinds for path in _unbounded(shapes.type_info(kind), kind.__name__)]
    assert found == ["Ask.body", "Tell.body"], "only these are bounded by their frame"


REQUEST, GRANT, DOOR, OFFER, REFUSED, PROOF, TERM, _ = MESSAGES


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (REQUEST, "reader", "x" * 513),
        (REQUEST, "request", "x" * 513),
        (REQUEST, "secret", bytes(15)),
        (REQUEST, "secret", bytes(17)),
        (REQUEST, "keys", bytes(32 * 65_536 + 1)),
        (REQUEST, "transports", ["tcp"] * 17),
        (REQUEST, "transports", ["x" * 513]),
        (REQUEST, "ttl_s", float("nan")),
        (REQUEST, "ttl_s", 0.0),
        (REQUEST, "ttl_s", float("inf")),
        (GRANT, "lease", "x" * 65),
        (GRANT, "lease", "../x"),
        (GRANT, "ttl_s", float("nan")),
        (GRANT, "slots", [0] * 65_537),
        (GRANT, "slots", [-1]),
        (GRANT, "slots", [1 << 32]),
        (GRANT, "generations", [0] * 65_537),
        (GRANT, "generations", [-1]),
        (GRANT, "pitch", -1),
        (GRANT, "offers", [OFFER] * 17),
        (GRANT, "offers", [{"transport": "tcp", "data": bytes(65_537)}]),
        (GRANT, "door", {"host": "h", "name": bytes(109)}),
        (DOOR, "host", "x" * 513),
        (OFFER, "transport", "x" * 513),
        (REFUSED, "code", "x" * 513),
        (REFUSED, "reason", "x" * 4_097),
        (PROOF, "secret", b""),
        (PROOF, "copied", -1),
        (TERM, "ttl_s", -1.0),
        (TERM, "ttl_s", 1e7),
    ],
)
def test_what_is_over_a_bound_is_named(message: msgspec.Struct, field: str, value: object) -> None:
    told = msgspec.msgpack.encode(msgspec.structs.asdict(message) | {field: value})
    with pytest.raises(msgspec.ValidationError, match=rf"\$\.{field}"):
        msgspec.msgpack.decode(told, type=type(message))


@pytest.mark.parametrize(
    ("change", "asked", "word"),
    [
        ({}, 1, "slots: 2 for 1"),
        ({"generations": [1]}, 2, "generations: 1 for 2"),
        ({"generations": [1, 2, 3]}, 2, "generations: 3 for 2"),
        ({"slots": []}, 2, "generations: 2 for 0"),
        ({"lease": ""}, 2, "lease: "),
    ],
)
def test_a_grant_that_is_no_answer_is_refused_by_name(change: dict[str, object], asked: int, word: str) -> None:
    grant = msgspec.structs.replace(GRANT, **change)
    assert isinstance(grant, LeaseGrant)
    with pytest.raises(ProtocolError, match=word):
        grant.check(asked)


def test_a_grant_of_less_than_was_asked_or_of_nothing_is_an_answer() -> None:
    assert isinstance(GRANT, LeaseGrant)
    GRANT.check(2)
    GRANT.check(7)
    msgspec.structs.replace(GRANT, lease="", slots=[], generations=[]).check(0)


def test_the_largest_grant_fits_into_a_frame() -> None:
    offers = [Offer(transport="x" * 512, data=bytes(65_536))] * 16
    last = 2**64 - 1
    grant = LeaseGrant(
        lease="x" * 64,
        ttl_s=1.0,
        slots=[2**32 - 1] * 65_536,
        generations=[last] * 65_536,
        pitch=1 << 53,
        offers=offers,
        door=Door(host="h" * 512, name=bytes(108)),
    )
    told = peer_frames.pack(peer_frames.Tell(last, 200, msgspec.msgpack.encode(grant)))
    body = peer_frames.unpack(told[4:], peer_frames.Tell).body
    assert msgspec.msgpack.decode(body, type=LeaseGrant) == grant
