"""One request on its way through the gateway: what each step of the path learned, for the steps after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.duplication.hit_rates import Fed
from gateway.fleet.decoding import Decoding
from gateway.fleet.inflight import Ticket
from gateway.identity.prompt import PromptIdentity, PromptRequest
from gateway.path.body import Body
from gateway.path.usage import Usage
from gateway.placement.claims import Claim
from gateway.placement.placement import Placement
from gateway.placement.trust import Expectation

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send


class Exchange:
    """State of one request. Each step writes its own fields and reads those of the steps before it.

    Written by admit: `target`, `body`, `model`, `stream`, `prompt`; by identify: `identity`; by place: `placement`,
    `tried`, `ticket`, `claim`, `expectation`, `fed`, `queue_free`, `beside`; by forward: `first_byte_s`, `usage`,
    `outcome`; by `send`: `status`, `started`, `finished`. `account` reads them all.
    """

    __slots__ = (
        "_clock",
        "_send",
        "began",
        "beside",
        "body",
        "claim",
        "client_gone",
        "expectation",
        "fed",
        "finished",
        "first_byte_s",
        "identity",
        "model",
        "outcome",
        "placement",
        "prompt",
        "queue_free",
        "receive",
        "request_id",
        "scope",
        "started",
        "status",
        "stream",
        "target",
        "ticket",
        "tried",
        "usage",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self._clock = clock
        self.request_id = request_id
        self.began = clock()
        self.body: Body | None = None
        self.model = ""
        self.stream = False
        self.target = ""
        self.prompt: PromptRequest | None = None
        self.identity: PromptIdentity | None = None
        self.placement: Placement | None = None
        self.tried: list[str] = []
        self.ticket: Ticket | None = None
        self.claim: Claim | None = None
        self.expectation: Expectation | None = None
        self.fed: Fed | None = None
        self.queue_free = False
        self.beside: Decoding | None = None
        self.status = 0
        self.started = False
        self.finished = False
        self.client_gone = False
        self.first_byte_s: float | None = None
        self.usage: Usage | None = None
        self.outcome = "incomplete"

    @property
    def path(self) -> str:
        """The request's path, e.g. `/v1/chat/completions`."""
        return str(self.scope["path"])

    def elapsed(self) -> float:
        """Seconds since the request was read."""
        return self._clock() - self.began

    async def send(self, message: Message) -> None:
        """To the client; remembers whether an answer has been started and whether it is complete."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
        elif not message.get("more_body"):
            self.finished = True
        await self._send(message)
