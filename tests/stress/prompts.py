"""Prompts that share prefixes, and what a model answers to each."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import NamedTuple

import httpx

BLOCK = 16
ANSWER_TOKENS = 8
_VOCABULARY = 4_000
_FIRST = 16
"""Below are special tokens."""


class Prompt(NamedTuple):
    """`family` is which document it begins with."""

    family: int
    tokens: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """Full ones."""
        return len(self.tokens) // BLOCK

    def body(self) -> dict[str, object]:
        """The request for its greedy answer."""
        return {"prompt": list(self.tokens), "temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}


def make_prompts(seed: int, families: int, tails: int) -> list[Prompt]:
    """Documents of 24 to 56 blocks; of each, prompts that go on differently after all or a part of it."""
    rng = random.Random(seed)
    prompts = []
    for family in range(families):
        document = _tokens(rng, rng.randint(24 * BLOCK, 56 * BLOCK))
        for _ in range(tails):
            shared = len(document) if rng.random() < 0.7 else rng.randint(len(document) // 2, len(document))
            prompts.append(Prompt(family, (*document[:shared], *_tokens(rng, rng.randint(1, 4 * BLOCK)))))
    return prompts


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_FIRST, _VOCABULARY) for _ in range(count))


class Oracle:
    """What an engine without an agent answers: asked once for each prompt, and believed from then on."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url
        self._answers: dict[Prompt, str] = {}
        self._asking: defaultdict[Prompt, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def answer(self, prompt: Prompt) -> str:
        """The text. Raises httpx.HTTPError."""
        async with self._asking[prompt]:
            if prompt not in self._answers:
                response = await self._http.post(f"{self._url}/v1/completions", json=prompt.body())
                response.raise_for_status()
                self._answers[prompt] = response.json()["choices"][0]["text"]
        return self._answers[prompt]
