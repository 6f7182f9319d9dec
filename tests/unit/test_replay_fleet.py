"""What happens to requests on the simulated replicas, case by case."""

from __future__ import annotations

from array import array

import pytest
from replay_support import LLAMA, scenario

from gateway.replay.caches import match
from gateway.replay.fleet import NO_FETCH, Belief, Choice, Fetch, Fleet
from gateway.replay.physics import TPOT_S
from gateway.replay.rows import Row, Rows
from gateway.replay.workload import build
from kvstore.cost import LinkEstimate

ME = Belief(0, 0.0)
LINK = LinkEstimate(0.002, 25e9)


def prompts(*chains: list[int], output: int = 100) -> Rows:
    return Rows([Row(float(at), 512 * len(ids), output, None, array("Q", ids)) for at, ids in enumerate(chains)], 512)


def test_the_last_token_is_always_computed_and_prefills_wait_for_each_other() -> None:
    fleet = Fleet(build(prompts([1, 2, 3], [1, 2, 3], [9])), scenario())
    fleet.look(0.0, 0)
    first = fleet.place(0, Choice(1), ME)
    assert (first.cached, first.fetched, first.task.new) == (0, 0, 1536)
    assert first.task.prefill_end == LLAMA.prefill_s(1536, 0)
    assert first.task.end == first.task.prefill_end + 100 * TPOT_S
    fleet.look(0.0, 1)
    second = fleet.place(1, Choice(1), ME)
    assert (second.cached, second.task.new) == (1535, 1)
    assert second.task.prefill_end == first.task.prefill_end + LLAMA.prefill_s(1, 1535)
    fleet.look(1.0, 2)
    third = fleet.place(2, Choice(1), ME)
    share = LLAMA.decode_share(2, 2 * 1536)
    assert third.decode_share == share
    assert third.prefill_s == pytest.approx(LLAMA.prefill_s(512, 0) / (1 - share))


def test_without_a_word_the_longest_peer_is_read_and_keeps_its_copy() -> None:
    fleet = Fleet(build(prompts(list(range(40)), list(range(44)))), scenario(link=LINK))
    fleet.look(0.0, 0)
    fleet.place(0, Choice(0), ME)
    fleet.look(1.0, 1)
    moved = fleet.place(1, Choice(2), ME)
    assert (moved.cached, moved.fetched, moved.task.new) == (0, 40 * 512, 4 * 512)
    fetch_s = 0.002 + 40 * 512 * LLAMA.token_bytes / 25e9
    assert moved.task.prefill_end == pytest.approx(1.0 + fetch_s + LLAMA.prefill_s(4 * 512, 40 * 512))
    assert match(fleet.caches.held, fleet.workload.chains[0], 4) == [40, 0, 40, 0]
    assert (fleet.caches.copies, fleet.caches.distinct) == (84, 44)


def test_nothing_is_read_where_that_is_forbidden_or_slower() -> None:
    for link, fetch in ((LINK, NO_FETCH), (LinkEstimate(0.002, 1e9), None)):
        fleet = Fleet(build(prompts(list(range(40)), list(range(44)))), scenario(link=link))
        fleet.look(0.0, 0)
        fleet.place(0, Choice(0), ME)
        fleet.look(1.0, 1)
        assert fleet.place(1, Choice(2, fetch=fetch), ME).fetched == 0


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_placement_has_fetched_moves_but_for_what_is_to_stay(keeps: bool) -> None:
    chats = [[0, 1, 10 * chat, 10 * chat + 1, 10 * chat + 2] for chat in range(1, 6)]
    workload = build(prompts(*chats, chats[4], list(range(100, 103))))
    fleet = Fleet(workload, scenario(link=LinkEstimate(0.0, 1e15), cache_tokens=512 * 17, keeps_copies=keeps))
    for request in range(5):
        fleet.look(float(request), request)
        fleet.place(request, Choice(0), ME)
    fleet.look(9.0, 5)
    moved = fleet.place(5, Choice(1, fetch=Fetch(0, 4, keep=2)), ME)
    assert (moved.fetched, moved.task.new) == (4 * 512, 512)
    fleet.look(10.0, 6)
    gone = fleet.place(6, Choice(0), ME).stored.evicted
    last, first = workload.chains[4], workload.chains[0]
    if keeps:
        assert gone == [first[4], first[3], first[2]], "the oldest, tail first, whatever was read"
    else:
        assert gone == [last[3], last[2], first[4]], (
            "what was read goes first, tail first; then the oldest; not the system prompt"
        )


def test_one_cache_for_all_is_as_large_as_theirs_together() -> None:
    fleet = Fleet(build(prompts([1, 2], [1, 2, 3])), scenario(), pooled=True)
    assert fleet.caches.capacity_blocks == 4 * 30_000 // 512
    fleet.look(0.0, 0)
    fleet.place(0, Choice(3), ME)
    fleet.look(0.0, 1)
    assert fleet.matched == [2, 2, 2, 2]
    assert fleet.place(1, Choice(0), ME).cached == 1024
    fleet.caches.check()
