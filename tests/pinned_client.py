"""A client that says which replica is to answer, and reads what became of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
from agent_support import until

ONE, TWO = "replica-0", "replica-1"


class Said(NamedTuple):
    text: str
    cached: int
    receipt: dict[str, Any]


class PinnedClient:
    """Asks one gateway, at `url` with its admin API at `admin`, which allows pinning, about texts: `system` makes one
    of a number. The engines of `model` have blocks of `block` tokens."""

    def __init__(
        self, url: str, admin: str, http: httpx.AsyncClient, *, model: str, block: int, system: Callable[[int], str]
    ) -> None:
        self._url = url
        self._admin = admin
        self._http = http
        self._model = model
        self._block = block
        self._system = system

    async def get(self, path: str) -> Any:
        response = await self._http.get(f"{self._admin}{path}")
        response.raise_for_status()
        return response.json()

    async def drain(self, replica: str, *, undo: bool = False) -> None:
        url = f"{self._admin}/admin/replicas/{replica}/drain"
        (await self._http.request("DELETE" if undo else "PUT", url)).raise_for_status()

    async def ask(self, number: int, replica: str, *, recorded: bool = True, **fields: Any) -> Said:
        """About one text, of that replica. With `recorded` the receipt tells what became of its fetch, if it has one;
        an engine that had no time to ask for it leaves no record."""
        messages = [
            {"role": "system", "content": self._system(number)},
            {"role": "user", "content": "What is this about?"},
        ]
        body = {"model": self._model, "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        response = await self._http.post(
            f"{self._url}/v1/chat/completions", json=body | fields, headers={"x-gateway-pin": replica}
        )
        assert response.status_code == 200, response.text
        answer = response.json()
        receipt: dict[str, Any] = {}

        async def told() -> bool:
            found = await self._http.get(f"{self._admin}/admin/receipts/{response.headers['x-request-id']}")
            if found.status_code == 200:
                receipt.update(found.json())
            return bool(receipt) and bool(not recorded or not receipt["fetch"] or receipt["fetched"])

        await until(told, "receipt")
        assert receipt["replica"] == replica
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Said(answer["choices"][0]["message"]["content"], cached, receipt)

    async def teach(self, number: int) -> Said:
        """Of the first replica; when this returns the gateway knows that its agent has all of it."""
        before = await self._pooled()
        said = await self.ask(number, ONE)
        blocks = said.receipt["prompt_tokens"] // self._block - said.cached // self._block

        async def known() -> bool:
            return await self._pooled() >= before + blocks

        await until(known, "in the pool")
        return said

    async def _pooled(self) -> int:
        found = await self.get("/admin/replicas")
        return next(int(each["pool_blocks"]) for each in found["replicas"] if each["id"] == ONE)
