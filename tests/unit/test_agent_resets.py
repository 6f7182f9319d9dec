"""A prefix cache that was emptied on an idle engine, told from its metrics alone."""

from __future__ import annotations

import random

import msgspec
import pytest
from agent_support import (
    EngineStandIn,
    Publisher,
    agent_running,
    chain_of,
    mirroring,
    serving,
    settings_for,
    stored,
    tokens_of,
    until,
)
from loopback_ports import free_port

from replica_agent.load import EngineMetrics, parse_metrics
from replica_agent.resets import ResetWatch

IDLE = EngineMetrics(prompt_tokens=100.0)
RESET = msgspec.structs.replace(IDLE, resets=1.0)


def looks(*metrics: EngineMetrics) -> list[bool]:
    watch = ResetWatch()
    return [watch.look(each) for each in metrics]


def test_a_reset_counts_once_the_engine_has_stayed_idle() -> None:
    assert looks(IDLE, RESET, RESET, RESET) == [False, False, True, False]


def test_a_reset_from_before_the_first_look_does_not_count() -> None:
    assert looks(RESET, RESET, RESET) == [False, False, False]


def test_a_busy_engine_tells_itself() -> None:
    running = msgspec.structs.replace(RESET, running=1)
    waiting = msgspec.structs.replace(RESET, waiting=1)
    used = msgspec.structs.replace(RESET, prompt_tokens=150.0)
    for busy in (running, waiting):
        assert not any(looks(IDLE, busy, RESET, RESET))
        assert not any(looks(IDLE, RESET, busy, RESET))
    assert not any(looks(IDLE, RESET, used, used)), "a request came and brought the event"
    assert looks(IDLE, used, used) == [False, False, True], "the reset may have followed the request"


def test_without_a_count_of_tokens_nothing_shows_that_the_engine_was_idle() -> None:
    mute, reset = EngineMetrics(), EngineMetrics(resets=1.0)
    assert not any(looks(mute, reset, reset))


def test_an_announced_reset_is_not_made_twice() -> None:
    for before_the_rise in (True, False):
        watch = ResetWatch()
        watch.look(IDLE)
        if before_the_rise:
            watch.announced()
        watch.look(RESET)
        if not before_the_rise:
            watch.announced()
        assert not watch.look(RESET)
        assert not watch.look(RESET)
        twice = msgspec.structs.replace(RESET, resets=2.0)
        assert not watch.look(twice)
        assert watch.look(twice), "the next one counts again"


def test_which_calls_count() -> None:
    page = (
        b'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 7.0\n'
        b'http_requests_total{handler="/reset_prefix_cache",method="POST",status="2xx"} 2.0\n'
        b'http_requests_total{handler="/reset_prefix_cache",method="POST",status="5xx"} 4.0\n'
        b'http_requests_total{handler="/sleep",method="POST",status="2xx"} 1.0\n'
        b'http_requests_total{handler="/reset_mm_cache",method="POST",status="2xx"} 9.0\n'
    )
    assert parse_metrics(page, dp_rank=1) == EngineMetrics(resets=3.0)


@pytest.mark.parametrize("seed", range(20))
def test_it_clears_nothing_that_is_there_and_misses_no_quiet_reset(seed: int) -> None:
    """Beside an engine that does one thing after another, which tells of a reset with its next request."""
    rng, watch = random.Random(seed), ResetWatch()
    watch.look(EngineMetrics(prompt_tokens=0.0))
    held: set[int] = set()
    credited: set[int] = set()
    tokens = resets = 0
    untold = False
    since_look = {"resets": 0, "requests": 0, "told": 0}
    reset_alone = noticed = False
    for step in range(2000):
        action = rng.choices(("request", "reset", "refused reset", "look"), (3, 2, 1, 6))[0]
        busy = action == "refused reset"
        if action == "request":
            if untold:
                untold = False
                credited.clear()
                watch.announced()
                since_look["told"] += 1
            held.add(step)
            credited.add(step)
            tokens += 16
            since_look["requests"] += 1
        elif action == "reset":
            held.clear()
            untold = True
            resets += 1
            since_look["resets"] += 1
        else:
            resets += busy  # a request is running, and is still looked at
            metrics = EngineMetrics(prompt_tokens=float(tokens), resets=float(resets), running=int(busy))
            if watch.look(metrics):
                assert not held, "what is there is credited on"
                noticed = noticed or bool(credited)
                credited.clear()
            elif reset_alone and not since_look["requests"] and not busy:
                raise AssertionError("a reset of an idle engine went unnoticed")
            reset_alone = bool(since_look["resets"]) and not since_look["told"] and not busy
            since_look = dict.fromkeys(since_look, 0)
        watch.check()
        assert held <= credited
    assert noticed


async def test_an_agent_forgets_and_follows_on() -> None:
    """No new epoch and no replay: the engine's ring still says stored, and its stream goes on."""
    engine, events, replays = EngineStandIn(), free_port(), free_port()
    engine.waiting = 0
    publisher = Publisher(events, replays)
    try:
        publisher.publish(stored([1, 2], tokens_of(1) + tokens_of(2)))
        async with (
            serving(engine.app) as url,
            agent_running(settings_for(url, events, replays)) as (replica, agent),
            mirroring(agent) as mirror,
        ):
            await until(lambda: mirror.hbm == set(chain_of([1, 2])))
            epoch = mirror.epoch
            engine.resets = 1
            await until(lambda: not mirror.hbm)
            publisher.publish({"type": "AllBlocksCleared"}, stored([3], tokens_of(3)))
            await until(lambda: mirror.hbm == set(chain_of([3])))
            assert (mirror.epoch, replica.resyncs["silent_reset"]) == (epoch, 1)
            replica.check()
    finally:
        publisher.close()
