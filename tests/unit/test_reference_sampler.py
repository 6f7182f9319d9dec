"""Choosing tokens."""

from __future__ import annotations

from collections import Counter

import torch

from replica_agent.reference.sampler import Sampler
from replica_agent.reference.sequence import SamplingParams

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -5.0])


def draws(count: int = 400, **params: float | int | None) -> Counter[int]:
    sampler = Sampler(SamplingParams(max_tokens=1, **params), 0)  # type: ignore[arg-type]
    return Counter(sampler.draw(LOGITS) for _ in range(count))


def test_temperature_zero_and_nearly_zero_are_greedy() -> None:
    assert set(draws(temperature=0.0)) == {1}
    assert set(draws(temperature=1e-9)) == {1}


def test_top_k_keeps_the_k_most_likely() -> None:
    assert set(draws(temperature=5.0, top_k=2)) == {1, 3}
    assert set(draws(temperature=5.0, top_k=99)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    # Probabilities: 0.642 (1), 0.236 (3), 0.087 (2), 0.032 (0).
    assert set(draws(top_p=0.6)) == {1}
    assert set(draws(top_p=0.65)) == {1, 3}
    assert set(draws(top_p=0.9)) == {1, 2, 3}


def test_frequencies_follow_the_distribution() -> None:
    counted = draws(4000)
    for token, share in enumerate(torch.softmax(LOGITS, -1).tolist()):
        assert abs(counted[token] / 4000 - share) < 0.03


def test_a_seed_repeats_itself_and_differs_from_another() -> None:
    def run(seed: int | None, fallback: int) -> list[int]:
        sampler = Sampler(SamplingParams(max_tokens=1, seed=seed), fallback)
        return [sampler.draw(LOGITS) for _ in range(30)]

    assert run(7, 1) == run(7, 2) != run(8, 1)
    assert run(None, 1) != run(None, 2)
