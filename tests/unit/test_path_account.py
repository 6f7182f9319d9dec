"""Whatever became of a request, its place is given back and its receipt says what happened."""

from __future__ import annotations

import random

import msgspec
import pytest
from path_support import HELLO, MODEL, Clock, Parts, exchange, identity

from gateway.api.replica_state import describe
from gateway.identity.prompt import IdentityMode
from gateway.path.account import Receipts
from gateway.path.exchange import Exchange
from gateway.path.usage import PromptTokensDetails, Usage
from gateway.placement.placement import Reason, effort
from kvstore.messages import Tier

PROMPT = identity(range(640))


def answered(parts: Parts, *, cached: int | None = 352, stream: bool = True, seconds: float = 0.5) -> Exchange:
    clock = Clock()
    made = exchange(PROMPT, clock=clock)
    made.stream = stream
    parts.place.place(made)
    clock.now += seconds
    made.first_byte_s = made.elapsed()
    assert made.ticket is not None
    made.ticket.prefilled()
    clock.now += 1.0
    details = None if cached is None else PromptTokensDetails(cached_tokens=cached)
    made.usage = Usage(prompt_tokens=640, completion_tokens=3, prompt_tokens_details=details)
    made.status, made.outcome = 200, "ok"
    return made


async def test_a_receipt_tells_the_whole_story() -> None:
    parts = Parts()
    parts.hold("replica-1", PROMPT.keys[:20])
    receipt = parts.account.close(answered(parts))
    assert parts.receipts.get("id-1") is receipt
    assert (receipt.request_id, receipt.at, receipt.model, receipt.path) == (
        "id-1",
        1_000.0,
        MODEL,
        "/v1/chat/completions",
    )
    assert (receipt.status, receipt.outcome, receipt.stream) == (200, "ok", True)
    assert (receipt.identity, receipt.identity_fallback) == (IdentityMode.EXACT, "")
    assert (receipt.replica, receipt.tried) == ("replica-1", ["replica-1"])
    assert sorted(receipt.ring) == ["replica-0", "replica-1", "replica-2"]
    assert (receipt.prompt_tokens, receipt.predicted_cached_tokens, receipt.cached_tokens) == (640, 320, 352)
    assert (receipt.ttft_s, receipt.duration_s) == (0.5, 1.5)
    assert set(parts.loads().values()) == {(0, 0)}
    labels = {"replica": "replica-1"}
    assert parts.count("prefix_gateway_prompt_tokens_total", **labels) == 640
    assert parts.count("prefix_gateway_cached_tokens_total", **labels) == 352
    assert parts.count("prefix_gateway_predicted_cached_tokens_total", **labels) == 320
    assert parts.count("prefix_gateway_prediction_error_tokens_sum") == 32
    assert parts.count("prefix_gateway_ttft_seconds_sum", **labels) == 0.5


@pytest.mark.parametrize("outcome", ["engine_error", "upstream_reset", "client_gone", "no_replica", "incomplete"])
async def test_every_end_gives_the_place_back(outcome: str) -> None:
    parts = Parts()
    made = exchange(PROMPT)
    parts.place.place(made)
    made.outcome = outcome
    receipt = parts.account.close(made)
    assert set(parts.loads().values()) == {(0, 0)}
    parts.placer.check()
    assert (receipt.outcome, receipt.ttft_s, receipt.cached_tokens) == (outcome, None, None)
    assert receipt.prompt_tokens == 640, "what was identified stands where the engine said nothing"
    replica = receipt.replica or ""
    counted = {"replica": replica, "reason": receipt.reason or "", "identity": "exact", "outcome": outcome}
    assert parts.count("prefix_gateway_requests_total", **counted) == 1
    assert parts.fleet.speed.of(replica) == parts.fleet.speed.of("unseen"), "no speed is learned from failures"


