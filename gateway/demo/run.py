"""`prefix-gateway demo`: start a deployment, play the scenario, say what happened, stay up until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os

import httpx

from gateway.demo.client import DemoClient, DemoError
from gateway.demo.cluster import Cluster, ClusterOptions, PartDied, Ports
from gateway.demo.interruption import Interrupted, Interruption
from gateway.demo.prepare import prepare_model
from gateway.demo.questions import DOCUMENTS
from gateway.demo.scenario import Phase, Scenario, Spill
from gateway.demo.screen import Screen, mib
from gateway.demo.verdicts import judge
from gateway.duplication.report import DuplicationReport, render_text

READY_S = 180.0
KV_TOKENS = {"smollm2": 4_000, "tiny": 6_000}
"""Room for two documents and their questions: 1,500 tokens a document, 2,400 in the tiny model's own tokenizer."""
POOL_BYTES = 256 * 1024 * 1024
"""Of shared memory for each agent, where the system has it, taken at the start: room for all documents."""
BURST_TOKENS = {"smollm2": 48, "tiny": 200}
"""A few seconds of decoding for each model."""


def run(options: argparse.Namespace) -> int:
    """0, or 1 when the scenario failed or `--check` found something wrong."""
    screen = Screen()
    cluster = Cluster(
        ClusterOptions(
            ports=_ports(options),
            model=options.model,
            served_name=options.model if options.model in ("smollm2", "tiny") else os.path.basename(options.model),
            kv_tokens=options.kv_tokens or KV_TOKENS.get(options.model, KV_TOKENS["smollm2"]),
            pool_bytes=POOL_BYTES if hasattr(os, "memfd_create") else 0,
        )
    )
    interruption = Interruption()
    interruption.install()
    with cluster:
        try:
            cluster.check_ports()
            prepare_model(options.model)
            status = asyncio.run(_play(cluster, screen, options, interruption))
        except (DemoError, PartDied, httpx.HTTPError) as error:
            screen.line(f"demo failed: {error}")
            status = 1
        except Interrupted:
            status = 130
        finally:
            interruption.ignore()
    left = cluster.leftovers()
    screen.verdict(
        not left, f"nothing is left running: {', '.join(left) or 'every process has ended, every port is free'}"
    )
    return 1 if left else status


def _ports(options: argparse.Namespace) -> Ports:
    count = range(options.replicas)
    return Ports(
        public=options.port,
        admin=options.admin_port,
        engines=[options.engine_port + at for at in count],
        agents=[options.agent_port + at for at in count],
        events=[options.events_port + at for at in count],
        replays=[options.replay_port + at for at in count],
    )


async def _play(cluster: Cluster, screen: Screen, options: argparse.Namespace, interruption: Interruption) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    playing = asyncio.current_task()
    assert playing is not None

    def interrupt() -> None:
        stop.set()
        playing.cancel()

    def signalled() -> None:
        loop.call_soon_threadsafe(interrupt)

    interruption.action = signalled
    async with contextlib.AsyncExitStack() as stack:
        try:
            ok = await _scenario(cluster, screen, options, stack)
            if options.check:
                return 0 if ok else 1
            screen.title("Still up. Try it, or press Ctrl-C to stop everything.")
            screen.line(
                f"  curl {cluster.url}/v1/chat/completions -H 'content-type: application/json' -d '"
                f'{{"model": "{cluster.options.served_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
            )
            screen.line(f"  curl {cluster.admin_url}/admin/duplication")
            await stop.wait()
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
            playing.uncancel()
            screen.line("\nstopping")
    return 0


async def _scenario(
    cluster: Cluster, screen: Screen, options: argparse.Namespace, stack: contextlib.AsyncExitStack
) -> bool:
    screen.title(
        f"{cluster.count} replicas of {options.model}, room for {cluster.options.kv_tokens} tokens of KV each: "
        f"two of the {len(DOCUMENTS)} documents"
    )
    screen.line("  starting engines, agents and the gateway ...")
    cluster.start_all()
    await cluster.wait_ready(READY_S)
    screen.line(f"  gateway on {cluster.url}/v1, admin on {cluster.admin_url}/admin")

    client = DemoClient(cluster.url, cluster.admin_url, cluster.options.served_name)
    stack.push_async_callback(client.close)
    http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30.0))
    engines = [cluster.engine_url(at) for at in range(cluster.count)]
    names = [f"replica-{at}" for at in range(cluster.count)]
    burst_tokens = BURST_TOKENS.get(options.model, BURST_TOKENS["smollm2"])
    pools = cluster.options.pool_bytes > 0
    scenario = Scenario(client, engines, http, screen, options.followups, options.seed, burst_tokens, names)

    screen.title("1. Scattered: every question to the next replica in turn")
    screen.columns()
    scattered = await scenario.scattered()
    scattered_report = await _report(http, cluster)
    screen.title("2. Routed: every question to the replica that holds its document")
    screen.columns()
    routed = await scenario.routed()
    routed_report = await _report(http, cluster)
    screen.title("3. A hot document: ten questions about one document at once, then one more")
    screen.columns()
    spill = await (scenario.hot() if pools else scenario.spill(DOCUMENTS[0]))

    for phase, report in ((scattered, scattered_report), (routed, routed_report)):
        screen.title(f"KV held more than once, {phase.name}")
        screen.line(render_text(report))
    screen.title("What happened")
    screen.line(_story(scattered, routed, spill))
    screen.title("Checked")
    verdicts = judge(scattered, routed, spill, pools=pools)
    for verdict in verdicts:
        screen.verdict(verdict.ok, verdict.text)
    return all(verdict.ok for verdict in verdicts)


async def _report(http: httpx.AsyncClient, cluster: Cluster) -> DuplicationReport:
    import msgspec

    response = await http.get(f"{cluster.admin_url}/admin/duplication", params={"top": 5})
    response.raise_for_status()
    return msgspec.json.decode(response.content, type=DuplicationReport)


def _story(scattered: Phase, routed: Phase, spill: Spill) -> str:
    saved = scattered.uncached_followups / max(1, routed.uncached_followups)
    return (
        f"  Scattered, the {len(scattered.followups)} follow-up questions made the engines compute "
        f"{scattered.uncached_followups:,} prompt tokens, although each document had been read before, by another "
        f"replica. {mib(scattered.recount.ledger_bytes)} of KV were held more than once. Routed, the same questions "
        f"cost {routed.uncached_followups:,} tokens ({saved:.0f} times fewer), the median first token came after "
        f"{routed.ttft_s * 1000:.0f} ms instead of {scattered.ttft_s * 1000:.0f} ms, and "
        f"{mib(routed.recount.ledger_bytes)} were held more than once. When {len(spill.burst)} questions about "
        f"{spill.document} came at once, {spill.home} took as many as its bound "
        f"allows and {len(spill.spilled)} spilled to {spill.next}, the next on the ring. {_fetch_story(spill)} The "
        f"question after the burst went to {spill.after.replica} again."
    )


def _fetch_story(spill: Spill) -> str:
    if not spill.fetches:
        return "It computed the document once more."
    moved, seconds, instead = spill.fetch_totals
    return (
        f"It did not compute the document: its agent read {moved:,} tokens of KV from {spill.home} in "
        f"{seconds * 1000:.0f} ms, where computing them was expected to take {instead * 1000:.0f} ms."
    )
