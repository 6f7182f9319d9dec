"""The fetch hint: how a gateway tells an engine's agent, through the engine, who holds a request's prefix.

It travels as `kv_transfer_params: {"prefix_gateway": {...}}`. Clients cannot set that field (the gateway cuts it out),
and where the deployment has a secret the hint carries a MAC, so that not even one who reaches an engine directly can
make an agent fetch from where he likes.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated

import msgspec

from kvstore.errors import HintRefused

FIELD = "kv_transfer_params"
NAME = "prefix_gateway"
MAX_DEADLINE_MS = 30_000
"""Agents keep what may still be read or written for twice as long (`replica_agent.kv.pool_keeper.HOLD_S`)."""

# Bounded as they are read: a hint that somebody made up is no hint, and never one that cannot be sent on.
_Text = Annotated[str, msgspec.Meta(max_length=1_024)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """`source` is the replica that holds the first `blocks` engine blocks of request `request`, `url` its agent.

    `deadline_ms` counts from when the agent gets the hint: what has not come by then is recomputed.
    """

    request: _Text
    source: _Text
    url: _Text
    blocks: _Number
    deadline_ms: _Number
    mac: _Text = ""

    def signed(self, secret: str) -> Hint:
        """With the MAC under the deployment's secret; without one where there is no secret."""
        return msgspec.structs.replace(self, mac=self._mac(secret) if secret else "")

    def check(self, secret: str) -> None:
        """Raises HintRefused, naming the field, for a hint that is not the deployment's or makes no sense."""
        if secret and not hmac.compare_digest(self.mac.encode(), self._mac(secret).encode()):
            raise HintRefused("mac: the hint is not signed with this deployment's secret")
        if not self.url.startswith(("http://", "https://")):
            raise HintRefused(f"url: expected http://host:port, got {self.url!r}")
        if self.blocks < 1:
            raise HintRefused(f"blocks: must be above 0, got {self.blocks}")
        if not 1 <= self.deadline_ms <= MAX_DEADLINE_MS:
            raise HintRefused(f"deadline_ms: must be between 1 and {MAX_DEADLINE_MS}, got {self.deadline_ms}")

    def _mac(self, secret: str) -> str:
        told = msgspec.msgpack.encode((self.request, self.source, self.url, self.blocks, self.deadline_ms))
        return hmac.new(secret.encode(), told, hashlib.sha256).hexdigest()[:32]
