"""What gateways announce at an agent: whose load is known, for how long, and what is not taken."""

from __future__ import annotations

import random

import httpx
import msgspec
import pytest
from agent_support import EngineStandIn, agent_running, mirroring, serving, settings_for, until
from loopback_ports import free_port

from kvstore.messages import MAX_GATEWAYS, GatewayLoad
from replica_agent.gateways import SILENT_S, Gateways


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def load(gateway: str = "a", sequences: int = 1, tokens: int = 10, epoch: int = 1) -> GatewayLoad:
    return GatewayLoad(gateway=gateway, epoch=epoch, prefill_tokens=tokens, sequences=sequences)


def test_others_hear_of_changes_alone() -> None:
    gateways = Gateways(clock=Clock())
    assert gateways.announced(load("a")) is False, "nobody else is there"
    assert gateways.announced(load("b")) is True, "a newcomer"
    assert gateways.announced(load("b")) is False
    assert gateways.announced(load("a", sequences=2)) is True
    assert gateways.heard() == [load("b"), load("a", sequences=2)]


def test_a_second_life_is_another_gateway_until_the_first_is_forgotten() -> None:
    clock = Clock()
    gateways = Gateways(clock=clock)
    gateways.announced(load("a", sequences=5, epoch=1))
    clock.now += SILENT_S / 2
    gateways.announced(load("a", sequences=0, epoch=2))
    assert [each.sequences for each in gateways.heard()] == [5, 0]
    clock.now += SILENT_S / 2 + 0.01
    assert [each.epoch for each in gateways.heard()] == [2]
    assert gateways.forgotten == 1


def test_no_more_gateways_than_the_limit_and_room_again_when_one_is_silent() -> None:
    clock = Clock()
    gateways = Gateways(clock=clock)
    for number in range(MAX_GATEWAYS):
        assert gateways.announced(load(f"g{number}")) is not None
    assert gateways.announced(load("late")) is None
    assert gateways.announced(load("g0", sequences=3)) is True, "one that is known is heard"
    assert (len(gateways), gateways.refused) == (MAX_GATEWAYS, 1)
    clock.now += SILENT_S + 0.01
    assert gateways.announced(load("late")) is not None
    assert [each.gateway for each in gateways.heard()] == ["late"]


@pytest.mark.parametrize("seed", range(3))
def test_as_a_plain_list_would_have_it(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    gateways = Gateways(4, clock)
    plain: list[tuple[float, GatewayLoad]] = []
    refused = 0
    for _ in range(2_000):
        clock.now += rng.choice([0.0, 0.01, 0.3])
        said = load(rng.choice("abcdef"), rng.randrange(3), epoch=rng.randrange(2))
        plain = [(at, each) for at, each in plain if clock.now - at <= SILENT_S]
        rest = [(at, each) for at, each in plain if (each.gateway, each.epoch) != (said.gateway, said.epoch)]
        changed = gateways.announced(said)
        if len(rest) == 4:
            refused += 1
            assert changed is None
        else:
            assert changed is (bool(rest) and said not in [each for _, each in plain])
            plain = [*rest, (clock.now, said)]
        gateways.check()
        assert gateways.heard() == [each for _, each in plain]
    assert gateways.refused == refused > 0
    assert gateways.forgotten > 0


BAD = [
    (b"", "invalid_load", "not a load: "),
    (b'{"gateway": "a", "epoch": 1, "prefill_tokens": 0}', "invalid_load", "sequences"),
    (b'{"gateway": "a", "epoch": 1, "prefill_tokens": 0, "sequences": -1}', "invalid_load", "sequences: "),
    (b'{"gateway": "a", "epoch": 1, "prefill_tokens": 0, "sequences": 4294967296}', "invalid_load", "sequences: "),
    (b'{"gateway": "a", "epoch": 1, "prefill_tokens": 1.5, "sequences": 1}', "invalid_load", "prefill_tokens: "),
    (b'{"gateway": "a", "epoch": -2, "prefill_tokens": 0, "sequences": 1}', "invalid_load", "epoch: "),
    (b'{"gateway": "a b", "epoch": 1, "prefill_tokens": 0, "sequences": 1}', "invalid_load", "gateway: "),
    (b'{"gateway": "a\\n", "epoch": 1, "prefill_tokens": 0, "sequences": 1}', "invalid_load", "gateway: "),
    (b'{"gateway": "", "epoch": 1, "prefill_tokens": 0, "sequences": 1}', "invalid_load", "gateway: "),
    (b'\xff{"gateway"', "invalid_load", ""),
    (b"[" * 4_000, "invalid_load", ""),
    (b" " * 5_000, "body_too_large", "4096"),
]


async def test_over_http_loads_reach_every_stream_and_bad_ones_are_named() -> None:
    engine = EngineStandIn()
    async with serving(engine.app) as url:
        settings = msgspec.structs.replace(settings_for(url, free_port(), None), token="t")
        headers = {"authorization": "Bearer t"}
        async with agent_running(settings) as (replica, agent), httpx.AsyncClient(trust_env=False) as client:
            async with mirroring(agent, headers) as one, mirroring(agent, headers) as two:
                for body, code, named in BAD:
                    answer = await client.post(f"{agent}/v1/load", content=body, headers=headers)
                    assert answer.status_code in (400, 413)
                    assert answer.json()["error"]["code"] == code
                    assert named in answer.json()["error"]["message"], (body[:80], answer.text)
                assert (await client.get(f"{agent}/v1/load", headers=headers)).status_code == 405
                assert (await client.post(f"{agent}/v1/load", json={})).status_code == 401
                assert replica.gateways.heard() == []
                said = [load("a", 2, 700), load("b", 0, 0)]
                for each in said:
                    body = msgspec.json.encode(each)
                    assert (await client.post(f"{agent}/v1/load", content=body, headers=headers)).status_code == 204
                for mirror in (one, two):
                    await until(lambda m=mirror: m.heartbeat is not None and m.heartbeat.gateways == said, "heard")
                await until(lambda: one.heartbeat is not None and one.heartbeat.gateways == [], "forgotten")
                page = (await client.get(f"{agent}/metrics")).text
                assert "replica_agent_load_announcements_total 2.0" in page
                assert "replica_agent_gateways_forgotten_total 2.0" in page
                assert "replica_agent_gateways 0.0" in page
                for number in range(MAX_GATEWAYS):
                    await client.post(
                        f"{agent}/v1/load", content=msgspec.json.encode(load(f"g{number}")), headers=headers
                    )
                answer = await client.post(f"{agent}/v1/load", content=msgspec.json.encode(load("z")), headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_gateways")
                replica.check()
