"""Every exception this package raises.

KvStoreError
├── ProtocolError           a peer sent bytes that are not a frame or message of this protocol
│   └── UnknownProtocol     a peer speaks another version of it; both are named
├── GeometryError           a model description from which KV bytes cannot be computed
│   └── GeometryMismatch    two layouts, or a layout and a grid of ranks, that cannot be mapped onto each other
├── IdentityError           a prompt or block that cannot be named (wrong unit, token id out of range)
├── HintRefused             a fetch hint that is not the deployment's, or makes no sense
├── WrongBytes              a slot does not hold the block that was asked for; says in a word what differs
├── TlsFileUnusable         a certificate or key that TLS cannot use; names the argument
├── PoolError               a pool that cannot be made, or is asked for what it cannot do
├── TransportUnavailable    this host cannot use a transport
└── TransferError           the owner's side of a transfer refused or failed
"""

from __future__ import annotations


class KvStoreError(Exception):
    """Base of all errors of `kvstore`."""


class ProtocolError(KvStoreError):
    """A peer sent bytes that are not a frame or message of this protocol."""


class UnknownProtocol(ProtocolError):
    """A peer speaks another version of the protocol: `theirs`, where this side speaks `ours`."""

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(f"the peer speaks protocol {theirs}, this side {ours}: update gateways and agents together")
        self.theirs = theirs
        self.ours = ours


class GeometryError(KvStoreError):
    """A model description from which KV bytes cannot be computed; names the field."""


class GeometryMismatch(GeometryError):
    """Two layouts, or a layout and a grid of ranks, that cannot be mapped onto each other; names every field."""


class IdentityError(KvStoreError):
    """A prompt or block that cannot be named: wrong unit size or a token id out of range."""


class HintRefused(KvStoreError):
    """A fetch hint that is not the deployment's, or makes no sense; names the field."""


class WrongBytes(KvStoreError):
    """A slot does not hold the block that was asked for. `kind`: trailer, key, generation or checksum."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TlsFileUnusable(KvStoreError):
    """A file that TLS cannot use. `argument` is ca_file, cert_file or key_file."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument
        self.problem = problem


class PoolError(KvStoreError):
    """A pool that cannot be made, or is asked for what it cannot do; names the setting."""


class TransportUnavailable(KvStoreError):
    """This host cannot use a transport; says what is missing. `passes`: it may be able to later, without a restart, as
    where another process has the port now."""

    def __init__(self, message: str, *, passes: bool = False) -> None:
        super().__init__(message)
        self.passes = passes


class TransferError(KvStoreError):
    """The owner's side of a transfer refused or failed."""
