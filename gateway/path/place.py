"""Third step: choose the replica, and count the request there."""

from __future__ import annotations

from array import array

from gateway.duplication.hit_rates import HitRates
from gateway.errors import NoReplica, RequestError, no_replica
from gateway.fleet.decoding import Decoding
from gateway.fleet.fleet import Fleet
from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.path.body import Body
from gateway.path.exchange import Exchange
from gateway.placement.placement import Placement, effort
from gateway.placement.placer import Placer
from gateway.placement.trust import Expectation

PIN_HEADER = b"x-gateway-pin"
FETCH_HEADER = b"x-gateway-fetch"
NO_PROMPT = PromptIdentity(mode=IdentityMode.HASH, keys=array("Q"), tokens=0, fallback="no_prompt")
"""Stands for requests without a prompt to reuse, such as embeddings: placed by load."""


class Place:
    """Fills in `placement` and `ticket`; may be called again after a failure, and then avoids what was tried."""

    def __init__(self, placer: Placer, fleet: Fleet, hit_rates: HitRates, *, allow_pinning: bool) -> None:
        self._placer = placer
        self._hit_rates = hit_rates
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
            raise no_replica(f"no replica of {exchange.model!r} is up and takes requests") from error
        replica = self._fleet.replicas[placement.replica]
        if not exchange.tried:
            units, capacity = self._fleet.cache_shape(exchange.model)
            exact = identity.mode is IdentityMode.EXACT
            exchange.fed = self._hit_rates.placed(exchange.model, identity, units if exact else 1, capacity)
        exchange.placement = placement
        exchange.tried.append(placement.replica)
        view = next(view for view in views if view.id == placement.replica)
        exchange.queue_free = not view.queued_prefill_tokens and not replica.waiting
        exchange.beside = Decoding(0, 0) if replica.decoding and not view.running else replica.decoding
        cached = placement.predicted_cached_tokens
        work = effort(max(0, identity.tokens - cached), cached, replica.attention)
        exchange.ticket = replica.load.admit(round(work))
        exchange.claim = self._placer.placed(placement, identity)
        exchange.expectation = self._expect(exchange.request_id, placement, identity)

    def _expect(self, request_id: str, placement: Placement, identity: PromptIdentity) -> Expectation | None:
        """What the replica's reports say of this prompt, if they say anything."""
        tokens = placement.reported_tokens
        if not tokens:
            return None
        key = identity.keys[tokens // identity.unit_tokens - 1]
        block_tokens = self._fleet.replicas[placement.replica].block_size
        return self._fleet.trust.expect(placement.replica, request_id, key, tokens, block_tokens)

    def _pinned(self, exchange: Exchange) -> str | None:
        """The replica that the client named. Raises RequestError 400 when it is none that serves the model now."""
        for name, value in exchange.scope["headers"]:
            if name == PIN_HEADER:
                pinned: str = value.decode("latin-1")
                if pinned not in {replica.id for replica in self._fleet.taking(exchange.model)}:
                    raise RequestError(
                        400, f"x-gateway-pin: no replica {pinned!r} is up and takes requests", code="unknown_replica"
                    )
                return pinned
        return None

    def unplace(self, exchange: Exchange, *, answered: bool) -> None:
        """Give back what `place` took: the request is over, or the replica failed before it answered."""
        if exchange.ticket is not None:
            exchange.ticket.finish()
            exchange.ticket = None
        if exchange.claim is not None:
            if answered:
                self._placer.answered(exchange.claim)
            else:
                self._placer.release(exchange.claim)
            exchange.claim = None
        if exchange.expectation is not None:
            self._reconcile(exchange, exchange.expectation, answered=answered)
            exchange.expectation = None

    def _reconcile(self, exchange: Exchange, expectation: Expectation, *, answered: bool) -> None:
        """What was reported, with what the engine had; where that says nothing of the reports, it is dropped."""
        usage, identity, trust = exchange.usage, exchange.identity, self._fleet.trust
        cached = usage.cached_tokens if usage is not None and answered else None
        as_identified = usage is not None and identity is not None and usage.prompt_tokens == identity.tokens
        if cached is None or not as_identified or (exchange.body is not None and passes_over_cache(exchange.body)):
            trust.drop(expectation)
        else:
            trust.answered(expectation, cached)


def passes_over_cache(body: Body) -> bool:
    """Whether an engine computes this prompt whatever it has cached: it is to say the prompt's own probabilities."""
    return any(body.get(key) not in (None, b"null", b"false") for key in ("prompt_logprobs", "echo"))
