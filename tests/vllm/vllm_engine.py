"""What the tests ask of a vLLM server, and what an agent beside it should make of it."""

from __future__ import annotations

import random
from typing import Any

import httpx
from agent_support import SEED, Mirror, until
from vllm_server import BLOCK, VllmServer

from kvstore.identity import UNIT_TOKENS, Namespace, token_keys
from replica_agent.settings import Settings, load_settings


def agent_settings(server: VllmServer, *, rank: int = 0, replay: bool = True, **more: str) -> Settings:
    """For an agent beside one rank of the server. With `SEED`, which a gateway has to be told."""
    flags = {
        "engine": server.url,
        "kv-events": server.events(rank),
        "kv-replay": server.replay(rank) if replay else "",
        "dp-rank": str(rank),
        "route-seed": str(SEED),
        "heartbeat-interval": "0.05",
    } | {name.replace("_", "-"): value for name, value in more.items()}
    return load_settings([word for name, value in flags.items() for word in (f"--{name}", value)], {})


def prompt_of(*parts: int, extra: int = 0, block: int = BLOCK) -> list[int]:
    """Token ids of a prompt made of numbered blocks and `extra` tokens more."""
    ids: list[int] = []
    for part in parts:
        rng = random.Random(part)
        ids += [rng.randrange(300, 4000) for _ in range(block)]
    rng = random.Random(-1)
    return ids + [rng.randrange(300, 4000) for _ in range(extra)]


def keys_of(prompt: list[int], model: str = "tiny") -> list[int]:
    """The RouteKey of every full block of a prompt."""
    units = BLOCK // UNIT_TOKENS
    return list(token_keys(Namespace(model).root(SEED), prompt))[units - 1 :: units]


def held_tokens(mirror: Mirror, prompt: list[int]) -> int:
    """How many of a prompt's tokens a gateway would take for held: its leading blocks, at least one token left over."""
    keys = keys_of(prompt[: (len(prompt) - 1) // BLOCK * BLOCK])
    leading = next((at for at, key in enumerate(keys) if key not in mirror.hbm), len(keys))
    return leading * BLOCK


class Engine:
    """A client of one server. Owns its connection."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self._http = httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=120)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def complete(self, prompt: list[int], *, max_tokens: int = 1, rank: int | None = None, **more: Any) -> int:
        """Have a prompt computed; the number of its tokens that were cached."""
        body = {"model": self.server.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        response = await self._http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        details = response.json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]) if details else 0

    async def compute(self, prompt: list[int], mirror: Mirror, **more: Any) -> int:
        """The same, waiting until the mirror knows that the prompt's full blocks are held."""
        cached = await self.complete(prompt, **more)
        keys = set(keys_of(prompt))
        await until(lambda: keys <= mirror.hbm, "what was computed is reported")
        return cached

    async def reset(self) -> bool:
        """Empty the prefix cache (servers in dev mode); whether it could be done."""
        response = await self._http.post("/reset_prefix_cache")
        assert response.status_code == 200, response.text
        return bool(response.json()["success"])
