"""Sends KV event batches as vLLM does: a PUB socket for live batches, a ROUTER socket that replays recent ones."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import msgspec
import zmq

from replica_agent.reference.errors import PortTakenError, StartError
from replica_agent.reference.wire import Event, EventBatch

_END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Owns both sockets, the replay ring and the thread that alone touches them.

    Live: [topic, sequence number as 8 bytes big-endian, msgpack batch], numbered from 0. Replay: a DEALER sends
    [b"", first number as 8 bytes]; it gets [b"", topic, number, batch] for every batch in the ring from there on, then
    [b"", b"", -1, b""]. `publish` may be called from any one thread at a time and never blocks: a batch that finds the
    queue full is dropped, and consumers see its number missing.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        buffer_steps: int = 10_000,
        high_water_mark: int = 100_000,
        max_queue: int = 100_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Bind both endpoints. Raises PortTakenError or StartError naming the flag."""
        self.dropped = 0
        self._topic = topic.encode()
        self._clock = clock
        self._max_queue = max_queue
        self._encoder = msgspec.msgpack.Encoder()
        self._ring: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._queue: deque[tuple[int, EventBatch]] = deque()
        self._next = 0
        self._closing = False
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER) if replay_endpoint else None
        self._live.set_hwm(high_water_mark)
        try:
            _bind(self._live, endpoint, "--kv-events-endpoint")
            if self._replay is not None and replay_endpoint is not None:
                # Room for the whole ring: a ROUTER drops silently what its peer has no room for.
                self._replay.set_hwm(2 * buffer_steps)
                _bind(self._replay, replay_endpoint, "--kv-replay-endpoint")
        except StartError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._live.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay else None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events")
        self._thread.start()

    def publish(self, events: list[Event]) -> None:
        """Send the events of one step as one batch."""
        number = self._next
        self._next += 1
        if len(self._queue) >= self._max_queue:
            self.dropped += 1
            return
        self._queue.append((number, EventBatch(ts=self._clock(), events=events)))
        self._wake()

    def close(self) -> None:
        """Send what is queued, then close sockets and thread."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        self._context.destroy(linger=100)
        self._wake_in.close()
        self._wake_out.close()

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except BlockingIOError:
            pass  # The thread has wake-ups to read already.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_out.fileno() in ready:
                self._wake_out.recv(4096)
            # Read before the queue is emptied: what was published before `close` is sent.
            closing = self._closing
            self._send_queued()
            if closing:
                return
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _send_queued(self) -> None:
        while self._queue:
            number, batch = self._queue.popleft()
            frames = (number.to_bytes(8, "big"), self._encoder.encode(batch))
            self._ring.append(frames)
            self._live.send_multipart((self._topic, *frames), zmq.NOBLOCK)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        try:
            request = replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(request) != 3 or len(request[2]) != 8:
            return  # Not this protocol; there is nothing to answer that its sender would understand.
        peer, start = request[0], request[2]
        try:
            for number, payload in self._ring:
                # Big-endian numbers of equal length compare as their values do.
                if number >= start:
                    replay.send_multipart((peer, b"", self._topic, number, payload), zmq.NOBLOCK)
            replay.send_multipart((peer, b"", b"", _END, b""), zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # The peer has gone, or reads nothing; it may ask again.


def _bind(target: zmq.Socket[bytes], endpoint: str, flag: str) -> None:
    try:
        target.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE and endpoint.startswith("tcp://"):
            raise PortTakenError(int(endpoint.rsplit(":", 1)[1]), flag) from error
        raise StartError(f"{flag} {endpoint}: {error}") from error
