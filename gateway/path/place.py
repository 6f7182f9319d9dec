"""Third step: choose the replica, and count the request there."""

from __future__ import annotations

from array import array

from gateway.errors import NoReplica, RequestError, no_replica
from gateway.fleet.fleet import Fleet
from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.path.exchange import Exchange
from gateway.placement.placer import Placer

PIN_HEADER = b"x-gateway-pin"
FETCH_HEADER = b"x-gateway-fetch"
NO_PROMPT = PromptIdentity(mode=IdentityMode.HASH, keys=array("Q"), tokens=0, fallback="no_prompt")
"""Stands for requests without a prompt to reuse, such as embeddings: placed by load."""


class Place:
    """Fills in `placement` and `ticket`; may be called again after a failure, and then avoids what was tried."""

    def __init__(self, placer: Placer, fleet: Fleet, *, allow_pinning: bool) -> None:
        self._placer = placer
        self._fleet = fleet
        self._allow_pinning = allow_pinning

    def place(self, exchange: Exchange) -> None:
        """Raises RequestError 503 when no replica that serves the model is up and untried."""
        identity = exchange.identity or NO_PROMPT
        views = self._fleet.views(exchange.model, identity.mode)
        pinned = self._pinned(exchange) if self._allow_pinning and not exchange.tried else None
        fetch = not (self._allow_pinning and (FETCH_HEADER, b"off") in exchange.scope["headers"])
        try:
            placement = self._placer.place(identity, views, exclude=exchange.tried, pinned=pinned, fetch=fetch)
        except NoReplica as error:
            raise no_replica(f"no replica of {exchange.model!r} is up") from error
        load = self._fleet.replicas[placement.replica].load
        exchange.placement = placement
        exchange.tried.append(placement.replica)
        exchange.queue_free = not next(view.queued_prefill_tokens for view in views if view.id == placement.replica)
        exchange.ticket = load.admit(max(0, identity.tokens - placement.predicted_cached_tokens))
        exchange.claim = self._placer.placed(placement, identity)

    def _pinned(self, exchange: Exchange) -> str | None:
        """The replica that the client named. Raises RequestError 400 when it is none that serves the model now."""
        for name, value in exchange.scope["headers"]:
            if name == PIN_HEADER:
                pinned: str = value.decode("latin-1")
                if pinned not in {replica.id for replica in self._fleet.serving(exchange.model)}:
                    raise RequestError(400, f"x-gateway-pin: no replica {pinned!r} is up", code="unknown_replica")
                return pinned
        return None

    def unplace(self, exchange: Exchange, *, answered: bool) -> None:
        """Give back what `place` took: the request is over, or the replica failed before it answered."""
        if exchange.ticket is not None:
            exchange.ticket.finish()
            exchange.ticket = None
        if exchange.claim is not None:
            (self._placer.answered if answered else self._placer.release)(exchange.claim)
            exchange.claim = None
