"""How each engine is reached: the API key it asks for, TLS, and which of its data-parallel ranks."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import httpx

from gateway.errors import SettingsError
from gateway.settings import EngineTls, ReplicaSettings, Settings, read_secret
from kvstore.client_tls import client_context
from kvstore.errors import TlsFileUnusable


class EngineAccess:
    """What every request to one engine carries beside the client's own. Immutable.

    `headers` and `extensions` (httpx's) are to be put on each request. `tls` is None for a plain engine and shared by
    those of equal settings, so that it can stand for them where connections are pooled.
    """

    __slots__ = ("extensions", "headers", "keyed", "tls")

    def __init__(
        self,
        api_key: str = "",
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
        dp_rank: int | None = None,
    ) -> None:
        self.tls = tls
        self.keyed = bool(api_key)
        self.extensions: Mapping[str, Any] = {"sni_hostname": server_name} if server_name else {}
        self.headers: list[tuple[bytes, bytes]] = []
        if api_key:
            self.headers.append((b"authorization", f"Bearer {api_key}".encode()))
        if dp_rank is not None:
            self.headers.append((b"x-data-parallel-rank", b"%d" % dp_rank))


def engine_accesses(settings: Settings) -> dict[str, EngineAccess]:
    """By the replicas' ids. Reads every key and certificate, once. Raises SettingsError naming the key."""
    contexts: dict[EngineTls, ssl.SSLContext] = {}
    return {
        replica.id: _access(f"replicas[{at}]", replica, settings, contexts)
        for at, replica in enumerate(settings.replicas)
    }


def _access(
    where: str, replica: ReplicaSettings, settings: Settings, contexts: dict[EngineTls, ssl.SSLContext]
) -> EngineAccess:
    api_key = settings.engine_api_key
    if replica.api_key_file:
        api_key = read_secret(f"{where}.api_key_file", replica.api_key_file)
    if httpx.URL(replica.engine).scheme != "https":
        if replica.engine_tls is not None:
            raise SettingsError(f"{where}.engine_tls: the engine's URL is {replica.engine}; TLS needs https")
        return EngineAccess(api_key, dp_rank=replica.dp_rank)
    where, tls = "engine_tls", settings.engine_tls
    if replica.engine_tls is not None:
        where, tls = f"replicas {replica.id}: engine_tls", replica.engine_tls
    if tls not in contexts:
        try:
            contexts[tls] = client_context(tls.ca_file, tls.cert_file, tls.key_file)
        except TlsFileUnusable as error:
            raise SettingsError(f"{where}.{error}") from error
    return EngineAccess(api_key, contexts[tls], tls.server_name, replica.dp_rank)
