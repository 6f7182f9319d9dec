"""Frames between agents of one host: whole, in pieces, too long, or none."""

from __future__ import annotations

import random
import struct

import msgspec
import pytest

from kvstore.errors import ProtocolError
from kvstore.frames import Frames
from kvstore.peer_frames import MAX_FRAME, Ask, Knock, Tell, pack, unpack


@pytest.mark.parametrize("seed", range(3))
def test_however_the_bytes_are_cut_the_frames_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    sent = [
        rng.choice((Knock(str(n)), Ask(n, "renew", "l", rng.randbytes(rng.randrange(200))), Tell(n, 200, b"")))
        for n in range(200)
    ]
    stream = b"".join(map(pack, sent))
    frames, bodies, whole, at = Frames(MAX_FRAME), list[bytes](), 0, 0
    while at < len(stream):
        piece = stream[at : at + rng.randrange(1, 300)]
        at += len(piece)
        bodies += frames.feed(piece)
        # The naive twin counts from the start.
        whole, end = 0, 0
        while end < at and (end := end + len(pack(sent[whole]))) <= at:
            whole += 1
        assert (len(bodies), frames.partial) == (whole, len(b"".join(map(pack, sent[:whole]))) < at)
    assert [unpack(body, type(frame)) for body, frame in zip(bodies, sent, strict=True)] == sent


def test_what_is_too_long_is_neither_sent_nor_waited_for() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        pack(Tell(1, 200, bytes(MAX_FRAME)))
    with pytest.raises(ProtocolError, match="announced"):
        list(Frames(MAX_FRAME).feed(struct.pack(">I", MAX_FRAME + 1)))
    assert not list(Frames(MAX_FRAME).feed(struct.pack(">I", MAX_FRAME)))


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", msgspec.msgpack.encode([1, "steal", "l", b""]), msgspec.msgpack.encode([1]), b"\x91" * 10_000],
)
def test_what_is_no_question_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a Ask"):
        unpack(body, Ask)


@pytest.mark.parametrize(
    ("kind", "told", "field"),
    [
        (Knock, ["x" * 4_097], "token"),
        (Ask, [-1, "renew", "l", b""], "number"),
        (Ask, [1, "renew", "x" * 65, b""], "lease"),
        (Ask, [1, "renew", "l", "text"], "body"),
        (Tell, [-1, 200, b""], "number"),
        (Tell, [1, 20, b""], "status"),
    ],
)
def test_a_field_that_is_wrong_is_named(kind: type[Ask], told: list[object], field: str) -> None:
    with pytest.raises(ProtocolError, match=rf"\$\.{field}"):
        unpack(msgspec.msgpack.encode(told), kind)
