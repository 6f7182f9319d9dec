"""The same slots on a GPU: from one process's memory on the device to another's (CUDA IPC), and by way of the host."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from replica_agent.bench.report import Speed

_DEVICE = Path("/dev/nvidiactl")
_SECTION_S = 30.0
_START_S = 60.0


def gpu_speeds(slots: int, slot_bytes: int, rounds: int, device: str = "cuda") -> list[Speed]:
    """Nothing without a GPU; what fails says so in its place. Device "cpu" goes through the same motions."""
    if device == "cuda" and not _DEVICE.exists():
        return []
    speeds = []
    for path, made in (("gpu, CUDA IPC", _ipc), ("gpu, to host", _to_host), ("gpu, from host", _from_host)):
        try:
            with made(slots, slot_bytes, device) as (source, target):
                speeds.append(_timed(path, lambda s=source, t=target: _copy(s, t), slots * slot_bytes, rounds))  # type: ignore[misc]
        except Exception as error:
            speeds.append(Speed(path=path, failed=f"{type(error).__name__}: {error}"))
    return speeds


def _timed(path: str, run: Callable[[], None], count: int, rounds: int) -> Speed:
    run()
    seconds: list[float] = []
    end = time.monotonic() + _SECTION_S
    while len(seconds) < rounds and time.monotonic() < end:
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    return Speed(
        path=path,
        median_ms=round(median * 1e3, 3),
        median_gb_s=round(count / median / 1e9, 2),
        best_gb_s=round(count / min(seconds) / 1e9, 2),
    )


def _copy(source: Any, target: Any) -> None:
    """Slot by slot, scattered on both sides, until the device is done."""
    import torch

    slots = len(source)
    for at in range(slots):
        target[at * 5 % slots].copy_(source[at * 7 % slots], non_blocking=True)
    if source.is_cuda or target.is_cuda:
        torch.cuda.synchronize()


@contextlib.contextmanager
def _ipc(slots: int, slot_bytes: int, device: str) -> Iterator[tuple[Any, Any]]:
    import torch
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_own, args=(theirs, slots, slot_bytes, device), daemon=True)
    process.start()
    try:
        if not ours.poll(_START_S):
            raise TimeoutError("the owner of the memory did not start")
        source = ours.recv()
        yield source, torch.zeros((slots, slot_bytes), dtype=torch.uint8, device=device)
        # An owner may end only when nobody has its memory any more.
        del source
    finally:
        ours.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def _own(connection: Any, slots: int, slot_bytes: int, device: str) -> None:
    import torch

    pool = torch.ones((slots, slot_bytes), dtype=torch.uint8, device=device)
    connection.send(pool)
    with contextlib.suppress(EOFError, OSError):
        connection.recv()


@contextlib.contextmanager
def _to_host(slots: int, slot_bytes: int, device: str) -> Iterator[tuple[Any, Any]]:
    yield _pool(slots, slot_bytes, device), _pool(slots, slot_bytes, "cpu", pinned=device == "cuda")


@contextlib.contextmanager
def _from_host(slots: int, slot_bytes: int, device: str) -> Iterator[tuple[Any, Any]]:
    yield _pool(slots, slot_bytes, "cpu", pinned=device == "cuda"), _pool(slots, slot_bytes, device)


def _pool(slots: int, slot_bytes: int, device: str, *, pinned: bool = False) -> Any:
    import torch

    return torch.zeros((slots, slot_bytes), dtype=torch.uint8, device=device, pin_memory=pinned)
