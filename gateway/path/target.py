"""The request target as the engine gets it."""

from __future__ import annotations

from urllib.parse import unquote

from starlette.types import Scope

from gateway.errors import RequestError

CONTROL = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""What vLLM lets operators do under `/v1`; its other control endpoints are beside it, where nothing is forwarded."""


def target(scope: Scope) -> str:
    """Path and query as the client spelled them.

    Raises RequestError 400 for a path that an HTTP library on the way could turn into another one (`.` and `..`
    segments, however often encoded, empty segments, backslashes): engines have control endpoints beside `/v1`. Those
    that they have within it are a 404.
    """
    raw = bytes(scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
    query = bytes(scope.get("query_string", b""))
    whole = raw + (b"?" + query if query else b"")
    if not whole.isascii() or any(byte < 0x21 or byte == 0x7F for byte in whole):
        raise _bad()
    path = raw.decode("ascii")
    while (decoded := unquote(path)) != path:
        path = decoded
    if (
        "\\" in path
        or any(segment in (".", "..", "") for segment in path.split("/")[1:-1])
        or path.endswith(("/.", "/.."))
    ):
        raise _bad()
    if path.rstrip("/") in CONTROL:
        raise RequestError(404, f"POST {path}: Not Found", code="not_found")
    return whole.decode("ascii")


def _bad() -> RequestError:
    return RequestError(400, "the request path is not in its plain form", code="bad_path")
