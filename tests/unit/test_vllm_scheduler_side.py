"""The connector in the scheduler: what it answers, however often it is asked, and what it has the ranks do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from naive_agent import NaiveAgent
from vllm_support import SIZE, Request, facts, keys_of, link_to, until

from kvstore import engine_messages as wire
from kvstore.engine_messages import DECISION_S
from kvstore.hint import NAME, Hint
from replica_agent.engines.vllm.scheduler_side import Scheduled, SchedulerSide
from replica_agent.engines.vllm.step import Cleared, Prefill, SaveOrder, Step

BLOCKS = 64


class Side:
    """A scheduler's side at an agent, and how often its engine was reset."""

    def __init__(self, agent: NaiveAgent, **more: Any) -> None:
        self.resets = 0
        self.agent = agent
        engine = facts(agent.path, **more)
        self.link = link_to(agent.path, engine, role="scheduler")
        self.real = SchedulerSide(
            self.link, block_size=SIZE, blocks=BLOCKS, ranks=1, loads=True, resets=lambda: self.resets
        )

    def ask(self, request: Request, computed: int = 0) -> tuple[int, bool]:
        """As vLLM asks: again and again."""
        deadline = time.monotonic() + 20 * DECISION_S
        while True:
            found, beside = self.real.matched(request, computed)
            self.real.check()
            if found is not None:
                return found, beside
            assert time.monotonic() < deadline
            self.real.step([])
            time.sleep(0.001)

    def admit(self, request: Request, blocks: list[int], *, computed: int = 0, tokens: int | None = None) -> Step:
        """A step that computes the rest of a request."""
        tokens = request.num_tokens - computed if tokens is None else tokens
        return self.real.step([Scheduled(request.request_id, blocks, True, computed, tokens)])


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[NaiveAgent]:
    with NaiveAgent(tmp_path / "agent.sock") as agent:
        yield agent


@contextmanager
def opened(agent: NaiveAgent, **more: Any) -> Iterator[Side]:
    side = Side(agent, **more)
    try:
        yield side
    finally:
        side.real.check()
        side.real.close()


def held(agent: NaiveAgent, request: Request, blocks: int) -> None:
    """The agent has the first blocks of a request."""
    agent.held |= {key: slot for slot, key in enumerate(request.block_hashes[:blocks])}


def asked(agent: NaiveAgent, kind: type) -> list[Any]:
    return [each for each in agent.asked if isinstance(each, kind)]


def test_what_the_agent_has_is_offered_once_and_stays_so(agent: NaiveAgent) -> None:
    request = Request("r", list(range(22)))
    held(agent, request, 3)
    with opened(agent) as side:
        for _ in range(5):
            assert side.ask(request) == (3 * SIZE, True)
        assert agent.count(wire.Prepare) == 1, "asked again and again, it asks once"
        side.real.allocated(request, [7, 8, 9], 3 * SIZE)
        step = side.real.step([])
        (load,) = step.loads
        assert (load.request, load.blocks, load.skip, step.fresh) == ("r", [7, 8, 9], 0, [7, 8, 9])
        assert load.deadline > time.monotonic()
        # It comes back when that is done, and when it has failed, and is not sought again.
        assert side.ask(request, 0) == (0, False)
        assert agent.count(wire.Prepare) == 1
        assert not asked(agent, wire.Cancel)
        side.real.finished(request)
        side.real.finished(request)
    assert not agent.count(wire.Cancel), "others end it"


def test_the_last_token_is_computed_and_short_prompts_are_not_asked_for(agent: NaiveAgent) -> None:
    with opened(agent) as side:
        whole = Request("whole", list(range(3 * SIZE)))
        held(agent, whole, 3)
        assert side.ask(whole) == (2 * SIZE, True)
        assert side.ask(Request("short", [1, 2, 3])) == (0, False)
        assert side.ask(Request("block", [1, 2, 3, 4])) == (0, False)
        assert side.ask(Request("cached", list(range(50, 50 + 2 * SIZE + 1))), 2 * SIZE) == (0, False)
        assert agent.count(wire.Prepare) == 1
        (prepare,) = asked(agent, wire.Prepare)
        assert (prepare.cached_blocks, prepare.prompt_tokens, len(prepare.keys)) == (0, 3 * SIZE, 2 * 32)


def test_an_undecided_agent_is_waited_for_and_then_done_without(agent: NaiveAgent) -> None:
    agent.pending = 1_000_000
    request = Request("r", list(range(22)))
    held(agent, request, 5)
    with opened(agent) as side:
        began = time.monotonic()
        assert side.real.matched(request, 0) == (None, False)
        assert side.ask(request) == (0, False)
        assert time.monotonic() - began >= DECISION_S
        until(lambda: agent.count(wire.Cancel) == 1, "the agent is told")
        assert side.ask(request) == (0, False)
        assert agent.count(wire.Prepare) == 1


