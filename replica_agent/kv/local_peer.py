"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class LocalPeer(NamedTuple):
    """The process that connected, or that listens, by the kernel's own word (SO_PEERCRED)."""

    pid: int
    uid: int

    @property
    def trusted(self) -> bool:
        """Whether it runs as this process's user, or as root."""
        return self.uid in (os.geteuid(), 0)


def local_peer(connection: socket.socket) -> LocalPeer:
    """Of a connected socket. Raises OSError."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(told)
    return LocalPeer(pid, uid)
