"""What can be seen of an engine from outside."""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec

from gateway.doctor.findings import Patient
from gateway.fleet.engine_http import EngineHttp

KEY_FIX = (
    "gateway: PREFIX_GATEWAY_ENGINE_API_KEY, or the replica's api_key_file, with the key of the engine's --api-key"
)
EVENTS_FIX = (
    """vLLM's --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", """
    """"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'"""
)

_ENGINE = re.compile(r"^(vllm|sglang|reference_engine):", re.MULTILINE)
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_ERRORS = (httpx.HTTPError, msgspec.MsgspecError, RecursionError, UnicodeError)


class EngineCheck:
    """Asks engines, with their keys and over their TLS. With `probe` each computes one token of a tiny prompt."""

    def __init__(self, engines: EngineHttp, *, probe: bool, timeout_s: float) -> None:
        self._engines = engines
        self._probe = probe
        self._timeout_s = timeout_s

    async def examine(self, patient: Patient) -> None:
        """Fills in what the engine says of itself."""
        if not await self._serves(patient):
            return
        await self._describe(patient)
        await self._publishes(patient)
        if self._probe:
            await self._counts_cached_tokens(patient)

    async def _serves(self, patient: Patient) -> bool:
        where = patient.replica.engine
        start = "start the engine, or correct the replica's engine"
        try:
            response = await self._engines.get(patient.replica, "/v1/models", timeout_s=self._timeout_s)
        except httpx.HTTPError as error:
            if "certificate verify failed" in str(error):
                fix = "gateway: engine_tls.ca_file, engine_tls.server_name"
                patient.report("engine_tls", f"the engine at {where} is not believed: {error}", fix)
            else:
                patient.report("engine_down", f"the engine at {where}: {_words(error)}", start)
            return False
        if response.status_code == 401:
            verb = "refuses the gateway's" if patient.replica.access.keyed else "asks for an"
            patient.report("engine_key", f"the engine at {where} {verb} API key", KEY_FIX)
            return False
        if response.status_code != 200:
            patient.report(
                "engine_down", f"the engine at {where} answers /v1/models with {response.status_code}", start
            )
            return False
        try:
            cards = msgspec.json.decode(response.content)["data"]
            cards.sort(key=lambda card: card.get("parent") is not None)
            patient.models = [str(card["id"]) for card in cards]
        except (*_ERRORS, KeyError, TypeError, AttributeError):
            patient.models = []
        if not patient.models:
            patient.report("engine_down", f"{where}/v1/models names no model", f"{start}: this is no OpenAI endpoint")
        return bool(patient.models)

    async def _describe(self, patient: Patient) -> None:
        """By `/metrics` and `/version`, where there are such pages."""
        metrics = await self._text(patient, "/metrics")
        if found := _ENGINE.search(metrics):
            patient.engine = {"reference_engine": "reference"}.get(found[1], found[1])
        if found := _CACHE_CONFIG.search(metrics):
            config = dict(_LABEL.findall(found[1]))
            patient.block_size = int(config["block_size"]) if config.get("block_size", "").isdigit() else 0
            if config.get("enable_prefix_caching") == "False":
                message = "the engine caches no prefixes: there is nothing to route by"
                patient.report("prefix_caching_off", message, "vLLM: --enable-prefix-caching")
        version = (await self._object(patient, "/version") or {}).get("version")
        patient.version = version if isinstance(version, str) else ""

    async def _publishes(self, patient: Patient) -> None:
        told = await self._object(patient, "/kv_event_sources")
        if told is None:
            return
        sources = {int(rank): source for rank, source in told.items() if rank.isdigit() and isinstance(source, dict)}
        patient.sources = sources
        rank = patient.replica.dp_rank
        if patient.replica.agent is not None and (not sources or (rank is not None and rank not in sources)):
            patient.report("events_off", "the engine publishes no KV events", EVENTS_FIX)

    async def _counts_cached_tokens(self, patient: Patient) -> None:
        body = msgspec.json.encode({"model": patient.models[0], "prompt": "One", "max_tokens": 1})
        try:
            response = await self._engines.post(patient.replica, "/v1/completions", body, timeout_s=self._timeout_s)
            response.raise_for_status()
            usage = msgspec.json.decode(response.content)["usage"]
            counted = usage.get("prompt_tokens_details") is not None
        except (*_ERRORS, KeyError, TypeError, AttributeError) as error:
            message = f"one token could not be had from /v1/completions: {_words(error)}"
            patient.report("probe_failed", message, "read the engine's log, or give --no-probe", note=True)
            return
        if not counted:
            message = "answers do not say how many prompt tokens were cached: predictions cannot be compared"
            fix = "vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report"
            patient.report("prompt_tokens_details", message, fix)

    async def _text(self, patient: Patient, path: str) -> str:
        try:
            response = await self._engines.get(patient.replica, path, timeout_s=self._timeout_s)
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == 200 else ""

    async def _object(self, patient: Patient, path: str) -> dict[str, Any] | None:
        try:
            value = msgspec.json.decode(await self._text(patient, path))
        except _ERRORS:
            return None
        return value if isinstance(value, dict) else None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
