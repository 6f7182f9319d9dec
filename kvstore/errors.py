"""Every exception this package raises.

KvStoreError
├── ProtocolError      a peer sent bytes that are not a frame or message of this protocol
├── GeometryError      a model description from which KV bytes cannot be computed
└── IdentityError      a prompt or block that cannot be named (wrong unit, token id out of range)
"""

from __future__ import annotations


class KvStoreError(Exception):
    """Base of all errors of `kvstore`."""


class ProtocolError(KvStoreError):
    """A peer sent bytes that are not a frame or message of this protocol."""


class GeometryError(KvStoreError):
    """A model description from which KV bytes cannot be computed; names the field."""


class IdentityError(KvStoreError):
    """A prompt or block that cannot be named: wrong unit size or a token id out of range."""
