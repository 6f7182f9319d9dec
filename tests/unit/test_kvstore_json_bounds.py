"""No number of a message in JSON is without bounds: unlike msgpack it has no largest, and `int` takes 4,300 digits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvstore.errors import ProtocolError
from kvstore.geometry import KvGeometry
from kvstore.hint import Hint
from kvstore.messages import GatewayLoad, Hello, decode_hello
from kvstore.namespace import KvNamespace

MESSAGES: list[tuple[Callable[[bytes], Any], msgspec.Struct]] = [
    (
        decode_hello,
        Hello(
            replica_id="r",
            dp_rank=1,
            epoch=2**64 - 1,
            engine="vllm",
            engine_version="0.32.0",
            engine_up=True,
            models=["m"],
            block_size=16,
            capacity_blocks=7,
            geometry=KvGeometry(layers=1, kv_heads=2, head_dim=3, dtype="float32", v_head_dim=4, windows=(5,)),
            identity_modes=["exact"],
            route_seed_check=2**64 - 1,
            namespace=KvNamespace(
                dtype="float32",
                block_size=16,
                layers=1,
                kv_heads=2,
                head_dim=3,
                block_bytes=4,
                hash_algorithm="sha256",
                identity={},
            ),
        ),
    ),
    (
        msgspec.json.Decoder(GatewayLoad).decode,
        GatewayLoad(gateway="g", epoch=2**63 - 1, prefill_tokens=1, sequences=1),
    ),
    (
        msgspec.json.Decoder(Hint).decode,
        Hint(request="r", source="s", url="http://agent", blocks=1, deadline_ms=1),
    ),
]
MARK = "here"


def marked(told: Any) -> Iterator[tuple[str, Any]]:
    """The message once for each whole number in it, with the mark in that one's place; and the number's name."""
    for name, value in told.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", told | {name: other}) for inner, other in marked(value))
        elif name == "windows":
            yield name, told | {name: [MARK]}
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, told | {name: MARK}


CASES = {
    f"{type(message).__name__}.{name}": (decode, json.dumps(other))
    for decode, message in MESSAGES
    for name, other in marked(msgspec.to_builtins(message))
}


@pytest.mark.parametrize("number", [-(2**63), -1, 2**64, 10**3_000], ids=["far below", "below", "2**64", "long"])
@pytest.mark.parametrize("case", CASES)
def test_a_number_out_of_bounds_is_refused_by_name(case: str, number: int) -> None:
    decode, body = CASES[case]
    with pytest.raises((msgspec.ValidationError, ProtocolError)) as refused:
        decode(body.replace(f'"{MARK}"', str(number)).encode())
    assert case.rpartition(".")[2] in str(refused.value)


def test_what_is_within_them_is_taken() -> None:
    for decode, message in MESSAGES:
        assert decode(msgspec.json.encode(message)) == message


def test_every_number_is_looked_at() -> None:
    """Of all messages that are read from JSON."""
    fields = {name for _, message in MESSAGES for name in numbers(type(message))}
    assert fields == {case.rpartition(".")[2] for case in CASES}


def numbers(kind: type) -> Iterator[str]:
    """The names of fields that may hold whole numbers, in a message or within it."""
    for field in msgspec.structs.fields(kind):
        yield from (field.encode_name for found in within(msgspec.inspect.type_info(field.type)) if found == "int")
        for found in within(msgspec.inspect.type_info(field.type)):
            if isinstance(found, type):
                yield from numbers(found)


def within(info: Any) -> Iterator[Any]:
    """ "int" and struct classes in a type."""
    if isinstance(info, msgspec.inspect.IntType):
        yield "int"
    elif isinstance(info, msgspec.inspect.StructType):
        yield info.cls
    elif isinstance(info, msgspec.inspect.UnionType):
        for each in info.types:
            yield from within(each)
    elif isinstance(info, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
        yield from within(info.item_type)
