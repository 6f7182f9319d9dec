"""Events pass as they come; usage is read on the way, and dropped only where the gateway asked for it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.path.event_stream import EventRelay

CONTENT = 'data: {"id":"1","choices":[{"delta":{"content":"é\u2028"}}],"usage":null}\n\n'.encode()
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
COMMENT = b": ping\n\n"
USAGE = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":5}}}\n\n'
DONE = b"data: [DONE]\n\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(
    events=st.lists(st.sampled_from([CONTENT, ROLE, COMMENT]), max_size=5),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
    drop=st.booleans(),
    rest=st.sampled_from([b"", b"data: {", CONTENT[:40]]),
)
def test_every_byte_passes_but_the_usage_that_was_not_asked_for(events, cuts, drop, rest):
    relay = EventRelay(drop_usage=drop)
    before = b"".join(events)
    out = b"".join(map(relay.feed, pieces(before + USAGE + DONE + rest, cuts))) + relay.finish()
    assert out == before + (b"" if drop else USAGE) + DONE + rest
    assert relay.usage is not None
    assert (relay.usage.prompt_tokens, relay.usage.cached_tokens) == (9, 5)
    assert relay.done


@given(cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_without_dropping_no_chunk_waits_for_a_later_one(cuts):
    relay = EventRelay(drop_usage=False)
    for piece in pieces(ROLE + CONTENT + USAGE + DONE, cuts):
        assert relay.feed(piece) == piece


def test_a_part_of_an_event_that_cannot_be_the_usage_passes_at_once():
    relay = EventRelay(drop_usage=True)
    assert relay.feed(CONTENT[:45]) == CONTENT[:45]
    assert relay.feed(CONTENT[45:] + USAGE[:30]) == CONTENT[45:]
    assert relay.feed(USAGE[30:]) == b""


@pytest.mark.parametrize("cut", [0, 3, 45])
def test_a_broken_stream_ends_with_an_error_and_no_done(cut):
    relay = EventRelay(drop_usage=True)
    out = relay.feed(ROLE + CONTENT + CONTENT[:cut]) + relay.broken("replica-1: connection lost", "upstream_reset")
    assert b"[DONE]" not in out
    assert out.startswith(ROLE + CONTENT)
    last = out.rstrip().rpartition(b"data: ")[2]
    assert json.loads(last)["error"]["code"] == "upstream_reset"


def test_replies_that_are_not_what_they_should_be_pass():
    relay = EventRelay(drop_usage=True)
    odd = b'data: {"usage": 7}\n\ndata: "usage"\n\nevent: x\ndata: {"usage":\ndata: null}\n\n'
    assert relay.feed(odd) == odd
    assert relay.usage is None
