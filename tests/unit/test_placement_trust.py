"""What replicas' claims are worth: single answers, and thousands of random steps against a plain twin."""

from __future__ import annotations

import random

import pytest
from path_support import Clock, Parts, exchange, identity

from gateway.identity.prompt import IdentityMode
from gateway.path.exchange import Exchange
from gateway.path.usage import PromptTokensDetails, Usage
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import Claims, ReplicaView
from gateway.placement.placer import Placer
from gateway.placement.trust import Expectation, Standing, Trust
from kvstore.cost import LinkEstimate
from kvstore.messages import FetchState, Tier

PROMPT = identity(range(641))
KEYS = list(PROMPT.keys)


class Judge:
    """A trust over an index with one replica that holds `PROMPT`, and what was said of quarantines."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.quarantined: list[str] = []
        self.failed = 0
        self.index = PrefixIndex()
        self.index.add_replica("a")
        self.index.store("a", Tier.HBM, KEYS, [0, *KEYS[:-1]])
        self.trust = Trust(
            self.clock,
            failed_tokens=lambda request_id: self.failed,
            on_quarantine=lambda replica, why: self.quarantined.append(replica),
        )
        self.index.add_listener(self.trust)

    def request(self, cached: int, tokens: int = 640) -> None:
        """One request that is answered and judged."""
        expectation = self.trust.expect("a", "id", KEYS[tokens // 16 - 1], tokens, 16)
        assert expectation is not None
        self.trust.answered(expectation, cached)
        self.clock.now += 0.6
        self.trust.heard("a")
        self.trust.check()


def test_who_was_never_compared_is_trusted() -> None:
    state = Judge().trust.state("a")
    assert (state.standing, state.credit, state.judged, state.why) == (
        Standing.TRUSTED,
        1.0,
        0,
        "no request has been compared yet",
    )


def test_a_block_less_than_reported_is_no_contradiction() -> None:
    judge = Judge()
    judge.request(624)
    judge.request(9_999)
    state = judge.trust.state("a")
    assert (state.value, state.judged, state.contradicted) == (1.0, 2, 0)


def test_claims_are_worth_the_average_of_what_was_there() -> None:
    """An engine that has 60 % of what it reports: within ten requests its claims are multiplied by nearly that."""
    judge = Judge()
    credits = []
    for _ in range(20):
        judge.request(384)
        credits.append(judge.trust.credit("a"))
    assert credits == sorted(credits, reverse=True)
    assert credits[0] == 1.0, "0.92: one that is nearly whole is taken whole"
    assert 0.6 < credits[9] < 0.65
    assert judge.quarantined == []
    assert judge.trust.state("a").standing is Standing.DISCOUNTED


def test_the_first_gross_contradiction_is_a_quarantine_and_the_next_takes_twice_as_long() -> None:
    judge = Judge()
    judge.request(0)
    assert (judge.quarantined, judge.trust.credit("a")) == (["a"], 0.0)
    assert judge.trust.state("a").standing is Standing.QUARANTINED
    judge.clock.now += 5.0
    assert judge.trust.credit("a") == 0.5
    judge.request(0)
    judge.clock.now += 9.9
    assert judge.trust.credit("a") == 0.0
    judge.clock.now += 0.2
    assert 0 < judge.trust.credit("a") < 0.5
    assert judge.trust.state("a").quarantines == 2


def test_who_was_wholly_trusted_in_between_starts_with_a_short_one_again() -> None:
    judge = Judge()
    judge.request(0)
    judge.request(0)
    for _ in range(12):
        judge.request(640)
    assert judge.trust.credit("a") == 1.0
    judge.request(0)
    assert judge.trust.state("a").quarantined_s == pytest.approx(5.0)


def test_tokens_that_failed_to_load_were_not_cached() -> None:
    """vLLM counts them as cached."""
    judge = Judge()
    judge.failed = 640
    judge.request(640)
    assert judge.quarantined == ["a"]


def test_what_was_reported_gone_is_not_judged() -> None:
    judge = Judge()
    gone = judge.trust.expect("a", "1", KEYS[39], 640, 16)
    kept = judge.trust.expect("a", "2", KEYS[19], 320, 16)
    assert gone is not None and kept is not None
    judge.index.remove("a", Tier.HBM, KEYS[30:])
    assert (gone.live, kept.live) == (False, True)
    judge.trust.answered(gone, 0)
    judge.trust.answered(kept, 320)
    judge.clock.now += 1
    judge.trust.heard("a")
    assert (judge.trust.state("a").judged, judge.trust.state("a").contradicted) == (1, 0)
    judge.index.store("a", Tier.DRAM, KEYS, [0, *KEYS[:-1]])
    again = judge.trust.expect("a", "3", KEYS[9], 160, 16)
    judge.index.remove("a", Tier.DRAM, KEYS)
    assert again is not None and again.live, "the pool is not what is judged"
    judge.index.clear("a")
    assert not again.live
    judge.trust.check()


def test_nothing_is_judged_before_its_time_or_without_a_heartbeat() -> None:
    judge = Judge()
    expectation = judge.trust.expect("a", "1", KEYS[39], 640, 16)
    assert expectation is not None
    judge.trust.heard("a")
    judge.trust.answered(expectation, 0)
    judge.clock.now += 0.4
    judge.trust.heard("a")
    judge.clock.now += 10.0
    assert judge.quarantined == []
    judge.trust.heard("b")
    assert judge.quarantined == []
    judge.trust.heard("a")
    assert judge.quarantined == ["a"]


def test_a_claim_of_one_block_cannot_be_contradicted() -> None:
    assert Judge().trust.expect("a", "1", KEYS[0], 16, 16) is None


@pytest.mark.parametrize("trust", [0.0, 0.3, 1.0])
def test_placement_believes_a_claim_in_proportion_and_in_whole_blocks(trust: float) -> None:
    index = PrefixIndex()
    for replica in "ab":
        index.add_replica(replica)
        for tier in (Tier.HBM, Tier.DRAM):
            index.store(replica, tier, KEYS[3::4], [0, *KEYS[3:-4:4]])
    pool = FetchState(namespace="n", acts=True, slots=100, link=LinkEstimate(0.001, 1e9), links={})
    for fetch in (None, pool):
        views = [
            ReplicaView(
                id=replica,
                claims=Claims.REPORTS,
                prefill_tokens_per_s=1_000.0,
                block_units=4,
                block_bytes=64,
                trust=trust,
                fetch=fetch,
            )
            for replica in "ab"
        ]
        placement = Placer(index).place(PROMPT, views)
        assert (placement.reported_tokens, placement.trust) == (640, trust)
        assert placement.predicted_cached_tokens == int(640 * trust) // 64 * 64
        assert {each.cached_tokens for each in placement.candidates} == {placement.predicted_cached_tokens}
        assert placement.fetch is None, "who holds as much itself fetches nothing"


def test_who_is_not_believed_is_no_source() -> None:
    """A third replica is told to fetch from the one that holds the prompt, as long as that one is believed."""
    clock = Clock()
    parts = Parts(2, allow_pinning=True, trust_clock=clock)
    for replica in ("replica-0", "replica-1"):
        parts.pool(replica)
    parts.hold("replica-0", KEYS, Tier.HBM, Tier.DRAM)

    def asked(replica: str, cached: int) -> Exchange:
        made = exchange(PROMPT, headers={"x-gateway-pin": replica})
        parts.place.place(made)
        made.usage = Usage(prompt_tokens=641, prompt_tokens_details=PromptTokensDetails(cached_tokens=cached))
        parts.place.unplace(made, answered=True)
        clock.now += 0.6
        parts.trust.heard(replica)
        return made

    assert (placed := asked("replica-1", 0).placement) is not None and placed.fetch is not None
    assert (placed := asked("replica-0", 0).placement) is not None and placed.reported_tokens == 640
    assert parts.trust.credit("replica-0") == 0.0
    assert (placed := asked("replica-1", 0).placement) is not None and placed.fetch is None
    parts.trust.check()


@pytest.mark.parametrize(
    "unlike",
    ["no usage", "no figure", "other length", "not answered", "text"],
)
def test_what_says_nothing_of_the_reports_is_not_judged(unlike: str) -> None:
    parts = Parts(1, trust_clock=(clock := Clock()))
    parts.hold("replica-0", KEYS)
    made = exchange(identity(range(641), IdentityMode.TEXT) if unlike == "text" else PROMPT)
    parts.place.place(made)
    assert (made.expectation is None) is (unlike == "text")
    details = None if unlike == "no figure" else PromptTokensDetails(cached_tokens=0)
    tokens = 640 if unlike == "other length" else 641
    made.usage = None if unlike == "no usage" else Usage(prompt_tokens=tokens, prompt_tokens_details=details)
    parts.place.unplace(made, answered=unlike != "not answered")
    clock.now += 10
    parts.trust.heard("replica-0")
    assert parts.trust.state("replica-0").judged == 0
    parts.trust.check()


class Twin:
    """The rules again, told over a plain list of everything that happened."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.asked: list[dict[str, object]] = []
        self.values: dict[str, float] = {}
        self.until: dict[str, float] = {}
        self.strikes: dict[str, int] = {}
        self.quarantined: list[str] = []

    def heard(self, replica: str) -> None:
        for each in self.asked:
            if each["replica"] == replica and each["state"] == "answered" and self.clock.now >= each["due"]:  # type: ignore[operator]
                each["state"] = "judged"
                claimed, actual = each["tokens"], each["cached"]
                assert isinstance(claimed, int) and isinstance(actual, int)
                share = actual / claimed if claimed - actual > 16 else 1.0
                value = self.values.get(replica, 1.0)
                self.values[replica] = value = value + 0.2 * (share - value)
                if share == 1.0:
                    if value >= 0.9:
                        self.strikes[replica] = 0
                elif share < 0.5 and self.until.get(replica, 0.0) <= self.clock.now:
                    strikes = self.strikes.get(replica, 0)
                    self.values[replica] = min(value, 0.5)
                    self.until[replica] = self.clock.now + min(5.0 * 2**strikes, 320.0)
                    self.strikes[replica] = strikes + 1
                    self.quarantined.append(replica)

    def credit(self, replica: str) -> float:
        if self.until.get(replica, 0.0) > self.clock.now:
            return 0.0
        value = self.values.get(replica, 1.0)
        return 1.0 if value >= 0.9 else value