def test_a_frozen_agent_keeps_nobody(agent: NaiveAgent) -> None:
    agent.silent.add(wire.Prepare)
    with opened(agent) as side:
        began = time.monotonic()
        for number in range(3):
            request = Request(f"r{number}", [number] * 22)
            assert side.ask(request) == (0, False)
        # Far less than a question's own limit, after which the connection is given up.
        assert time.monotonic() - began < 1.0
        until(lambda: side.link.client is None or side.link.client.closed, "the connection ends")


def test_what_was_cached_meanwhile_is_not_loaded(agent: NaiveAgent) -> None:
    grows = Request("grows", list(range(22)))
    held(agent, grows, 4)
    with opened(agent) as side:
        assert side.ask(grows, 0) == (4 * SIZE, True)
        assert side.ask(grows, 3 * SIZE) == (SIZE, True)
        side.real.allocated(grows, [1, 2, 3, 4], SIZE)
        (load,) = side.real.step([]).loads
        assert (load.blocks, load.skip) == ([4], 3)
        overtaken = Request("overtaken", list(range(22)))
        assert side.ask(overtaken, 0) == (4 * SIZE, True)
        assert side.ask(overtaken, 4 * SIZE) == (0, False)
        until(lambda: agent.count(wire.Release) == 1, "given back")
        assert agent.count(wire.Prepare) == 2


def test_what_was_evicted_meanwhile_is_sought_anew(agent: NaiveAgent) -> None:
    request = Request("r", list(range(22)))
    agent.held |= {key: slot for slot, key in enumerate(request.block_hashes)}
    with opened(agent) as side:
        assert side.ask(request, 2 * SIZE) == (3 * SIZE, True)
        assert side.ask(request, SIZE) == (4 * SIZE, True)
        first, second = asked(agent, wire.Prepare)
        assert first.request != second.request, "they cannot be mistaken for each other"
        until(lambda: agent.count(wire.Release) == 1, "the first is given back")


def test_a_resumed_request_is_sought_anew(agent: NaiveAgent) -> None:
    request = Request("r", list(range(22)))
    held(agent, request, 2)
    with opened(agent) as side:
        assert side.ask(request) == (2 * SIZE, True)
        side.real.allocated(request, [0, 1], 2 * SIZE)
        side.real.step([])
        assert side.ask(request) == (0, False)
        request.num_preemptions = 1
        request.tokens += [1, 2, 3]
        assert side.ask(request) == (2 * SIZE, True)
        assert agent.count(wire.Prepare) == 2


def test_a_request_that_ends_gives_back_what_it_was_promised(agent: NaiveAgent) -> None:
    with opened(agent) as side:
        request = Request("found", list(range(22)))
        held(agent, request, 2)
        assert side.ask(request) == (2 * SIZE, True)
        side.real.finished(request)
        until(lambda: agent.count(wire.Release) == 1, "released")
        agent.pending = 1_000_000
        undecided = Request("undecided", list(range(22)))
        assert side.real.matched(undecided, 0) == (None, False)
        side.real.finished(undecided)
        until(lambda: agent.count(wire.Cancel) == 1, "cancelled")
        until(lambda: not agent.working, "nothing is held")


def test_the_gateways_hint_is_passed_on_and_others_are_not(agent: NaiveAgent) -> None:
    hint = Hint(request="g", source="replica-1", url="http://127.0.0.1:1", blocks=3, deadline_ms=100)
    told = {"request": "g", "source": "replica-1", "url": "http://127.0.0.1:1", "blocks": 3, "deadline_ms": 100}
    with opened(agent) as side:
        for number, params in enumerate(({NAME: told}, {NAME: "x"}, {NAME: told | {"blocks": -1}}, {"other": 1}, None)):
            side.ask(Request(f"r{number}", list(range(22)), kv_transfer_params=params))
        assert [each.hint for each in asked(agent, wire.Prepare)] == [hint, None, None, None, None]


def test_an_adapters_blocks_are_nobody_elses(agent: NaiveAgent) -> None:
    request = Request("r", list(range(22)), lora_request=object())
    held(agent, request, 5)
    with opened(agent) as side:
        assert side.ask(request) == (0, False)
        side.real.allocated(request, [], 0)
        step = side.admit(request, [0, 1, 2, 3, 4, 5])
        assert (step.saves, step.fresh) == ([], [0, 1, 2, 3, 4, 5])
        assert not agent.count(wire.Prepare)


