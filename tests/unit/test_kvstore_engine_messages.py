"""What an engine and its agent say: everything survives the socket, and what is none of it is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine_messages import (
    Accepted,
    Answer,
    Cancel,
    Clear,
    Commit,
    Committed,
    Done,
    EngineHello,
    Failed,
    Found,
    Loading,
    Lookup,
    Nothing,
    Observe,
    Pending,
    Poll,
    Prepare,
    Question,
    Ready,
    Refused,
    Release,
    Reserve,
    Reserved,
    Welcome,
    decode_answer,
    decode_hello,
    decode_question,
    encode,
    frame_length,
)
from kvstore.errors import ProtocolError
from kvstore.hint import Hint
from kvstore.messages import MAX_FRAME_BYTES

HELLO = EngineHello(
    engine_id="life-1",
    role="both",
    layers=30,
    kv_heads=3,
    head_dim=64,
    dtype="bfloat16",
    layout="l",
    block_size=16,
    block_bytes=368_640,
    hash_algorithm="sha256",
    identity={"model": "m"},
)
HINT = Hint(request="r", source="a", url="http://a", blocks=3, deadline_ms=500, mac="m")
QUESTIONS: list[Question] = [
    Lookup(request="r", keys=bytes(64)),
    Prepare(request="r", keys=bytes(64), cached_blocks=2, prompt_tokens=100, hint=HINT),
    Prepare(request="r", keys=b"", cached_blocks=0, prompt_tokens=1),
    Poll(request="r"),
    Poll(request="r", wait_s=0.1),
    Release(request="r", loaded=2, copy_s=0.25),
    Cancel(request="r"),
    Failed(request="r", blocks=3),
    Reserve(keys=bytes(32), parent=b"\xff" * 32),
    Commit(keys=bytes(64), slots=[3, 4], generations=[1, 2**64 - 1], written=[True, False]),
    Clear(),
    Observe(tokens=512, attended=200_000, seconds=0.5),
]
ANSWERS: list[Answer] = [
    Welcome(slots=10, pitch=4_096, block_bytes=4_000),
    Refused(reason="block_bytes: no"),
    Found(blocks=2),
    Pending(),
    Nothing(reason="slower"),
    Accepted(blocks=2, deadline_s=0.5),
    Loading(),
    Loading(slots=[3, 4], there=1, cell=63, before=2),
    Ready(slots=[3, 4], generations=[1, 2**64 - 1]),
    Reserved(slots=[-1, 4], generations=[0, 7]),
    Committed(blocks=1),
    Done(),
]
DECODERS = (decode_hello, decode_question, decode_answer)


def body(message: EngineHello | Question | Answer) -> bytes:
    frame = encode(message)
    assert frame_length(frame[:4]) == len(frame) - 4
    return frame[4:]


def test_every_message_is_tried() -> None:
    assert {type(message) for message in QUESTIONS} == set(get_args(Question))
    assert {type(message) for message in ANSWERS} == set(get_args(Answer))


def test_every_message_survives() -> None:
    assert decode_hello(body(HELLO)) == HELLO
    assert [decode_question(body(message)) for message in QUESTIONS] == QUESTIONS
    assert [decode_answer(body(message)) for message in ANSWERS] == ANSWERS


@pytest.mark.parametrize("decode", DECODERS)
@given(junk=st.binary(max_size=60))
def test_junk_is_a_protocol_error(decode: Callable[[bytes], object], junk: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^not a"):
        decode(b"\xc1" + junk)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("junk", [b"", b"\x91" * 100_000, b"\x90", b"\x80", b"\x81\xa4type\xa5hello"])
def test_other_msgpack_is_a_protocol_error(decode: Callable[[bytes], object], junk: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^not a"):
        decode(junk)


def test_a_message_in_the_wrong_place_is_a_protocol_error() -> None:
    question, answer = body(Lookup(request="r", keys=b"")), body(Welcome(slots=1, pitch=4_096, block_bytes=1))
    misplaced = ((decode_hello, question), (decode_question, answer), (decode_answer, question))
    for decode, message in misplaced:
        with pytest.raises(ProtocolError, match=r"^not a"):
            decode(message)


def test_a_wrong_type_is_a_protocol_error_that_names_the_field() -> None:
    changed = {**msgspec.msgpack.decode(body(Reserve(keys=b"", parent=b""))), "parent": 5}
    with pytest.raises(ProtocolError, match=r"\$\.parent"):
        decode_question(msgspec.msgpack.encode(changed))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "x" * 513),
        ("layout", "x" * 513),
        ("hash_algorithm", "x" * 513),
        ("identity", {str(number): "" for number in range(65)}),
        ("identity", {"rope": "x" * 16_385}),
    ],
)
def test_a_namespace_that_could_not_be_told_to_peers_is_refused_by_name(field: str, value: object) -> None:
    told = msgspec.structs.replace(HELLO, **{field: value})
    with pytest.raises(ProtocolError, match=rf"\$\.{field}"):
        decode_hello(encode(told)[4:])


def test_frames_are_bounded_on_both_sides() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(Lookup(request="r", keys=bytes(MAX_FRAME_BYTES)))
    with pytest.raises(ProtocolError, match="limit"):
        frame_length((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    assert frame_length(MAX_FRAME_BYTES.to_bytes(4, "big")) == MAX_FRAME_BYTES
    assert len(encode(Done())) < 16