@pytest.mark.parametrize("seed", range(4))
def test_trust_equals_its_twin(seed: int) -> None:
    rng = random.Random(seed)
    judge = Judge()
    twin = Twin(judge.clock)
    index, trust = judge.index, judge.trust
    index.add_replica("b")
    index.store("b", Tier.HBM, KEYS, [0, *KEYS[:-1]])
    flying: list[tuple[Expectation, dict[str, object]]] = []
    for step in range(3_000):
        replica, action = rng.choice("ab"), rng.random()
        if action < 0.4:
            blocks = rng.randrange(2, 41)
            made = trust.expect(replica, str(step), KEYS[blocks - 1], 16 * blocks, 16)
            assert made is not None
            told: dict[str, object] = {"replica": replica, "tokens": 16 * blocks, "state": "asked"}
            twin.asked.append(told)
            flying.append((made, told))
        elif action < 0.75 and flying:
            made, told = flying.pop(rng.randrange(len(flying)))
            if rng.random() < 0.1:
                trust.drop(made)
                told["state"] = "over" if told["state"] == "asked" else told["state"]
            else:
                cached = made.tokens if rng.random() < 0.8 else 16 * rng.randrange(made.tokens // 16)
                trust.answered(made, cached)
                if told["state"] == "asked":
                    told |= {"state": "answered", "cached": cached, "due": judge.clock.now + 0.5}
                    twin.asked.append(twin.asked.pop(twin.asked.index(told)))  # judged in the order of the answers
        elif action < 0.8:
            blocks = rng.randrange(1, 41)
            index.remove(replica, Tier.HBM, KEYS[blocks:])
            for told in twin.asked:
                if told["replica"] == replica and told["tokens"] > 16 * blocks and told["state"] != "judged":  # type: ignore[operator]
                    told["state"] = "over"
            index.store(replica, Tier.HBM, KEYS, [0, *KEYS[:-1]])
        elif action < 0.95:
            judge.clock.now += rng.random()
        else:
            trust.heard(replica)
            twin.heard(replica)
        for name in "ab":
            assert trust.credit(name) == pytest.approx(twin.credit(name)), (step, name)
        if step % 100 == 0:
            trust.check()
    trust.check()
    assert judge.quarantined == twin.quarantined
    assert len(twin.quarantined) > 3
    assert sum(trust.state(name).judged for name in "ab") == sum(told["state"] == "judged" for told in twin.asked) > 100
