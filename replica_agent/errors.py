"""Every exception this package raises.

ReplicaAgentError
├── SettingsError            a flag or variable that cannot be used; names it
├── PortTaken                the HTTP port cannot be bound
├── SocketTaken              the Unix socket of the KV pool cannot be made
├── EventDecodeError         the engine published a batch that is not one of the known encodings
├── ReplayError              the engine's replay endpoint did not answer, or answered nonsense
├── EngineUnreachable        nothing listens where the engine should be
├── EngineSilent             something listens there but does not answer in time
├── TooManyReports           no further report stream, or more blocks than one may tell; says which
├── ModelFilesUnavailable    the model's tokenizer files cannot be handed out; says why
├── LeaseRequestBad          another agent asked for what makes no sense, or for a lease that is not there
└── PeerError                another agent did not do what a fetch needs; `code` is one of a bounded set of words
"""

from __future__ import annotations


class ReplicaAgentError(Exception):
    """Base of all errors of `replica_agent`."""


class SettingsError(ReplicaAgentError):
    """A setting that cannot be used; the message names the key and the accepted values."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key


class PortTaken(ReplicaAgentError):
    """The HTTP port cannot be bound; the message names the flag."""


class SocketTaken(ReplicaAgentError):
    """The Unix socket of the KV pool cannot be made; the message names the flag."""


class EventDecodeError(ReplicaAgentError):
    """A batch of KV events that cannot be read; what the agent knew before it can no longer be vouched for."""


class ReplayError(ReplicaAgentError):
    """The engine's replay endpoint did not answer in time, or answered nonsense."""


class EngineUnreachable(ReplicaAgentError):
    """Nothing listens where the engine should be: the process is gone."""


class EngineSilent(ReplicaAgentError):
    """The engine's port is open but it did not answer in time, or answered with a server error."""


class TooManyReports(ReplicaAgentError):
    """No further report stream can be had, or there are more blocks than one may tell."""


class ModelFilesUnavailable(ReplicaAgentError):
    """The model's tokenizer files cannot be handed out; `code` is one of a bounded set of words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class LeaseRequestBad(ReplicaAgentError):
    """Another agent asked for what makes no sense (`status` 400), or for a lease that is not there (404)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PeerError(ReplicaAgentError):
    """Another agent did not do what a fetch needs. `code`: unreachable, timeout, unauthorized, namespace, no_engine,
    busy, nonsense or status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
