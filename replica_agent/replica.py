"""One engine as its agent knows it: what it is, whether it lives, what it holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

import msgspec

from kvstore.bounds import MAX_NAME, clipped
from kvstore.geometry import KvGeometry
from kvstore.identity import UNIT_TOKENS, Namespace
from kvstore.messages import MAX_MODELS, Hello, ModelFiles, Problem
from replica_agent.catalogue import Catalogue
from replica_agent.doctor import Doctor
from replica_agent.engine_client import EngineClient, EngineIdentity, EngineWatcher, local_root
from replica_agent.errors import EngineSilent, EngineUnreachable, ModelFilesUnavailable
from replica_agent.events.decode import AllCleared, BlockRemoved, BlockStored, EventBatch
from replica_agent.events.subscriber import KvEventSubscriber
from replica_agent.gateways import Gateways
from replica_agent.kv.service import KvService
from replica_agent.load import EngineMetrics
from replica_agent.model_files import load_attention, load_geometry, load_model_files
from replica_agent.pool_news import PoolNews
from replica_agent.reports import EngineState, ReportHub
from replica_agent.resets import ResetWatch
from replica_agent.settings import Settings
from replica_agent.telemetry import resync_span

_logger = logging.getLogger(__name__)

_EVENT_NAMES = {BlockStored: "stored", BlockRemoved: "removed", AllCleared: "cleared"}


class Replica:
    """Joins the watcher (is the engine there?), the subscriber (what did it do?), the catalogue, the streams, and where
    there is a pool of KV blocks, its service.

    Owns all five and every fact about the engine. Events reach the catalogue from the subscriber's task, and what the
    pool holds from its service, on one event loop. The catalogue is emptied, under a new epoch, whenever it may not be
    the living engine's: a lost connection, a gap that no replay fills, an unreadable batch, another process at the same
    address, nothing there at all. An engine that is merely silent is reported down, but keeps its blocks: it may be
    stopped, and nothing else can be in its place without a new start time or a refused connection.
    """

    def __init__(self, settings: Settings, *, epoch: int | None = None) -> None:
        self.settings = settings
        self.catalogue = Catalogue("", settings.route_seed, max_orphans=settings.max_orphans)
        self.gateways = Gateways()
        self.hub = ReportHub(
            self.catalogue,
            self._reported_state,
            epoch=time.time_ns() if epoch is None else epoch,
            buffer_bytes=settings.stream_buffer_bytes,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            gateways=self.gateways.heard,
        )
        self.subscriber = KvEventSubscriber(
            self, settings.kv_events, settings.kv_replay, topic=settings.kv_topic, dp_rank=settings.dp_rank
        )
        self.pool_news = PoolNews(self.catalogue, self.hub.changed)
        self.kv: KvService | None = None
        if settings.kv_socket is not None:
            self.kv = KvService(settings, listener=self.pool_news, tell=self.hub.fetched)
        self._client = EngineClient(
            settings.engine,
            settings.dp_rank,
            api_key=settings.engine_api_key,
            tls=settings.engine_tls,
            server_name=settings.engine_server_name,
        )
        self._watcher = EngineWatcher(self._client, self, interval_s=settings.poll_interval_s)
        self._engine = EngineState(up=False, metrics=EngineMetrics())
        self._model = ""
        self.identity: EngineIdentity | None = None
        self.files: ModelFiles | ModelFilesUnavailable = ModelFilesUnavailable("engine_unseen", "no engine seen yet")
        self.geometry: KvGeometry | None = None
        self.attention = 0.0
        self.event_sources: dict[int, dict[str, Any]] | None = None
        self.resyncs: Counter[str] = Counter()
        self.events: Counter[str] = Counter(dict.fromkeys((*_EVENT_NAMES.values(), "ignored"), 0))
        self.event_lag_s = 0.0
        self._resets = ResetWatch()
        self._told: tuple[Hello, str] | None = None
        self._doctor = Doctor(self)

    def listen(self) -> None:
        """Makes the socket for the engine, where there is to be one; `run` does it otherwise. Raises SocketTaken."""
        if self.kv is not None:
            self.kv.socket.listen()

    async def run(self) -> None:
        """Follows the engine until cancelled; a defect in any part ends all of them."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watcher.run())
                tasks.create_task(self.subscriber.run())
                tasks.create_task(self.hub.run())
                tasks.create_task(self._doctor.run())
                if self.kv is not None:
                    tasks.create_task(self.kv.run())
        finally:
            self.hub.close()
            await self._client.close()

    def engine_state(self) -> EngineState:
        """Whether the engine answers, and what it said last, without what is wrong."""
        if self.kv is None:
            return self._engine
        return msgspec.structs.replace(
            self._engine, prefill_tokens_per_s=self.kv.prefill_tokens_per_s, fetch=self.kv.fetch_state
        )

    def _reported_state(self) -> EngineState:
        return msgspec.structs.replace(
            self.engine_state(), kv_events=self.subscriber.connected, problems=self.problems()
        )

    @property
    def block_size(self) -> int:
        """Tokens in an engine block, 0 as long as nobody said."""
        return self._engine.metrics.block_size or self.catalogue.block_size

    @property
    def engine_error(self) -> str:
        """Why the engine did not answer the last time it was asked, "" when it did."""
        return self._watcher.error

    def problems(self) -> list[Problem]:
        """What keeps this replica from being routed to by prefix, and from fetching."""
        return self._doctor.problems()

    def hello(self) -> Hello | None:
        """Who this is; None until the engine has been seen once."""
        if self.identity is None:
            return None
        exact = isinstance(self.files, ModelFiles) and self.block_size % UNIT_TOKENS == 0
        return Hello(
            replica_id=self.settings.replica_id,
            dp_rank=self.settings.dp_rank,
            epoch=self.hub.epoch,
            engine=clipped(self.identity.engine),
            engine_version=clipped(self.identity.version),
            engine_up=self._engine.up,
            # The first is the name that RouteKeys are made with.
            models=[self._model, *self._other_models()],
            block_size=self.block_size,
            capacity_blocks=self._engine.metrics.capacity_blocks or 0,
            geometry=self.geometry,
            identity_modes=["exact", "text", "hash"] if exact else ["text", "hash"],
            route_seed_check=Namespace("").root(self.settings.route_seed),
            namespace=self.kv.keeper.namespace if self.kv is not None and self.kv.engine_connected else None,
            kv_events=self.subscriber.connected,
            attention=self.attention,
        )

    def _greet_again_if_another(self) -> None:
        """Whoever has been told something else than what is true now is to ask again. What stands in heartbeats, too,
        or comes and goes, is no reason."""
        hello = self.hello()
        if hello is None:
            return
        lasting = msgspec.structs.replace(
            hello, epoch=0, engine_up=False, kv_events=False, capacity_blocks=0, models=hello.models[:1], namespace=None
        )
        told = lasting, self.files.digest if isinstance(self.files, ModelFiles) else ""
        if self._told is not None and told != self._told:
            self.hub.hang_up()
        self._told = told

    def _other_models(self) -> list[str]:
        # An engine may serve adapters without end; what cannot be told is left out, so that the rest is.
        names = [] if self.identity is None else self.identity.models
        return [name for name in names if name != self._model and len(name) <= MAX_NAME][: MAX_MODELS - 1]

    def check(self) -> None:
        """Asserts what must hold in the catalogue and around the pool, now that no event is being taken in."""
        self.catalogue.check()
        self.gateways.check()
        self.pool_news.check()
        self._resets.check()
        self._doctor.check()
        if self.kv is not None:
            self.kv.check()
            pool = self.kv.keeper.pool
            held = 0 if pool is None else pool.counts.held
            known = self.catalogue.pooled + self.pool_news.balance
            assert known == held, f"{known} blocks in the catalogue or on their way to it, {held} in the pool"

    # What the subscriber tells.

    def apply(self, batch: EventBatch) -> None:
        """Takes a batch into the catalogue."""
        for event in batch.events:
            self.events[_EVENT_NAMES[type(event)]] += 1
            if isinstance(event, AllCleared):
                self._resets.announced()
        self.events["ignored"] += batch.ignored
        self.event_lag_s = max(0.0, time.time() - batch.timestamp)
        block_size = self.block_size
        self.catalogue.apply(batch.events)
        self.hub.changed()
        if self.block_size != block_size:
            self._greet_again_if_another()

    def restart(self, reason: str) -> None:
        """Empties the catalogue: what it says can no longer be vouched for."""
        self.resyncs[reason] += 1
        with resync_span(reason):
            self.hub.new_epoch(self._model)
        count = self.resyncs[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, ... of a kind: a broken engine may do this with every step
            _logger.warning("catalogue emptied: %s (%d so far), epoch %d", reason, count, self.hub.epoch)

    # What the watcher tells.

    async def engine_seen(self, identity: EngineIdentity, metrics: EngineMetrics) -> None:
        """Learns what the engine serves, then lets the subscription begin."""
        model = self.settings.model or identity.models[0]
        await self._read_model(identity, model, anew=True)
        self.event_sources = await self._sources() if identity.engine == "vllm" else None
        self._engine = EngineState(up=self._engine.up, metrics=metrics)
        self.identity = identity
        if model != self._model:
            had_one, self._model = bool(self._model), model
            if not had_one:
                self.hub.new_epoch(model)
            elif not self.subscriber.restart("model_changed"):
                # Paused: the epoch that began when the last one ended still has the old name.
                self.restart("model_changed")
        self.subscriber.resume()

    async def engine_confirmed(self, identity: EngineIdentity) -> None:
        """Looks again for what of the model could not be read."""
        await self._read_model(identity, self._model, anew=False)

    async def _read_model(self, identity: EngineIdentity, model: str, *, anew: bool) -> None:
        """Reads what the model's directory says; not `anew`, only what it has not said yet."""
        shape = anew or self.geometry is None or not self.attention
        files = anew or not isinstance(self.files, ModelFiles)
        if not (shape or files):
            return
        directory = self.settings.model_dir or await asyncio.to_thread(local_root, identity.root)
        if directory is None:
            if anew:
                self.geometry, self.attention = None, 0.0
                self.files = ModelFilesUnavailable(
                    "no_model_dir", f"--model-dir is not set, {identity.root!r} not here"
                )
            return
        if shape:
            geometry = await asyncio.to_thread(load_geometry, directory)
            attention = await asyncio.to_thread(load_attention, directory)
            self.geometry = geometry if anew else self.geometry or geometry
            self.attention = attention if anew else self.attention or attention
        if files:
            try:
                self.files = await asyncio.to_thread(load_model_files, directory, model)
            except ModelFilesUnavailable as error:
                self.files = error

    async def _sources(self) -> dict[int, dict[str, Any]] | None:
        try:
            return await self._client.event_sources()
        except (EngineSilent, EngineUnreachable):  # good for a hint alone
            return None

    def engine_measured(self, metrics: EngineMetrics) -> None:
        """Passes a change of load on at once."""
        before, self._engine = self._engine, EngineState(up=True, metrics=metrics)
        self.catalogue.capacity_blocks = metrics.capacity_blocks or 0
        self._greet_again_if_another()
        if self._resets.look(metrics):
            self._forget_silently_cleared()
        if not before.up or before.metrics.load != metrics.load:
            self.hub.beat()

    def engine_replaced(self) -> None:
        """Another process: nothing of the last one counts. The next subscription waits until it is known."""
        self._resets = ResetWatch()
        self.subscriber.pause("engine_replaced")

    def engine_silent(self) -> None:
        """Says so; see the class for why the catalogue stays."""
        self._down()

    def engine_gone(self) -> None:
        """Says so, and forgets what the engine held."""
        self._resets = ResetWatch()
        self.subscriber.pause("engine_gone")
        self._down()

    def _forget_silently_cleared(self) -> None:
        # Not a new epoch: the stream of events goes on, and a replay would bring back what they do not yet take away.
        self.resyncs["silent_reset"] += 1
        _logger.info("the idle engine's prefix cache was reset: forgetting %d blocks", self.catalogue.blocks)
        self.catalogue.apply([AllCleared()])
        self.hub.changed()

    def _down(self) -> None:
        if self._engine.up:
            metrics = EngineMetrics(
                block_size=self._engine.metrics.block_size, capacity_blocks=self._engine.metrics.capacity_blocks
            )
            self._engine = EngineState(up=False, metrics=metrics)
            self.hub.beat()