async def test_a_request_that_was_refused_has_a_receipt_too() -> None:
    parts = Parts()
    made = exchange(None)
    made.status, made.outcome = 400, "invalid_json"
    receipt = parts.account.close(made)
    assert (receipt.replica, receipt.reason, receipt.identity, receipt.ring, receipt.tried) == (
        None,
        None,
        None,
        [],
        [],
    )
    counted = {"replica": "", "reason": "", "identity": "", "outcome": "invalid_json"}
    assert parts.count("prefix_gateway_requests_total", **counted) == 1


async def test_speed_is_learned_from_streams_that_had_no_queue() -> None:
    parts = Parts(replicas=1)
    before = parts.fleet.speed.of("replica-0")
    parts.account.close(answered(parts, stream=False))
    parts.account.close(answered(parts, cached=None))
    retried = answered(parts)
    retried.tried.insert(0, "replica-1")
    parts.account.close(retried)
    queued = answered(parts)
    queued.queue_free = False
    parts.account.close(queued)
    assert parts.fleet.speed.of("replica-0") == before
    parts.account.close(answered(parts, cached=32, seconds=0.25))
    assert parts.fleet.speed.of("replica-0") == pytest.approx((640 - 32) / 0.25)


async def test_speed_is_that_at_a_prompts_beginning() -> None:
    """Half of a prefill's time is attention here, and more of it the deeper the prompt."""
    attention, rng = 1 / 320, random.Random(1)
    parts = Parts(replicas=1)
    parts.fleet.replicas["replica-0"].hello = msgspec.structs.replace(HELLO, attention=attention)
    for _ in range(100):
        cached = 16 * rng.randrange(36)
        work = effort(640 - cached, cached, attention)
        parts.account.close(answered(parts, cached=cached, seconds=work / 5_000))
    (view,) = parts.fleet.views(MODEL, IdentityMode.EXACT)
    assert view.prefill_tokens_per_s == pytest.approx(5_000)
    assert view.prefill_s(640, 0) == pytest.approx(2 * 640 / 5_000)


async def test_what_waits_counts_by_how_long_it_takes() -> None:
    parts = Parts(replicas=1)
    parts.fleet.replicas["replica-0"].hello = msgspec.structs.replace(HELLO, attention=1 / 320)
    parts.hold("replica-0", PROMPT.keys[:20])
    made = exchange(PROMPT)
    parts.place.place(made)
    assert parts.loads() == {"replica-0": (1, round(320 * (1 + (320 + 160) / 320)))}
    (view,) = parts.fleet.views(MODEL, IdentityMode.EXACT)
    assert view.queued_prefill_tokens / view.prefill_tokens_per_s == pytest.approx(view.prefill_s(320, 320))
    parts.place.unplace(made, answered=False)
    assert parts.loads() == {"replica-0": (0, 0)}


async def test_what_decoding_takes_is_learned_from_what_agents_say_of_it() -> None:
    """Ten sequences of 400 tokens take half of the time here."""
    parts, rng = Parts(replicas=2), random.Random(1)
    for name, replica in parts.fleet.replicas.items():
        replica.hello = msgspec.structs.replace(HELLO, replica_id=name)
    for _ in range(400):
        running = {name: rng.randrange(20) for name in parts.fleet.replicas}
        tickets = []
        for name, count in running.items():
            parts.tell(name, running=count, kv_usage=count * 400 / 16_000)
            tickets += [parts.fleet.replicas[name].load.admit(0) for _ in range(count)]
        made = answered(parts, cached=0)
        assert made.placement is not None
        made.first_byte_s = 640 / 5_000 * (1 + running[made.placement.replica] / 10)
        parts.account.close(made)
        for ticket in tickets:
            ticket.finish()
    parts.fleet.replicas["replica-0"].load.admit(0)
    parts.tell("replica-0", running=10, kv_usage=4_000 / 16_000)
    parts.tell("replica-1", running=0, kv_usage=0.0)
    busy, idle = parts.fleet.views(MODEL, IdentityMode.EXACT)
    assert idle.decode_share == 0.0
    assert busy.decode_share == pytest.approx(0.5, abs=0.05)
    assert idle.prefill_s(640, 0) == pytest.approx(640 / 5_000, rel=0.15)
    assert busy.prefill_s(640, 0) / idle.prefill_s(640, 0) == pytest.approx(2.0, rel=0.15)
    told = describe(parts.fleet.replicas["replica-0"], parts.fleet, parts.index)
    assert told["decoding"] == {"sequences": 10, "context": 4_000.0, "share": busy.decode_share}
    parts.fleet.replicas["replica-0"].reporting = False
    assert parts.fleet.views(MODEL, IdentityMode.EXACT)[0].decode_share == 0.0, "nobody says what it decodes"
    assert describe(parts.fleet.replicas["replica-0"], parts.fleet, parts.index)["decoding"] is None


