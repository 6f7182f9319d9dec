"""What computing takes whose KV a whole fetch moves: 2,048 tokens, on the reference engine, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import sys
import time

import httpx

from kvstore.flops import ModelShape, prefill_flops
from replica_agent.bench.peer import HOST
from replica_agent.bench.report import Recompute
from replica_agent.bench.whole import BLOCK_BYTES, BLOCK_TOKENS, HEAD_DIM, KV_HEADS, LAYERS, SLOTS, free_port

TOKENS = SLOTS * BLOCK_TOKENS
NAMED_FLOPS_PER_S = 1e12
"""Where the engine cannot run: operations a second that the figure is computed for, and that it names."""

_MODEL = "smollm2"
_CONFIG = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "vocab_size": 49_152,
    "max_position_embeddings": 8_192,
    "tie_word_embeddings": True,
}
_ROUNDS = 3
_START_S = 60.0
_SECTION_S = 60.0


async def recompute(model: str = _MODEL) -> Recompute:
    """Time to the first token of fresh prompts, after a short one that warms up; an estimate where the engine, or the
    model, is not installed, or takes over a minute."""
    megabytes = SLOTS * BLOCK_BYTES / 1e6
    try:
        async with asyncio.timeout(_START_S + _SECTION_S):
            seconds = await _measured(model)
    except (RuntimeError, TimeoutError, httpx.HTTPError) as error:
        estimate = prefill_flops(ModelShape.from_config(_CONFIG), TOKENS) / NAMED_FLOPS_PER_S
        return Recompute(
            tokens=TOKENS,
            megabytes=megabytes,
            ms=round(estimate * 1e3, 2),
            by=f"estimated for SmolLM2-135M at {NAMED_FLOPS_PER_S / 1e12:g} TFLOP/s",
            not_measured=str(error) or type(error).__name__,
        )
    by = f"the reference engine, {model}, {len(os.sched_getaffinity(0))} threads of the CPU"
    return Recompute(tokens=TOKENS, megabytes=megabytes, ms=round(statistics.median(seconds) * 1e3, 2), by=by)


async def _measured(model: str) -> list[float]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "replica_agent.reference", "--model", model, "--served-model-name", "bench"),
        *("--host", HOST, "--port", str(port), "--kv-tokens", str(2 * TOKENS)),
        *("--kv-events-endpoint", "none", "--kv-replay-endpoint", "none"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", trust_env=False, timeout=_SECTION_S) as http:
            while not await _answers(http):
                if process.returncode is not None:
                    raise RuntimeError(f"the reference engine does not start with {model}: see `prefix-gateway engine`")
                await asyncio.sleep(0.1)
            rng = random.Random(0)
            await _first_token(http, [rng.randrange(1_000, 4_000) for _ in range(64)])
            return [
                await _first_token(http, [rng.randrange(1_000, 4_000) for _ in range(TOKENS)]) for _ in range(_ROUNDS)
            ]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answers(http: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await http.get("/health")).is_success
    return False


async def _first_token(http: httpx.AsyncClient, prompt: list[int]) -> float:
    began = time.perf_counter()
    response = await http.post(
        "/v1/completions", json={"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    )
    response.raise_for_status()
    return time.perf_counter() - began
