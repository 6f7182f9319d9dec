"""Asks the demo's questions through the gateway, and reads what became of each from its receipt."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from gateway.demo.questions import Document

INSTRUCTION = "Answer the question from the document below in one short sentence."
MAX_TOKENS = 16
ANSWER_TIMEOUT_S = 300.0
RECEIPT_S = 10.0
FETCH_S = 2.0


class DemoError(Exception):
    """The scenario could not be played to its end; says at which step."""


@dataclass(frozen=True)
class Fetched:
    """`tokens` that came into the engine, `moved` of them from `source`; seconds measured, and expected for computing
    instead what was missing."""

    outcome: str
    source: str
    tokens: int
    moved: int
    seconds: float
    recompute_s: float


@dataclass(frozen=True)
class Answer:
    """One answered question: what the gateway predicted, what the engine counted, and how long the first token took.

    `fetched` is what its replica's agent says of blocks that it had to find outside the engine, None where none were
    asked for.
    """

    document: str
    replica: str
    reason: str
    home: str
    ring: tuple[str, ...]
    predicted: int
    cached: int
    prompt_tokens: int
    ttft_s: float
    text: str
    fetched: Fetched | None

    @property
    def uncached(self) -> int:
        """Prompt tokens that the engine had to compute."""
        return self.prompt_tokens - self.cached


def messages(document: Document, question: str) -> list[dict[str, str]]:
    """A chat about one document: the document is the prefix that its questions share."""
    return [
        {"role": "system", "content": f"{INSTRUCTION}\n\n# {document.title}\n\n{document.text}"},
        {"role": "user", "content": question},
    ]


class DemoClient:
    """A client of one gateway. Owns its connections."""

    def __init__(self, url: str, admin_url: str, model: str) -> None:
        self._url = url
        self._admin_url = admin_url
        self._model = model
        self._http = httpx.AsyncClient(trust_env=False, timeout=ANSWER_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _body(self, document: Document, question: str, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": messages(document, question),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }

    async def ask(
        self, document: Document, question: str, *, pin: str | None = None, max_tokens: int = MAX_TOKENS
    ) -> Answer:
        """Ask, read the whole answer, and get the receipt. Raises DemoError when either is not there.

        `pin` plays a load balancer that knows nothing of KV: that replica answers, and is told of no peer.
        """
        headers = {"x-gateway-pin": pin, "x-gateway-fetch": "off"} if pin else {}
        body = self._body(document, question, max_tokens)
        async with self._http.stream(
            "POST", f"{self._url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            answer = await response.aread()
        if response.status_code != 200 or b"data: [DONE]" not in answer:
            raise DemoError(f"asking about {document.name}: {response.status_code} {answer[-300:].decode()}")
        receipt = await self.receipt(response.headers["x-request-id"])
        return Answer(
            document=document.name,
            replica=receipt["replica"],
            reason=receipt["reason"],
            home=receipt["home"],
            ring=tuple(receipt["ring"]),
            predicted=receipt["predicted_cached_tokens"],
            cached=receipt["cached_tokens"],
            prompt_tokens=receipt["prompt_tokens"],
            ttft_s=receipt["ttft_s"],
            text=_text(answer),
            fetched=_fetched(receipt["fetched"]),
        )

    async def receipt(self, request_id: str) -> dict[str, Any]:
        """What became of a request; it is written just after the last byte was sent, and what came of a fetch when the
        agent's report is there: never, where the engine had all of it by then, or no time to ask. Raises DemoError
        without a receipt."""
        found: dict[str, Any] = {}
        began = time.monotonic()
        while time.monotonic() < began + (FETCH_S if found else RECEIPT_S):
            response = await self._http.get(f"{self._admin_url}/admin/receipts/{request_id}")
            if response.status_code == 200:
                found = response.json()
                if not found["fetch"] or found["fetched"]:
                    break
            await asyncio.sleep(0.02)
        if not found:
            raise DemoError(f"the gateway has no receipt for {request_id}")
        return found

    async def explain(self, document: Document, question: str) -> dict[str, Any]:
        """Where the question would go now."""
        body = self._body(document, question, MAX_TOKENS)
        response = await self._http.post(f"{self._admin_url}/admin/explain", json=body)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    async def get(self, path: str) -> Any:
        """A JSON answer of the admin API."""
        response = await self._http.get(f"{self._admin_url}{path}")
        response.raise_for_status()
        return response.json()


def _text(answer: bytes) -> str:
    """The words of a streamed chat."""
    events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _fetched(record: dict[str, Any] | None) -> Fetched | None:
    if record is None:
        return None
    return Fetched(
        outcome=record["outcome"],
        source=record["source"],
        tokens=record["loaded"] * record["block_tokens"],
        moved=record["moved"] * record["block_tokens"],
        seconds=record["total_s"],
        recompute_s=record["predicted_recompute_s"] - record["predicted_rest_s"],
    )
