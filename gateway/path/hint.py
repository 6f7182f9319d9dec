"""Tells an engine, in the request's body, from where its agent should fetch what the engine lacks."""

from __future__ import annotations

import math

import msgspec

from gateway.fleet.fleet import Fleet
from gateway.path.exchange import Exchange
from kvstore.hint import FIELD, NAME, Hint


def hint_fields(exchange: Exchange, fleet: Fleet, token: str) -> dict[str, bytes]:
    """What to put into the body for the placement of this attempt, as raw JSON by key; {} where nothing is fetched."""
    assert exchange.placement is not None
    plan = exchange.placement.fetch
    agent = fleet.replicas[plan.source].agent if plan is not None else None
    if plan is None or agent is None:
        return {}
    hint = Hint(
        request=exchange.request_id,
        source=plan.source,
        url=str(agent).rstrip("/"),
        blocks=plan.blocks,
        deadline_ms=math.ceil(plan.deadline_s * 1_000),
    )
    return {FIELD: msgspec.json.encode({NAME: hint.signed(token)})}
