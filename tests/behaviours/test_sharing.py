"""Several gateways in front of the same replicas: what each knows of the others' placements, and what it does with it.

Real gateways, agents and HTTP; what several gateways do to waiting times is replayed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from http_support import eventually, serving_gateway
from sharing_support import settings_of, sharing

from gateway.demo.cluster import Cluster
from gateway.demo.questions import DOCUMENTS
from gateway.settings import ReplicaSettings, Settings

HOT = "an instruction that every request begins with. " * 100


async def test_every_gateway_counts_the_others_and_itself_once() -> None:
    async with sharing(replicas=3, gateways=2) as shared:
        for number in range(9):
            shared.send(number % 2, f"{number} prompt of its own")
        await eventually(lambda: sum(shared.placed()) == 9)
        await shared.settled()
        assert (sum(shared.own(0)), sum(shared.others(0))) == (5, 4)
        assert (sum(shared.own(1)), sum(shared.others(1))) == (4, 5)
        for gateway in shared.gateways:
            admin = (await shared.http.get(f"{gateway.admin_url}/admin/replicas")).json()
            name = admin["gateway"]["name"]
            for at, replica in enumerate(admin["replicas"]):
                (other,) = replica["others"]["gateways"]
                assert {name, other["gateway"]} == {"gateway-0", "gateway-1"}
                assert replica["others"]["state"] == "known"
                assert replica["running_sequences"] + other["sequences"] == shared.placed()[at]
            page = (await shared.http.get(f"{gateway.admin_url}/metrics")).text
            assert 'prefix_gateway_replica_other_gateways{replica="replica-0"} 1.0' in page
        await shared.let_go()
        await eventually(lambda: shared.placed() == [0, 0, 0])
        await shared.settled()


async def test_bursts_exceed_the_bounds_by_what_the_other_gateway_had_not_heard_of() -> None:
    """The law of `Bounds` for sequences holds at each admission for what its gateway knew; after every burst all is
    known again."""
    burst = 4
    async with sharing(replicas=3, gateways=2) as shared:
        for count in range(2 * burst, 14 * burst, 2 * burst):
            known = shared.placed()
            for gateway in (0, 1):
                for _ in range(burst):
                    shared.send(gateway, HOT)
            await eventually(lambda count=count: sum(shared.placed()) == count)
            now = shared.placed()
            for before, after in zip(known, now, strict=True):
                if after > before:
                    assert after <= 2 * sum(now) / 3 + 2 + burst, "over by no more than the other gateway's burst"
            await shared.settled()
        assert len([each for each in shared.placed() if each > burst]) > 1, "the load must be enough to spill"
        await shared.let_go()


async def test_one_after_the_other_they_keep_the_bounds_of_one() -> None:
    async with sharing(replicas=3, gateways=2) as shared:
        for number in range(20):
            before = shared.placed()
            shared.send(number % 2, HOT)
            await eventually(lambda count=number + 1: sum(shared.placed()) == count)
            await shared.settled()
            (at,) = [i for i in range(3) if shared.placed()[i] != before[i]]
            assert shared.placed()[at] <= 2 * (number + 1) / 3 + 2
        assert max(shared.placed()) > 8, "a hot prefix stays together as far as the bounds allow"
        await shared.let_go()


async def test_a_gateway_that_is_gone_counts_no_more() -> None:
    async with sharing(replicas=2, gateways=1) as shared:
        listed = [
            ReplicaSettings(id=replica.id, engine=str(replica.engine), agent=str(replica.agent))
            for replica in shared.gateways[0].gateway.fleet.replicas.values()
        ]
        async with serving_gateway(settings_of("second", listed)) as second:
            fleet = second.gateway.fleet
            await eventually(lambda: all(each.reporting for each in fleet.replicas.values()))
            ticket = fleet.replicas["replica-1"].load.admit(5_000)
            await eventually(lambda: shared.others(0) == [0, 1])
        # It has been stopped with the request in flight, as by kill -9: nobody says that it is over.
        await eventually(lambda: shared.others(0) == [0, 0])
        await eventually(lambda: all(agent.gateways.forgotten == 1 for agent in shared.agents))
        ticket.finish()


async def test_clients_of_the_engine_itself_count_too() -> None:
    async with sharing(replicas=3, gateways=1) as shared:
        replica = shared.gateways[0].gateway.fleet.replicas["replica-0"]
        for _ in range(12):
            shared.send_to(str(replica.engine), "not through a gateway")
        await eventually(lambda: replica.others.outside.sequences == 12)
        for number in range(3):
            shared.send(0, f"{number} of its own")
        await eventually(lambda: sum(shared.own(0)) == 3)
        assert shared.own(0)[0] == 0, "12 sequences are over the bound of three replicas with no others"
        await shared.let_go()
        await eventually(lambda: replica.others.outside.sequences == 0)


async def test_gateways_agree(cluster: Cluster) -> None:
    """The deployment's own gateway and one that has just been started: the same home for 99 % of prompts, some held
    already and most new. (`test_placement.py` has the same in virtual time, through restarts.)"""
    replicas = [
        ReplicaSettings(id=f"replica-{at}", engine=cluster.engine_url(at), agent=cluster.agent_url(at))
        for at in range(cluster.count)
    ]
    prompts: list[dict[str, Any]] = [
        {"model": "tiny", "prompt": document.text[:end], "max_tokens": 1}
        for document in DOCUMENTS
        for end in range(300, 1_500, 120)
    ]
    async with serving_gateway(Settings(replicas=replicas)) as second, httpx.AsyncClient(trust_env=False) as http:
        fleet = second.gateway.fleet
        await eventually(lambda: all(each.engine_up and each.reporting for each in fleet.replicas.values()))
        await eventually(lambda: all(len(each.others.gateways) == 1 for each in fleet.replicas.values()))
        for prompt in prompts[::10]:
            response = await http.post(f"{cluster.url}/v1/completions", json=prompt, timeout=60)
            assert response.status_code == 200

        async def explained(admin_url: str, prompt: dict[str, Any]) -> dict[str, Any]:
            found = (await http.post(f"{admin_url}/admin/explain", json=prompt, timeout=60)).json()
            assert found["identity"] == "exact", found
            placement: dict[str, Any] = found["placement"]
            return placement

        async def same_view() -> bool:
            """Both have heard of the blocks of the last answer."""
            ours, theirs = [await explained(url, prompts[-10]) for url in (second.admin_url, cluster.admin_url)]
            cached = [{c["replica"]: c["cached_tokens"] for c in each["candidates"]} for each in (ours, theirs)]
            return cached[0] == cached[1]

        for _ in range(500):
            if await same_view():
                break
            await asyncio.sleep(0.02)
        homes = [
            [(await explained(url, prompt))["home"] for prompt in prompts]
            for url in (second.admin_url, cluster.admin_url)
        ]
        agreed = sum(ours == theirs for ours, theirs in zip(*homes, strict=True))
        assert agreed >= 0.99 * len(prompts)
        assert len(set(homes[0])) == cluster.count
