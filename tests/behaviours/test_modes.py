"""How prompts are identified, exact, then text, then hash, is told for every model: by receipt, metric and admin."""

from __future__ import annotations

from claimed_cluster import Claimed, claimed_cluster, prompt
from identity_support import model_files

from gateway.identity.prompt import IdentityMode

TEXT = "The fox went over the hill, and what it saw there it kept to itself. " * 8


async def _told(cluster: Claimed, model: str, mode: IdentityMode, why: str) -> None:
    """Admin API and metrics say so of a model."""
    admin = (await cluster.http.get(f"{cluster.running.admin_url}/admin/replicas")).json()["identity"][model]
    assert (admin["mode"], admin["why"]) == (mode, why)
    lines = await cluster.metrics()
    for each in IdentityMode:
        value = 1.0 if each is mode else 0.0
        assert f'prefix_gateway_identity_mode{{mode="{each}",model="{model}"}} {value}' in lines
    value = 1.0 if mode is IdentityMode.EXACT else 0.0
    assert f'prefix_gateway_identity_exact{{model="{model}"}} {value}' in lines


async def test_modes_are_visible_per_model() -> None:
    """One model goes through text, exact and text again as its files come and its parity goes; another has no agent."""
    async with claimed_cluster(bare="bare") as cluster:
        identifier = cluster.gateway._identifier
        await _told(cluster, "m", IdentityMode.TEXT, "no_tokenizer")
        await _told(cluster, "bare", IdentityMode.HASH, "no_agent")
        found = await cluster.ask(TEXT)
        assert (found["identity"], found["identity_fallback"]) == ("text", "no_tokenizer")
        found = await cluster.ask(prompt(1))
        assert (found["identity"], found["identity_fallback"]) == ("exact", ""), "token ids need no tokenizer"

        await identifier.load(model_files("tiny", served="m"))
        identifier.set_parity("m", True, "proven")
        await _told(cluster, "m", IdentityMode.EXACT, "")
        found = await cluster.ask(TEXT)
        assert (found["identity"], found["identity_fallback"]) == ("exact", "")

        identifier.set_parity("m", False, "the engine has other ids")
        await _told(cluster, "m", IdentityMode.TEXT, "the engine has other ids")
        found = await cluster.ask(TEXT)
        assert (found["identity"], found["identity_fallback"]) == ("text", "no_parity")
        found = await cluster.ask(TEXT, model="bare")
        assert (found["identity"], found["identity_fallback"], found["reason"]) == ("hash", "no_agent", "fallback")

        lines = await cluster.metrics()
        for model, mode, count in (("m", "exact", 2), ("m", "text", 2), ("bare", "hash", 1)):
            assert f'prefix_gateway_identified_prompts_total{{mode="{mode}",model="{model}"}} {count}.0' in lines


async def test_hit_rates_are_told() -> None:
    """One document on both replicas: the second reader found nothing there, one cache would have had all of it."""
    async with claimed_cluster(2) as cluster:
        await cluster.ask(prompt(1), pin=0)
        await cluster.ask(prompt(1), pin=1)
        await cluster.ask(prompt(1), pin=1)
        report = (await cluster.http.get(f"{cluster.running.admin_url}/admin/duplication")).json()
        (rate,) = report["hit_rates"]
        assert (rate["model"], rate["requests"], rate["prompt_tokens"]) == ("m", 3, 3 * 321)
        assert (rate["cached_tokens"], rate["reachable_tokens"], rate["ideal_tokens"]) == (320, 640.0, 640.0)
        assert (rate["achieved"], rate["reachable"], rate["ideal"]) == (320 / 963, 640 / 963, 640 / 963)
        lines = await cluster.metrics()
        for kind, tokens in (("prompt", 963), ("achieved", 320), ("reachable", 640), ("ideal", 640)):
            assert f'prefix_gateway_hit_rate_tokens_total{{kind="{kind}",model="m"}} {tokens}.0' in lines
        assert f'prefix_gateway_hit_rate{{kind="achieved",model="m"}} {320 / 963}' in lines
