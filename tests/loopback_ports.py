"""Ports for servers of tests that must know their address before they listen."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

HOST = "127.0.0.1"
_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_given: set[int] = set()
_random = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Different ports that were free a moment ago, none of which this process was ever given.

    And none that the system gives to whoever asks for any: a server binds its port when it has started, and until then
    a connection of somebody else's would have got one. Even its own clients' might, which try until it answers.
    """
    return [adjacent_ports(1) for _ in range(count)]


def free_port() -> int:
    """One of `free_ports`."""
    return adjacent_ports(1)


def adjacent_ports(count: int) -> int:
    """The first of so many `free_ports` in a row."""
    while True:
        first = _random.choice(_PORTS)
        run = range(first, first + count)
        if _given.isdisjoint(run) and _ALL.issuperset(run) and _are_free(run):
            _given.update(run)
            return first


def _are_free(ports: range) -> bool:
    with contextlib.ExitStack() as held:
        try:
            for port in ports:
                held.enter_context(socket.create_server((HOST, port)))
        except OSError:
            return False
        return True


def _ports() -> list[int]:
    """All that the system gives to nobody, or all there are if it gives all of them."""
    every = range(_LOWEST, 1 << 16)
    try:
        least, most = map(int, _RANGE.read_text().split())
    except OSError:  # not Linux
        least, most = 32_768, 65_535
    return [port for port in every if not least <= port <= most] or list(every)


_PORTS = _ports()
_ALL = frozenset(_PORTS)