def test_blocks_are_saved_once_they_are_full_and_have_a_name(agent: NaiveAgent) -> None:
    request = Request("r", list(range(18)))
    keys = request.block_hashes
    with opened(agent) as side:
        side.ask(request)
        side.real.allocated(request, [], 0)
        # In chunks, the second of which ends within a block.
        step = side.admit(request, [5, 6], tokens=2 * SIZE)
        assert step.saves == [SaveOrder([5, 6], keys[:2], b"")]
        assert step.fresh == [5, 6]
        step = side.real.step([Scheduled("r", [7, 8], False, 2 * SIZE, SIZE + 2)])
        assert step.saves == [SaveOrder([7], keys[2:3], keys[1])]
        assert step.fresh == [7, 8]
        step = side.real.step([Scheduled("r", [9], False, 3 * SIZE + 2, 4)])
        assert step.saves == [SaveOrder([8], keys[3:4], keys[2])]
        # Decoding, one step ahead of the tokens that come back: the block is full before it has a name.
        step = side.real.step([Scheduled("r", [], False, 4 * SIZE + 2, 1)])
        assert not step.saves
        request.tokens.append(1)
        step = side.real.step([Scheduled("r", [], False, 4 * SIZE + 3, 1)])
        assert not step.saves
        request.tokens.append(2)
        request.block_hashes = keys_of(request.tokens)
        step = side.real.step([Scheduled("r", [10], False, 4 * SIZE + 4, 1)])
        assert step.saves == [SaveOrder([9], request.block_hashes[4:5], keys[3])]


def test_cached_blocks_are_offered_once_for_each_connection(agent: NaiveAgent) -> None:
    first, second = Request("a", list(range(13))), Request("b", [*range(12), 99, 98, 97, 96, 95])
    with opened(agent) as side:
        for request in (first, second):
            side.ask(request)
            side.real.allocated(request, [], 0)
        assert side.admit(first, [0, 1, 2, 3]).saves == [SaveOrder([0, 1, 2], first.block_hashes, b"")]
        step = side.admit(second, [0, 1, 2, 4, 5], computed=3 * SIZE)
        assert step.saves == [SaveOrder([4], second.block_hashes[3:], second.block_hashes[2])]
        assert step.fresh == [4, 5], "what was hit is not written anew"
        agent.hang_up()
        until(lambda: (client := side.link.client) is not None and not client.closed and len(agent.hellos) == 2, "back")
        third = Request("c", [*range(12), 7])
        side.ask(third)
        side.real.allocated(third, [], 0)
        assert side.admit(third, [0, 1, 2, 6], computed=3 * SIZE).saves == [
            SaveOrder([0, 1, 2], third.block_hashes, b"")
        ]


def test_loaded_blocks_are_not_saved_again_and_those_that_failed_are(agent: NaiveAgent) -> None:
    request = Request("r", list(range(4 * SIZE + 1)))
    held(agent, request, 3)
    with opened(agent) as side:
        assert side.ask(request) == (3 * SIZE, True)
        side.real.allocated(request, [4, 5, 6], 3 * SIZE)
        side.real.step([])
        # One of three came.
        side.real.allocated(request, [], 0)
        step = side.admit(request, [4, 5, 6, 7, 8], computed=SIZE)
        assert step.saves == [SaveOrder([5, 6, 7], request.block_hashes[1:], request.block_hashes[0])]


def test_nothing_is_sought_before_all_know_that_the_engine_was_reset(agent: NaiveAgent) -> None:
    with opened(agent) as side:
        request = Request("before", list(range(22)))
        held(agent, request, 5)
        assert side.ask(request) == (5 * SIZE, True)
        side.resets = 1
        assert side.ask(request) == (0, False), "what was found before is nothing any more"
        # Idle: the agent is told by itself.
        until(lambda: agent.count(wire.Clear) == 1, "cleared")
        assert side.ask(Request("unsure", list(range(22)))) == (0, False)
        assert side.real.step([]).clears == 1
        side.real.confirmed(Cleared({0: 1}))
        held(agent, request, 5)
        assert side.ask(Request("sure", list(range(22)))) == (5 * SIZE, True)
        side.real.clear()
        assert side.ask(Request("unsure again", list(range(22)))) == (0, False)
        until(lambda: agent.count(wire.Clear) == 2, "by hand, too")


def test_prefill_is_told_and_decoding_is_not(agent: NaiveAgent) -> None:
    with opened(agent) as side:
        assert side.admit(Request("p", list(range(40))), []).prefill == Prefill(40, 820)
        one = Scheduled("d", [], False, 10, 1)
        assert side.real.step([one]).prefill is None
        assert side.real.step([one, Scheduled("p", [], False, 10, 14)]).prefill is None
        assert side.real.step([one, Scheduled("p", [], False, 10, 15)]).prefill == Prefill(16, 11 + 150 + 120)
        assert side.real.step([]).prefill is None


def test_without_an_agent_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    with NaiveAgent(tmp_path / "agent.sock") as agent, opened(agent) as side:
        agent.refusal = "gone"
        agent.hang_up()
        until(lambda: side.link.client is None, "noticed")
        request = Request("r", list(range(22)))
        assert side.real.matched(request, 0) == (0, False)
        side.real.allocated(request, [], 0)
        step = side.admit(request, list(range(6)))
        assert not step.saves
