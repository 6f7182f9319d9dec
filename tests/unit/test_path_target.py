"""A request path reaches the engine as it was spelled, or not at all."""

from __future__ import annotations

import pytest

from gateway.errors import RequestError
from gateway.path.target import target


def scope(raw: bytes, query: bytes = b"") -> dict[str, object]:
    return {"path": raw.decode("latin-1"), "raw_path": raw, "query_string": query}


@pytest.mark.parametrize(
    "raw", [b"/v1/chat/completions", b"/v1/a%20b", b"/v1/models/org%2Fname", b"/v1/x.y/..z/", b"/v1/"]
)
def test_plain_paths_keep_their_spelling(raw):
    assert target(scope(raw)) == raw.decode()
    assert target(scope(raw, b"a=%2e%2e/&b=c%20d")) == raw.decode() + "?a=%2e%2e/&b=c%20d"


@pytest.mark.parametrize(
    "raw",
    [
        b"/v1/../reset_prefix_cache",
        b"/v1/%2e%2e/reset_prefix_cache",
        b"/v1/%252e%252e/reset_prefix_cache",
        b"/v1/..%2freset_prefix_cache",
        b"/v1/./chat/completions",
        b"/v1//chat/completions",
        b"/v1/..",
        b"/v1/%2e",
        b"/v1\\..\\x",
        b"/v1/%5c..",
        b"/v1/\xc3\xa9",
        b"/v1/a b",
        b"/v1/a\r\nx: y",
    ],
)
def test_paths_that_could_become_others_are_refused(raw):
    with pytest.raises(RequestError) as refused:
        target(scope(raw))
    assert (refused.value.status, refused.value.code) == (400, "bad_path")


def test_a_query_that_is_no_ascii_is_refused():
    with pytest.raises(RequestError):
        target(scope(b"/v1/chat/completions", b"a=\xc3\xa9"))
