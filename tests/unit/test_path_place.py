"""Placing counts a request in exactly once, and giving the place back leaves nothing."""

from __future__ import annotations

import pytest
from path_support import MODEL, Parts, exchange, identity

from gateway.errors import RequestError
from gateway.identity.prompt import IdentityMode
from gateway.placement.placement import Reason

PROMPT = identity(range(640))


def idle(parts: Parts) -> bool:
    return set(parts.loads().values()) == {(0, 0)}


async def test_a_request_goes_where_its_prefix_is_and_counts_what_is_missing() -> None:
    parts = Parts()
    parts.hold("replica-2", PROMPT.keys[:20])
    made = exchange(PROMPT)
    parts.place.place(made)
    assert made.placement is not None
    assert made.placement.replica == "replica-2"
    assert made.placement.predicted_cached_tokens == 320
    assert made.tried == ["replica-2"]
    assert made.queue_free
    assert parts.loads()["replica-2"] == (1, 320)
    parts.place.unplace(made, answered=False)
    parts.place.unplace(made, answered=False)
    assert idle(parts)
    parts.placer.check()
    assert (made.ticket, made.claim) == (None, None)


async def test_a_second_attempt_avoids_what_was_tried() -> None:
    parts = Parts()
    made = exchange(PROMPT)
    for attempt in range(1, 4):
        parts.place.place(made)
        assert len(set(made.tried)) == attempt
        assert sum(sequences for sequences, _ in parts.loads().values()) == 1
        assert made.placement is not None
        assert (made.placement.reason is Reason.RETRY) == (attempt > 1)
        parts.place.unplace(made, answered=False)
    with pytest.raises(RequestError) as raised:
        parts.place.place(made)
    assert (raised.value.status, raised.value.code, raised.value.retry_after) == (503, "no_replica", 1.0)
    assert idle(parts)


async def test_only_replicas_that_are_up_and_serve_the_model_take_it() -> None:
    parts = Parts()
    parts.hold("replica-0", PROMPT.keys)
    parts.fleet.replicas["replica-0"].engine_up = False
    parts.fleet.replicas["replica-1"].models = {"another": {}}
    for _ in range(5):
        made = exchange(PROMPT)
        parts.place.place(made)
        assert made.tried == ["replica-2"]
    parts.fleet.replicas["replica-2"].engine_up = False
    with pytest.raises(RequestError, match="no replica of 'm' is up"):
        parts.place.place(exchange(PROMPT))


async def test_the_queue_is_free_only_without_a_prefill_in_front() -> None:
    parts = Parts(replicas=1)
    first, second, third = exchange(PROMPT), exchange(PROMPT), exchange(PROMPT)
    parts.place.place(first)
    parts.place.place(second)
    assert (first.queue_free, second.queue_free) == (True, False)
    for made in (first, second):
        assert made.ticket is not None
        made.ticket.prefilled()
    parts.place.place(third)
    assert third.queue_free, "running sequences are no queue"


async def test_a_request_without_a_prompt_is_placed_by_load() -> None:
    parts = Parts()
    for _ in range(30):
        parts.place.place(exchange(None))
    running = [sequences for sequences, _ in parts.loads().values()]
    assert sum(running) == 30
    assert min(running) >= 3
    assert {tokens for _, tokens in parts.loads().values()} == {0}


async def test_an_unreported_replica_is_believed_to_hold_what_was_placed_there() -> None:
    parts = Parts()
    for replica in parts.fleet.replicas.values():
        replica.reporting = False
    first, again = exchange(PROMPT), exchange(PROMPT)
    parts.place.place(first)
    parts.place.unplace(first, answered=False)
    parts.place.place(again)
    assert again.tried == first.tried
    assert again.placement is not None
    assert again.placement.predicted_cached_tokens == 624
    by_text = exchange(identity(range(640), IdentityMode.HASH))
    parts.place.place(by_text)
    assert by_text.placement is not None
    assert (by_text.placement.reason, by_text.placement.predicted_cached_tokens) == (Reason.FALLBACK, 0)


async def test_a_pin_is_followed_where_it_is_allowed() -> None:
    parts = Parts(allow_pinning=True)
    parts.hold("replica-0", PROMPT.keys)
    made = exchange(PROMPT, headers={"x-gateway-pin": "replica-1"})
    parts.place.place(made)
    assert made.placement is not None
    assert (made.placement.replica, made.placement.reason) == ("replica-1", Reason.PINNED)
    parts.place.unplace(made, answered=False)
    parts.place.place(made)
    assert made.tried[1] != "replica-1", "a pinned replica that failed is not asked again"
    parts.fleet.replicas["replica-2"].engine_up = False
    for name in ("replica-2", "nobody", ""):
        with pytest.raises(RequestError) as raised:
            parts.place.place(exchange(PROMPT, headers={"x-gateway-pin": name}))
        assert (raised.value.status, raised.value.code) == (400, "unknown_replica")


async def test_a_pin_is_nothing_where_it_is_not() -> None:
    parts = Parts()
    parts.hold("replica-0", PROMPT.keys)
    made = exchange(PROMPT, headers={"x-gateway-pin": "replica-1"})
    parts.place.place(made)
    assert made.tried == ["replica-0"]
    assert parts.fleet.serving(MODEL)
