"""Which transports an agent has, and which of them it uses for a peer."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import TransportUnavailable
from kvstore.peer_messages import Offer
from kvstore.transfer.base import Authorize, Region, Transport
from kvstore.transfer.nixl import make_nixl
from kvstore.transfer.shm import Shm
from kvstore.transfer.tcp import Tcp, TcpTls

NAMES = ("shm", "nixl", "tcp", "nixl-push")
"""Every transport between processes, the fastest first."""


def make_transports(
    names: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise: tuple[str, int] | None = None,
    tls: TcpTls | None = None,
) -> list[Transport]:
    """Transports of these names, in this order, not started. Those that listen do so on `host`; `port` is that of
    `tcp`, 0 for any, and `advertise` where peers reach it if not there; `tls` encrypts it. Raises
    ValueError for a name that is not in `NAMES`, or is given twice."""
    made: dict[str, Transport] = {}
    nixl = make_nixl(host)
    for name in names:
        if name in made or name not in NAMES:
            raise ValueError(f"expected different ones of {', '.join(NAMES)}, got {','.join(names)!r}")
        tcp = Tcp(host, port, advertise=advertise, tls=tls) if name == "tcp" else None
        made[name] = tcp or (Shm() if name == "shm" else nixl[name])
    return [*made.values()]


async def start_transports(
    transports: Sequence[Transport], region: Region, authorize: Authorize
) -> tuple[list[Transport], dict[str, str]]:
    """The transports that could be started, in the same order; and, by name, why the others could not."""
    started: list[Transport] = []
    unavailable: dict[str, str] = {}
    for transport in transports:
        try:
            await transport.start(region, authorize)
            started.append(transport)
        except TransportUnavailable as error:
            unavailable[transport.name] = str(error)
    return started, unavailable


def choose(transports: Sequence[Transport], offers: Sequence[Offer]) -> tuple[Transport, Offer] | None:
    """The first transport of one's own that reaches a peer by one of its offers; None when none does."""
    for transport in transports:
        for offer in offers:
            if offer.transport == transport.name and transport.reaches(offer):
                return transport, offer
    return None
