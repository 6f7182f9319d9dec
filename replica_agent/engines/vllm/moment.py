"""Points in an engine's computing: on a CPU the time it is, on an accelerator a place in its queue of work."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch


class Moment(ABC):
    """All that was given to the device before it is before it; any thread may wait for it."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the device has come so far."""

    @abstractmethod
    def since(self, earlier: Moment) -> float:
        """Seconds the device took from `earlier`, of the same device, to here. Only after `wait`."""


class HostMoment(Moment):
    """The device is the host: what was called has been computed when the call returns."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        pass

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, HostMoment)
        return self._at - earlier._at


class CudaMoment(Moment):
    """An event on the stream that computes, made by the thread that launches it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, CudaMoment)
        return float(earlier._event.elapsed_time(self._event)) / 1_000


def now_on(device: torch.device) -> Moment:
    """This moment of a device."""
    return CudaMoment() if device.type == "cuda" else HostMoment()
