"""An engine may answer anything; what is no usage is None and never an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.path.usage import read_reply


def test_a_reply_of_vllm() -> None:
    reply = read_reply(
        b'{"id":"c","choices":[{"index":0,"text":"hi"}],"usage":{"prompt_tokens":40,"total_tokens":42,'
        b'"completion_tokens":2,"prompt_tokens_details":{"audio_tokens":null,"cached_tokens":32}}}'
    )
    assert reply is not None and reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.cached_tokens) == (40, 2, 32)
    assert reply.choices is not None and len(reply.choices) == 1


def test_a_usage_chunk_of_a_stream() -> None:
    reply = read_reply(b'{"choices":[],"usage":{"prompt_tokens":3}}')
    assert reply is not None and reply.usage is not None
    assert (reply.choices, reply.usage.cached_tokens) == ([], None)


@pytest.mark.parametrize(
    "usage", [b"null", b'{"prompt_tokens_details":null}', b'{"prompt_tokens_details":{"cached_tokens":null}}', b"{}"]
)
def test_an_engine_that_does_not_tell(usage: bytes) -> None:
    reply = read_reply(b'{"usage":%s}' % usage)
    assert reply is not None
    assert (reply.usage.cached_tokens if reply.usage else None) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[DONE]",
        b"[1]",
        b'{"usage":7}',
        b'{"usage":{"prompt_tokens":"7"}}',
        b'{"usage":{"prompt_tokens":-1}}',
        b'{"usage":{"prompt_tokens":1%s}}' % (b"0" * 400),
        b'{"usage":{"completion_tokens":1%s}}' % (b"0" * 400),
        b'{"usage":{"prompt_tokens_details":{"cached_tokens":1%s}}}' % (b"0" * 400),
        b'{"choices":{}}',
        b'{"a":' + b"[" * 100_000,
        b'{"choices":[' + b"[" * 100_000,
    ],
    ids=[
        *("empty", "done", "array", "usage", "number", "negative", "long", "long completion", "long cached"),
        *("choices", "deep", "deep choices"),
    ],
)
def test_what_is_no_reply_is_none(data: bytes) -> None:
    assert read_reply(data) is None
    assert read_reply(memoryview(data)) is None


@given(st.binary(max_size=200))
def test_nothing_raises(data: bytes) -> None:
    read_reply(data)
