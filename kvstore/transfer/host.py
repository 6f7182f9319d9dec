"""What a transport needs to know of the host it runs on."""

from __future__ import annotations

import os
from pathlib import Path


def host_identity() -> str:
    """Equal for two processes exactly if a PID means the same process to both. Raises OSError without /proc."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def has_rdma() -> bool:
    """Whether this host has a device for remote direct memory access."""
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def may_read_memory(pid: int) -> bool:
    """Whether the kernel lets this process read that one's memory."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
        return True
    except OSError:
        return False
