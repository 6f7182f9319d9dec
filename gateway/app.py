"""Builds the gateway from its settings: every object is made and joined here, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from starlette.types import ASGIApp

from gateway.api.admin import AdminApp
from gateway.api.explain import Explain
from gateway.api.observe_only import Refusal
from gateway.api.openai import PublicApp
from gateway.duplication.demand import Load
from gateway.duplication.history import History
from gateway.duplication.hit_rates import HitRates
from gateway.duplication.ledger import Ledger
from gateway.duplication.recomputed import Recompute
from gateway.duplication.report import Reporter
from gateway.fleet.agent_access import agent_access, agent_client
from gateway.fleet.engine_health import EngineHealth
from gateway.fleet.engine_http import EngineHttp
from gateway.fleet.fetches import Fetches
from gateway.fleet.fleet import Fleet
from gateway.fleet.model_profiles import ModelProfiles
from gateway.identity.identifier import Identifier
from gateway.metrics import GatewayMetrics
from gateway.path.account import Account, Receipts
from gateway.path.admit import Admission
from gateway.path.forward import Forward
from gateway.path.identify import Identify
from gateway.path.place import Place
from gateway.path.request_log import RequestLog
from gateway.path.request_path import RequestPath
from gateway.path.retry_budget import RetryBudget
from gateway.path.upstream import Upstream
from gateway.placement.index import PrefixIndex
from gateway.placement.placer import Placer
from gateway.placement.settings import PlacementSettings
from gateway.placement.trust import Trust
from gateway.settings import Settings, TelemetrySettings
from gateway.state_metrics import StateCollector
from kvstore.messages import FetchRecord

HISTORY_EVERY_S = 10.0
LOAD_EVERY_S = 1.0


class Gateway:
    """The two applications and what lives behind them, from `running()` until it ends.

    Making one raises SettingsError where a key or certificate cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        limits = settings.limits
        access = agent_access(settings)
        self._agents = agent_client(access)
        self._engines = EngineHttp()
        self._identifier = Identifier(seed=settings.placement.route_seed, deadline_s=limits.identity_timeout_s)
        self._upstream = Upstream(
            connect_timeout_s=limits.connect_timeout_s, first_byte_timeout_s=limits.first_byte_timeout_s
        )
        self._profiles = ModelProfiles(self._identifier, self._engines, settings.telemetry.parity_sample_every)
        index = PrefixIndex(settings.placement.index_bytes)
        self._recompute = Recompute(lambda replica: self.fleet.replicas[replica].reporting)
        ledger = Ledger(index, self._recompute.stored)
        self._history = History(ledger)
        placer = Placer(
            index,
            PlacementSettings(
                eps=settings.placement.epsilon,
                fetch=settings.fetch.enabled,
                fetch_margin=settings.fetch.margin,
                fetch_max_deadline_s=settings.fetch.max_deadline_ms / 1_000,
            ),
        )
        health = EngineHealth(self._engines, on_down=placer.restarted)
        metrics = GatewayMetrics()
        fetches = Fetches([replica.id for replica in settings.replicas], self._fetched)
        self._metrics = metrics
        trust = Trust(
            failed_tokens=fetches.failed_tokens,
            on_quarantine=lambda replica, why: self.fleet.resync(replica, why),
        )
        index.add_listener(trust)
        self.fleet = Fleet(settings, index, ledger, self._profiles, health, self._agents, fetches, trust, access)

        receipts = Receipts(settings.telemetry.receipts)
        identify = Identify(self._identifier, self.fleet)
        hit_rates = HitRates()
        place = Place(placer, self.fleet, hit_rates, allow_pinning=settings.placement.allow_pinning)
        forward = Forward(
            self._upstream,
            self.fleet,
            health,
            place,
            RetryBudget(limits.retry_budget),
            observe_usage=settings.telemetry.observe_usage,
            agent_token=settings.agent_token,
        )
        self._request_log = _request_log(settings.telemetry)
        account = Account(self.fleet, place, self._profiles, metrics, receipts, hit_rates, self._request_log)
        self.admission = Admission(self.fleet, limits)
        self._observe_only = settings.observe_only
        path: ASGIApp = Refusal()
        if not settings.observe_only:
            path = RequestPath(self.admission, identify, place, forward, account)

        metrics.registry.register(
            StateCollector(
                self.fleet, index, ledger, self._identifier, identify, self._profiles, hit_rates, self._recompute
            )
        )
        self._load = Load(placer.settings)
        reporter = Reporter(
            ledger,
            history=self._history,
            hit_rates=hit_rates,
            traffic=placer.traffic,
            load=self._load,
            recompute=self._recompute,
        )
        explain = Explain(identify, placer, self.fleet)
        self.public = PublicApp(path, self.fleet, observe_only=settings.observe_only)
        self.admin = AdminApp(
            self.fleet,
            index,
            identify,
            reporter,
            self._history,
            receipts,
            fetches,
            explain,
            metrics.registry,
        )

    @contextlib.asynccontextmanager
    async def running(self, on_failure: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Everything that must run while requests are served; stops it all at the end.

        A gateway that watches nothing must not go on: if a task ends by itself, `on_failure` is called at once, and its
        exception is raised at the end.
        """
        if not self._observe_only:
            await self._identifier.start()
        tasks = [
            asyncio.create_task(self.fleet.run(), name="fleet"),
            asyncio.create_task(self._sample_history(), name="duplication history"),
            asyncio.create_task(self._sample_load(), name="load"),
        ]
        if not self._observe_only:
            tasks.append(asyncio.create_task(self._profiles.run(), name="parity"))
        for task in tasks:
            task.add_done_callback(lambda done: None if done.cancelled() else on_failure())
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await self._profiles.close()
            await self._identifier.close()
            await self._upstream.close()
            await self._engines.close()
            await self._agents.aclose()
            if self._request_log is not None:
                await asyncio.to_thread(self._request_log.close)
        for error in ended:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error

    def _fetched(self, record: FetchRecord) -> None:
        self._metrics.fetch_done(record)
        self._recompute.fetched(record)

    async def _sample_load(self) -> None:
        while True:
            await asyncio.sleep(LOAD_EVERY_S)
            self._load.observe(self.fleet.sequences())

    async def _sample_history(self) -> None:
        while True:
            self._history.sample()
            await asyncio.sleep(HISTORY_EVERY_S)


def _request_log(settings: TelemetrySettings) -> RequestLog | None:
    return RequestLog(Path(settings.request_log), hashed=settings.hash_prompts) if settings.request_log else None
