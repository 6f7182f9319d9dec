"""Every exception this package raises.

ReferenceEngineError
├── StartError              the process cannot start; one line for the operator, exit code 2
│   ├── ModelError          a model that is missing, incomplete or of an unsupported architecture
│   └── PortTakenError      an address that another process listens on; names the flag
├── RequestError            a request that is refused; carries the HTTP status and the OpenAI error fields
│   ├── ContextLengthError  prompt and max_tokens do not fit the context
│   └── UnknownModelError   a model name that is not served
└── EngineDownError         the compute thread has stopped or failed
"""

from __future__ import annotations


class ReferenceEngineError(Exception):
    """Base of all errors of the reference engine."""


class StartError(ReferenceEngineError):
    """The process cannot start. The message is one line that names the flag or file at fault."""


class ModelError(StartError):
    """A model that is missing, incomplete or of an architecture that this engine cannot run."""


class PortTakenError(StartError):
    """An address that another process listens on."""

    def __init__(self, port: int, flag: str) -> None:
        super().__init__(f"port {port} is taken: choose another with {flag}")


class RequestError(ReferenceEngineError):
    """A refused request: `status` is the HTTP status, `param` the field at fault, `code` a stable name."""

    status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        """The `type` of OpenAI's error object."""
        return "invalid_request_error"


class ContextLengthError(RequestError):
    """Prompt and max_tokens together are longer than the model's context."""

    def __init__(self, limit: int, prompt_tokens: int, max_tokens: int, param: str | None = None) -> None:
        super().__init__(
            f"this model's context is {limit} tokens, but {prompt_tokens} in the prompt and {max_tokens} to generate "
            f"are {prompt_tokens + max_tokens}",
            param,
            "context_length_exceeded",
        )


class UnknownModelError(RequestError):
    """A model name that is not served here."""

    status = 404

    def __init__(self, name: str) -> None:
        super().__init__(f"the model `{name}` does not exist", "model", "model_not_found")


class EngineDownError(ReferenceEngineError):
    """The compute thread has stopped or failed; nothing more can be generated."""
