"""The parts of a request's way that need no network, joined as the gateway joins them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import httpx
import msgspec
from report_support import beat

from gateway.duplication.hit_rates import HitRates
from gateway.duplication.ledger import Ledger
from gateway.fleet.engine_health import EngineHealth
from gateway.fleet.engine_http import EngineHttp
from gateway.fleet.fetches import Fetches
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
from gateway.placement.trust import Trust
from gateway.settings import ReplicaSettings, Settings
from kvstore.cost import LinkEstimate
from kvstore.geometry import KvGeometry
from kvstore.identity import Namespace, token_keys
from kvstore.messages import FetchState, Hello, Tier

MODEL = "m"
HELLO = Hello(
    replica_id="",
    epoch=1,
    engine="vllm",
    engine_version="0.32.0",
    engine_up=True,
    models=[MODEL],
    block_size=16,
    capacity_blocks=1000,
    geometry=KvGeometry(layers=8, kv_heads=1, head_dim=32, dtype="bfloat16"),
    identity_modes=["exact"],
    route_seed_check=0,
    kv_events=True,
)
BEAT = beat(1, 0, queued_prefill_tokens=0, capacity_blocks=1000)


class Parts:
    """A fleet of replicas that count as probed and reporting, and the steps that place and account."""

    def __init__(
        self,
        replicas: int = 3,
        *,
        allow_pinning: bool = False,
        receipts: int = 10,
        engines: Sequence[str] = (),
        trust_clock: Callable[[], float] | None = None,
    ) -> None:
        urls = engines or [f"http://127.0.0.1:{at + 1}" for at in range(replicas)]
        self.settings = Settings(
            replicas=[
                ReplicaSettings(id=f"replica-{at}", engine=url, agent=f"http://127.0.0.1:{9000 + at}")
                for at, url in enumerate(urls)
            ]
        )
        self.client = httpx.AsyncClient(trust_env=False)
        self.index = PrefixIndex()
        self.placer = Placer(self.index)
        self.profiles = ModelProfiles(Identifier(seed=0), EngineHttp(), 0)
        self.health = EngineHealth(EngineHttp(), on_down=self.placer.restarted)
        self.metrics = GatewayMetrics()
        self.fetches = Fetches([replica.id for replica in self.settings.replicas], self.metrics.fetch_done)
        ledger = Ledger(self.index)
        self.trust = Trust(trust_clock or time.monotonic, failed_tokens=self.fetches.failed_tokens)
        self.index.add_listener(self.trust)
        self.fleet = Fleet(
            self.settings, self.index, ledger, self.profiles, self.health, self.client, self.fetches, self.trust
        )
        for replica in self.fleet.replicas.values():
            replica.engine_up, replica.models, replica.reporting = True, {MODEL: {"id": MODEL}}, True
        self.receipts = Receipts(receipts)
        self.hit_rates = HitRates(1 << 14)
        self.place = Place(self.placer, self.fleet, self.hit_rates, allow_pinning=allow_pinning)
        self.account = Account(
            self.fleet, self.place, self.profiles, self.metrics, self.receipts, self.hit_rates, now=lambda: 1_000.0
        )

    def hold(self, replica: str, keys: Iterable[int], *tiers: Tier) -> None:
        """`replica` reports that it holds this chain, in HBM if nothing else is said."""
        chain = list(keys)
        for tier in tiers or (Tier.HBM,):
            self.index.store(replica, tier, chain, [0, *chain[:-1]])

    def pool(self, replica: str, *, namespace: str = "n", acts: bool = True) -> None:
        """`replica` reports that its agent has a pool: 1 kB a token, and any peer can be read at 100 MB/s."""
        link = LinkEstimate(0.001, 1e8)
        told = self.fleet.replicas[replica]
        told.hello = msgspec.structs.replace(HELLO, replica_id=replica)
        told.heartbeat = msgspec.structs.replace(
            BEAT, fetch=FetchState(namespace=namespace, acts=acts, slots=100, link=link, links={})
        )

    def tell(self, replica: str, **more: Any) -> None:
        """The last heartbeat of `replica` says this, too."""
        told = self.fleet.replicas[replica]
        told.heartbeat = msgspec.structs.replace(told.heartbeat or BEAT, **more)

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
