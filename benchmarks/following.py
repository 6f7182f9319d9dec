"""A report stream as benchmarks follow one: into an index, with nothing learned but what is held."""

from __future__ import annotations

import httpx

from gateway.fleet.replica import Replica
from gateway.fleet.report_stream import ReportStream
from gateway.placement.index import PrefixIndex


def report_stream(replica: Replica, index: PrefixIndex, client: httpx.AsyncClient) -> ReportStream:
    """Of a replica that has an agent; without a token, with route seed 0."""
    assert replica.agent is not None

    async def ignore(*_: object) -> None: ...

    return ReportStream(
        replica,
        replica.agent,
        index,
        client,
        token="",
        route_seed=0,
        on_hello=lambda *_: None,
        on_model_files=ignore,
        on_fetch=lambda _: None,
    )
