"""Every exception this package raises.

GatewayError
├── SettingsError          a configuration that cannot be used; names the key
├── TraceError             recorded traffic that cannot be read; names the file, the line and the field
├── RequestError           an answer of the gateway itself: HTTP status, OpenAI error type, code and param
├── IdentityUnavailable    a prompt could not be turned into token ids (no tokenizer, deadline passed, worker died)
├── NoReplica              no replica may take the request now
└── UpstreamError          a replica failed; says how, and whether anything had been answered
"""

from __future__ import annotations


class GatewayError(Exception):
    """Base of all errors of `gateway`."""


class SettingsError(GatewayError):
    """A configuration that cannot be used; the message names the key and the accepted values."""


class TraceError(GatewayError):
    """Recorded traffic that cannot be read; the message names the file, the line and the field."""


class RequestError(GatewayError):
    """What a client is told by the gateway itself, in OpenAI's error shape.

    `status` is the HTTP status, `type` and `code` OpenAI's, `param` the offending field, `retry_after` seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after


def no_replica(message: str) -> RequestError:
    """The answer while no replica can be asked: come back in a second, and a dead engine has been probed again."""
    return RequestError(503, message, type="server_error", code="no_replica", retry_after=1.0)


class IdentityUnavailable(GatewayError):
    """A prompt could not be turned into token ids; `reason` is one of a bounded set of words, for metrics."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class NoReplica(GatewayError):
    """No replica may take the request now."""


class UpstreamError(GatewayError):
    """A replica failed to answer. `kind` is connect, timeout, reset, protocol or unauthorized; `replica` its id."""

    def __init__(self, replica: str, kind: str, message: str) -> None:
        super().__init__(f"{replica}: {message}")
        self.replica = replica
        self.kind = kind
