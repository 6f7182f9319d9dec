"""The parts of a request's way that need no network, joined as the gateway joins them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import httpx

from gateway.duplication.ledger import Ledger
from gateway.fleet.engine_health import EngineHealth
from gateway.fleet.fleet import Fleet
from gateway.fleet.model_profiles import ModelProfiles
from gateway.identity.identifier import Identifier
from gateway.identity.prompt import IdentityMode, PromptIdentity, PromptRequest
from gateway.metrics import GatewayMetrics
from gateway.path.account import Account, Receipts
from gateway.path.exchange import Exchange
from gateway.path.place import Place
from gateway.placement.index import PrefixIndex
from gateway.placement.placer import Placer
from gateway.settings import ReplicaSettings, Settings
from kvstore.identity import Namespace, token_keys
from kvstore.messages import Tier

MODEL = "m"


class Parts:
    """A fleet of replicas that count as probed and reporting, and the steps that place and account."""

    def __init__(self, replicas: int = 3, *, allow_pinning: bool = False, receipts: int = 10) -> None:
        self.settings = Settings(
            replicas=[
                ReplicaSettings(id=f"replica-{at}", engine=f"http://127.0.0.1:{at + 1}", agent="http://127.0.0.1:9")
                for at in range(replicas)
            ]
        )
        self.client = httpx.AsyncClient(trust_env=False)
        self.index = PrefixIndex()
        self.placer = Placer(self.index)
        self.profiles = ModelProfiles(Identifier(seed=0), self.client, 0)
        health = EngineHealth(self.client, on_down=self.placer.restarted)
        self.fleet = Fleet(self.settings, self.index, Ledger(self.index), self.profiles, health, self.client)
        for replica in self.fleet.replicas.values():
            replica.engine_up, replica.models, replica.reporting = True, {MODEL: {"id": MODEL}}, True
        self.metrics = GatewayMetrics()
        self.receipts = Receipts(receipts)
        self.place = Place(self.placer, self.fleet, allow_pinning=allow_pinning)
        self.account = Account(self.fleet, self.place, self.profiles, self.metrics, self.receipts, now=lambda: 1_000.0)

    def hold(self, replica: str, keys: Iterable[int]) -> None:
        """`replica` reports that it holds this chain."""
        chain = list(keys)
        self.index.store(replica, Tier.HBM, chain, [0, *chain[:-1]])

    def loads(self) -> dict[str, tuple[int, int]]:
        """Sequences and tokens in flight of every replica, after checking their law."""
        for replica in self.fleet.replicas.values():
            replica.load.check()
        return {each.id: (each.load.sequences, each.load.prefill_tokens) for each in self.fleet.replicas.values()}

    def count(self, name: str, **labels: str) -> float:
        """The value of a metric now."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def identity(tokens: range, mode: IdentityMode = IdentityMode.EXACT) -> PromptIdentity:
    """The identity of a prompt of these token ids."""
    return PromptIdentity(mode=mode, keys=array("Q", token_keys(Namespace(MODEL).root(0), tokens)), tokens=len(tokens))


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def exchange(
    prompt: PromptIdentity | None, *, headers: dict[str, str] | None = None, clock: Clock | None = None
) -> Exchange:
    """A request that was admitted and identified; it has nobody to answer to."""

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    async def send(message: Any) -> None:
        pass

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "path": "/v1/chat/completions", "headers": raw}
    made = Exchange(scope, receive, send, "id-1", clock or Clock())
    made.model = MODEL
    made.identity = prompt
    if prompt is not None:
        made.prompt = PromptRequest(model=MODEL, namespace=Namespace(MODEL), messages=b"[]")
    return made
