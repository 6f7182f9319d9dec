"""Fetching between real vLLM servers that split the model differently over ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from vllm_engine import prompt_of
from vllm_models import model_directory
from vllm_pool import PooledEngine, start_all
from vllm_server import BLOCK

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[PooledEngine, PooledEngine]]:
    """One rank, and two."""
    model = model_directory("tiny")
    with (
        PooledEngine(model, "replica-0", kv_tokens=64 * BLOCK, core="0") as one,
        PooledEngine(model, "replica-1", kv_tokens=64 * BLOCK, core="0|1", tp=2) as two,
    ):
        start_all((one, two))
        yield one, two


@pytest.mark.parametrize("direction", ["one to two", "two to one"])
def test_ranks_are_no_part_of_a_block(engines: tuple[PooledEngine, PooledEngine], direction: str) -> None:
    source, reader = engines if direction == "one to two" else engines[::-1]
    rng = random.Random(direction)
    whole = 0
    for _ in range(60):
        parts = [rng.randrange(10**9) for _ in range(rng.randrange(1, 12))]
        prompt = prompt_of(*parts, extra=rng.choice((1, 60)))
        expected = source.complete(prompt)
        source.wait_saved(len(parts))
        answer = reader.complete(prompt, **source.hint(prompt))
        assert answer.tokens == expected.tokens
        assert answer.cached in (0, len(parts) * BLOCK)
        whole += answer.cached > 0
        if whole == 10:
            break
    assert whole == 10, "all that a busy host does not answer too late"
    for engine in engines:
        engine.wait_quiet()
