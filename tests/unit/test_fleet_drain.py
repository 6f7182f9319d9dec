"""A replica that is drained takes nothing new, keeps what it has, and gets its keys back."""

from __future__ import annotations

import pytest
from path_support import MODEL, Parts, exchange, identity

from gateway.errors import RequestError
from gateway.path.exchange import Exchange
from gateway.placement.placement import Reason
from kvstore.messages import Tier

PROMPTS = [identity(range(start, start + 640)) for start in range(0, 40_000, 1_000)]


def place(parts: Parts, at: int, **more: dict[str, str]) -> Exchange:
    made = exchange(PROMPTS[at], **more)
    parts.place.place(made)
    assert made.placement is not None
    return made


def homes(parts: Parts) -> list[str]:
    """Where each prompt goes on an idle fleet that holds none of them."""
    found = []
    for at in range(len(PROMPTS)):
        made = place(parts, at)
        assert made.placement is not None
        found.append(made.placement.replica)
        parts.place.unplace(made, answered=False)
    return found


async def test_it_takes_nothing_new_and_its_keys_come_home() -> None:
    parts = Parts()
    before = homes(parts)
    assert set(before) == set(parts.fleet.replicas)
    parts.fleet.replicas["replica-1"].draining = True
    meanwhile = homes(parts)
    assert set(meanwhile) == {"replica-0", "replica-2"}
    assert all(now == home for now, home in zip(meanwhile, before, strict=True) if home != "replica-1")
    parts.fleet.replicas["replica-1"].draining = False
    assert homes(parts) == before
    parts.placer.check()


async def test_not_even_what_it_alone_holds() -> None:
    parts = Parts()
    parts.hold("replica-1", PROMPTS[0].keys)
    parts.fleet.replicas["replica-1"].draining = True
    made = place(parts, 0)
    assert made.placement is not None
    assert (made.placement.reason, made.placement.predicted_cached_tokens) == (Reason.COLD, 0)
    parts.place.unplace(made, answered=False)
    parts.place.place(made)
    assert "replica-1" not in made.tried
    assert [each.id for each in parts.fleet.taking(MODEL)] == ["replica-0", "replica-2"]
    assert len(parts.fleet.serving(MODEL)) == 3
    parts.fleet.replicas["replica-1"].draining = False
    back = place(parts, 0)
    assert back.placement is not None
    assert (back.placement.replica, back.placement.predicted_cached_tokens) == ("replica-1", 624)


async def test_what_runs_there_is_left_alone() -> None:
    parts = Parts(replicas=1)
    running = place(parts, 0)
    parts.fleet.replicas["replica-0"].draining = True
    assert not parts.fleet.ready()
    with pytest.raises(RequestError, match="takes requests") as raised:
        place(parts, 1)
    assert (raised.value.status, raised.value.code) == (503, "no_replica")
    assert parts.loads() == {"replica-0": (1, 640)}
    parts.place.unplace(running, answered=True)
    assert parts.loads() == {"replica-0": (0, 0)}
    parts.fleet.replicas["replica-0"].draining = False
    assert parts.fleet.ready()


async def test_others_fetch_from_it() -> None:
    parts = Parts()
    for name in parts.fleet.replicas:
        parts.pool(name)
    parts.hold("replica-1", PROMPTS[0].keys, Tier.HBM, Tier.DRAM)
    parts.fleet.replicas["replica-1"].draining = True
    made = place(parts, 0)
    assert made.placement is not None and made.placement.fetch is not None
    assert made.placement.replica != "replica-1"
    assert made.placement.fetch.source == "replica-1"


async def test_nobody_can_be_pinned_to_it() -> None:
    parts = Parts(allow_pinning=True)
    parts.fleet.replicas["replica-1"].draining = True
    with pytest.raises(RequestError, match="no replica 'replica-1' is up and takes requests") as raised:
        place(parts, 0, headers={"x-gateway-pin": "replica-1"})
    assert (raised.value.status, raised.value.code) == (400, "unknown_replica")
