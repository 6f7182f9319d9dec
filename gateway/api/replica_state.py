"""A replica as operators are told of it: what is known, what is possible, and if not, why."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.placement.index import PrefixIndex
from kvstore.messages import Problem, Tier


def describe(replica: Replica, fleet: Fleet, index: PrefixIndex) -> dict[str, Any]:
    """One entry of `/admin/replicas`, ready to be JSON."""
    beat = replica.heartbeat
    return {
        "id": replica.id,
        "engine": str(replica.engine),
        "dp_rank": replica.dp_rank,
        "engine_up": replica.engine_up,
        "engine_error": replica.engine_error,
        "draining": replica.draining,
        "warmth": fleet.slow_start.warmth(replica.id),
        "models": list(replica.models),
        "agent": str(replica.agent) if replica.agent else None,
        "reporting": replica.reporting,
        "agent_error": replica.agent_error,
        "routed_by": _routed_by(replica),
        "kv_events": _kv_events(replica),
        "problems": replica.problems,
        "epoch": beat.epoch if beat and replica.reporting else None,
        "held_blocks": index.reported_blocks(replica.id, Tier.HBM),
        "pool_blocks": index.reported_blocks(replica.id, Tier.DRAM),
        "evicted_blocks": index.evicted_of(replica.id),
        "trust": fleet.trust.state(replica.id),
        "fetch": _fetch_state(replica, fleet),
        "capacity_blocks": replica.capacity_blocks,
        "block_size": replica.block_size,
        "block_bytes": replica.block_bytes,
        "running_sequences": replica.load.sequences,
        "queued_prefill_tokens": replica.load.prefill_tokens,
        "others": _others(replica, fleet),
        "prefill_tokens_per_s": fleet.speed.of(replica.id),
        "attention": replica.attention,
        "decoding": _decoding(replica, fleet),
        "engine_load": _load(replica),
    }


def _routed_by(replica: Replica) -> str:
    """What placement knows of this replica, in a word: reports, its own placements (agent lost), or the ring alone."""
    if replica.reporting:
        return "reports"
    return "learned" if replica.agent else "ring"


def _decoding(replica: Replica, fleet: Fleet) -> dict[str, float] | None:
    """What its engine decodes, and the share of time that is believed to take from prefills; None if nobody says."""
    decoding = replica.decoding
    return None if decoding is None else decoding._asdict() | {"share": fleet.speed.decode_share(decoding)}


def _kv_events(replica: Replica) -> str:
    """Whether its agent is connected to the engine's KV events; in words, with the reason if not."""
    if replica.agent is None:
        return "no agent"
    if replica.heartbeat is None or not replica.reporting:
        greeted = "unknown" if replica.hello is None or replica.hello.kv_events else "not connected when it said hello"
        return f"{greeted}: no reports: {replica.agent_error}"
    if replica.heartbeat.kv_events:
        return "connected"
    return f"not connected: {_reason(replica, 'events_', 'prefix_caching_', 'engine_')}"


def _fetch_state(replica: Replica, fleet: Fleet) -> dict[str, Any]:
    """What moving KV to and from this replica is like; `state` says it in words."""
    state = replica.fetch
    if state is None:
        return {"state": _without_pool(replica)}
    others = [other.fetch for other in fleet.replicas.values() if other is not replica]
    if any(problem.code == "load_policy" for problem in replica.problems):
        words = f"serves its peers, but fetches nothing: {_reason(replica, 'load_policy')}"
    elif not state.acts:
        words = "serves its peers, but only keeps records of what it would fetch"
    elif any(other is not None and other.namespace == state.namespace for other in others):
        words = "fetches from its peers"
    else:
        words = "nothing to fetch from: no other pool has KV of its namespace"
    told: dict[str, Any] = msgspec.to_builtins(state)
    return {"state": words} | told


def _without_pool(replica: Replica) -> str:
    if replica.agent is None:
        return "routing by hash only: no agent"
    if not replica.reporting:
        return f"no fetches: no reports: {replica.agent_error}"
    why = _reason(replica, "pool_", "engine_")
    return why if why.startswith("events and routing only") else f"events and routing only: {why}"


def _reason(replica: Replica, *prefixes: str) -> str:
    """What the agent finds wrong with one of the things these codes begin with."""
    found: list[Problem] = [problem for problem in replica.problems if problem.code.startswith(prefixes)]
    return found[0].message if found else "its agent does not say why"


def _others(replica: Replica, fleet: Fleet) -> dict[str, Any]:
    """The load there that is not this gateway's: by gateway, and of nobody that announces; `state` says it in words."""
    others, announcer = replica.others, fleet.announcers.get(replica.id)
    if announcer is None:
        state = "not known: no agent; taken to be the mean of the other replicas"
    elif not others.fresh:
        state = "not known: its agent is not heard of; taken to be the mean of the other replicas"
    elif announcer.error:
        state = f"known, but other gateways do not hear of this one's: {announcer.error}"
    else:
        state = "known"
    told: dict[str, Any] = {"state": state, "gateways": [], "outside": None}
    if others.fresh:
        told["gateways"] = [msgspec.to_builtins(load) for load in others.gateways]
        told["outside"] = others.outside._asdict()
    return told


def _load(replica: Replica) -> dict[str, Any] | None:
    """The last heartbeat, without what stands elsewhere."""
    if replica.heartbeat is None or not replica.reporting:
        return None
    told: dict[str, Any] = msgspec.to_builtins(replica.heartbeat)
    return {name: value for name, value in told.items() if name not in ("problems", "kv_events", "gateways")}