async def test_nothing_is_learned_of_an_engine_that_lets_requests_wait() -> None:
    parts = Parts(replicas=1)
    before = parts.fleet.speed.of("replica-0")
    parts.tell("replica-0", waiting=1)
    parts.account.close(answered(parts, cached=0))
    assert parts.fleet.speed.of("replica-0") == before
    parts.tell("replica-0", waiting=0)
    parts.account.close(answered(parts, cached=0))
    assert parts.fleet.speed.of("replica-0") != before


async def test_no_speed_is_learned_where_kv_was_moved() -> None:
    parts = Parts()
    for name in parts.fleet.replicas:
        parts.pool(name)
    before = parts.fleet.speed.of("replica-0")
    parts.hold("replica-0", PROMPT.keys, Tier.DRAM)
    loaded = answered(parts)
    assert loaded.placement is not None
    assert (loaded.placement.replica, loaded.placement.predicted_pool_tokens) == ("replica-0", 624)
    parts.account.close(loaded)
    made = exchange(PROMPT)
    parts.fleet.replicas["replica-0"].load.sequences += 40
    parts.place.place(made)
    assert made.placement is not None
    assert (made.placement.reason, made.placement.predicted_cached_tokens) == (Reason.SPILL, 624)
    assert set(parts.loads().values()) == {(40, 0), (1, 16), (0, 0)}, "what is fetched is no queued prefill"
    parts.place.unplace(made, answered=False)
    fetched = answered(parts)
    receipt = parts.account.close(fetched)
    assert receipt.fetch is not None
    assert (receipt.fetch.source, receipt.fetch.tokens) == ("replica-0", 624)
    assert all(parts.fleet.speed.of(name) == before for name in parts.fleet.replicas)


async def test_retries_are_counted_by_attempts() -> None:
    parts = Parts()
    made = exchange(PROMPT)
    for _ in range(3):
        parts.place.place(made)
        parts.place.unplace(made, answered=False)
    parts.account.close(made)
    assert parts.count("prefix_gateway_retries_total") == 2


async def test_fallbacks_are_counted_by_reason() -> None:
    parts = Parts()
    text = identity(range(640), IdentityMode.TEXT)
    made = exchange(type(text)(mode=text.mode, keys=text.keys, tokens=text.tokens, fallback="deadline"))
    parts.place.place(made)
    parts.account.close(made)
    assert parts.count("prefix_gateway_identity_fallbacks_total", why="deadline") == 1


async def test_the_oldest_receipts_go_first() -> None:
    parts = Parts(receipts=3)
    for at in range(5):
        made = exchange(None)
        made.request_id = f"id-{at}"
        parts.account.close(made)
    assert [at for at in range(5) if parts.receipts.get(f"id-{at}")] == [2, 3, 4]


async def test_a_repeated_request_id_replaces_and_renews() -> None:
    receipts = Receipts(2)
    parts = Parts()
    for name, status in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        made = exchange(None)
        made.request_id, made.status = name, status
        receipts.add(parts.account.close(made))
    assert receipts.get("b") is None
    kept = receipts.get("a")
    assert kept is not None and kept.status == 3
