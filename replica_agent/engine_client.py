"""Watches the engine over HTTP: what it serves, how busy it is, whether it is still the same process."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec

from kvstore.http_transport import HttpTransport
from replica_agent.errors import EngineSilent, EngineUnreachable
from replica_agent.load import EngineMetrics, parse_metrics

_logger = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 1.0
SILENT_AFTER_S = 2.0
"""An engine that has not answered for so long is reported down. Its process may be alive and keep its cache."""

IDENTITY_EVERY_S = 10.0
"""Adapters are loaded and unloaded while an engine runs, and its model's files may be there later than it is."""


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says it is. `models[0]` is the base model, the others adapters; `root` the base model's files."""

    engine: str
    version: str
    models: list[str]
    root: str | None


class EngineClient:
    """One kept-alive HTTP connection to one engine. Every method raises EngineUnreachable or EngineSilent."""

    def __init__(
        self,
        base_url: str,
        dp_rank: int = 0,
        deadline_s: float = ANSWER_DEADLINE_S,
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
    ) -> None:
        """`api_key` is sent with every request; `tls` and `server_name` (as in the certificate) are for https."""
        self._dp_rank = dp_rank
        self._keyed = api_key is not None
        self._extensions = {"sni_hostname": server_name} if server_name else {}
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            transport=HttpTransport(verify=True if tls is None else tls, trust_env=False),
            timeout=deadline_s,
            trust_env=False,
        )

    async def metrics(self) -> EngineMetrics:
        """One look at `/metrics`; an engine without that page has no figures, and is up."""
        response = await self._get("/metrics")
        return parse_metrics(response.content, self._dp_rank) if response.status_code == 200 else EngineMetrics()

    async def identity(self, metrics: EngineMetrics) -> EngineIdentity:
        """From `/v1/models` and `/version`. Raises EngineSilent when the engine serves no model yet."""
        cards = _json((await self._get("/v1/models")).content).get("data")
        cards = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        cards.sort(key=lambda card: card.get("parent") is not None)
        models = [card["id"] for card in cards if isinstance(card.get("id"), str)]
        if not models:
            raise EngineSilent("/v1/models names no model")
        root = cards[0].get("root")
        response = await self._get("/version")
        version = _json(response.content).get("version") if response.status_code == 200 else None
        engine = {"reference_engine": "reference"}.get(metrics.engine or "", metrics.engine) or "unknown"
        return EngineIdentity(
            engine=engine,
            version=version if isinstance(version, str) else "unknown",
            models=models,
            root=root if isinstance(root, str) else None,
        )

    async def event_sources(self) -> dict[int, dict[str, Any]] | None:
        """The publisher of KV events of each data-parallel rank, as vLLM tells them; None where it does not."""
        response = await self._get("/kv_event_sources")
        if response.status_code != 200:
            return None
        sources = _json(response.content)
        return {int(rank): source for rank, source in sources.items() if rank.isdigit() and isinstance(source, dict)}

    async def close(self) -> None:
        """Closes the connection."""
        await self._http.aclose()

    async def _get(self, path: str) -> httpx.Response:
        # A kept connection may have been closed by the engine in the meantime, so what breaks is tried once more.
        for attempt in (1, 2):
            try:
                response = await self._http.get(path, extensions=dict(self._extensions))
            except httpx.ConnectError as error:
                raise EngineUnreachable(f"{path}: {error}") from error
            except httpx.TimeoutException as error:
                raise EngineSilent(f"{path}: no answer in time ({type(error).__name__})") from error
            except httpx.HTTPError as error:
                if attempt == 2:
                    raise EngineUnreachable(f"{path}: {type(error).__name__}: {error}") from error
                continue
            if response.status_code == 401:
                wrong = "refuses the API key of" if self._keyed else "asks for an API key: give it with"
                raise EngineSilent(f"{path}: 401: the engine {wrong} --engine-api-key-file")
            if response.status_code >= 500:
                raise EngineSilent(f"{path}: status {response.status_code}")
            return response
        raise AssertionError("unreachable")


class EngineObserver(Protocol):
    """Whom the watcher tells. All are called from its task."""

    async def engine_seen(self, identity: EngineIdentity, metrics: EngineMetrics) -> None:
        """The engine is there, for the first time or after it was gone, or serves other models than before."""

    async def engine_confirmed(self, identity: EngineIdentity) -> None:
        """It is still the engine that was seen last: what could not be learned of it then may be there now."""

    def engine_measured(self, metrics: EngineMetrics) -> None:
        """The engine is up and this busy."""

    def engine_replaced(self) -> None:
        """Another process answers at the engine's address; `engine_seen` follows."""

    def engine_silent(self) -> None:
        """The engine does not answer. What it holds may still be there."""

    def engine_gone(self) -> None:
        """Nothing listens at the engine's address: what it held is gone."""


class EngineWatcher:
    """Looks at an engine every `interval_s` and tells an observer what changed. `run` never returns by itself.

    Another process is known by its start time, or by a counter that went back where there is none.
    """

    def __init__(
        self,
        client: EngineClient,
        observer: EngineObserver,
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._observer = observer
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._identity: EngineIdentity | None = None
        self._identified_at = 0.0
        self._start_time: float | None = None
        self._prompt_tokens: float | None = None
        self._answered_at = clock()
        self._up = False
        self.error = ""
        """Why the last look failed, "" when it did not."""

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            began = self._clock()
            await self.look()
            await self._sleep(max(0.0, self._interval_s - (self._clock() - began)))

    async def look(self) -> None:
        """One look at the engine."""
        try:
            metrics = await self._client.metrics()
            if self._is_other_process(metrics):
                self._identity = None
                self._observer.engine_replaced()
            self._start_time = metrics.start_time or self._start_time
            self._prompt_tokens = metrics.prompt_tokens
            await self._identify(metrics)
        except EngineUnreachable as error:
            self.error = str(error)
            self._lost(f"engine gone: {error}")
            self._identity = None
            self._observer.engine_gone()
        except EngineSilent as error:
            self.error = str(error)
            if self._clock() - self._answered_at >= SILENT_AFTER_S:
                self._lost(f"engine silent: {error}")
                self._observer.engine_silent()
        else:
            self.error = ""
            if not self._up:
                self._up = True
                _logger.info("engine up: %s", self._identity)
            self._answered_at = self._clock()
            self._observer.engine_measured(metrics)

    def _lost(self, message: str) -> None:
        if self._up:
            self._up = False
            _logger.warning("%s", message)

    def _is_other_process(self, metrics: EngineMetrics) -> bool:
        if metrics.start_time is not None and self._start_time is not None:
            return metrics.start_time != self._start_time
        now, before = metrics.prompt_tokens, self._prompt_tokens
        return now is not None and before is not None and now < before

    async def _identify(self, metrics: EngineMetrics) -> None:
        if self._identity is not None and self._clock() - self._identified_at < IDENTITY_EVERY_S:
            return
        identity = await self._client.identity(metrics)
        self._identified_at = self._clock()
        if identity != self._identity:
            self._identity = identity
            await self._observer.engine_seen(identity, metrics)
        else:
            await self._observer.engine_confirmed(identity)


def local_root(root: str | None) -> Path | None:
    """The directory a model card's `root` names, where it is one on this machine."""
    # Not `Path.is_dir`, which raises for one that nobody may look into, or whose volume has gone.
    return Path(root) if root and os.path.isdir(root) else None


def _json(content: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineSilent(f"not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
