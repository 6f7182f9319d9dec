"""Follows one engine's KV events over ZMQ, through gaps, restarts and bad messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from replica_agent.errors import EventDecodeError, ReplayError
from replica_agent.events.decode import EventBatch, decode_batch
from replica_agent.events.sequencer import EventSequencer, Replay

_logger = logging.getLogger(__name__)

REPLY_DEADLINE_S = 5.0
"""Longest wait for the next message of a replay; vLLM looks at its replay socket every 100 ms and between batches."""

QUIET_S = 1.0
"""Silence after which the tail is checked once: the loss of the last batch before it would go unnoticed."""

MESSAGES_A_TURN = 32
"""Messages taken in before other tasks have their turn: a few ms of work when each carries a 2,048-token chunk."""

MAX_MESSAGE_BYTES = 64 << 20
"""A batch of 100,000 tokens has half a megabyte. ZMQ ends the connection of who sends more, which costs a resync."""

_END = (-1).to_bytes(8, "big", signed=True)


class EventSink(Protocol):
    """What events do to the agent. Both are called from the subscriber's task, in the engine's order."""

    def apply(self, batch: EventBatch) -> None:
        """Takes in a batch."""

    def restart(self, reason: str) -> None:
        """What was applied so far can no longer be vouched for: forget it."""


class SubscriberCounts:
    """What has been seen since the agent's start, for metrics."""

    def __init__(self) -> None:
        self.batches = 0
        self.malformed = 0
        self.replays = 0
        self.failed_replays = 0
        self.other_rank = 0


class KvEventSubscriber:
    """One subscription after another, each for one connection to the engine's publisher.

    Owns its sockets and the sequencer. A lost connection, or `restart`, ends a life: the sink is told, and the next
    one begins with a socket of its own, so that nothing in the old one's pipe can be taken for the new engine's. While
    paused there is no subscription at all. `run` never returns by itself. `other_rank` is the rank of the last batch,
    where that is not the rank followed.
    """

    def __init__(
        self,
        sink: EventSink,
        events_endpoint: str,
        replay_endpoint: str | None,
        *,
        topic: str = "",
        dp_rank: int = 0,
        reply_deadline_s: float = REPLY_DEADLINE_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._sink = sink
        self._events_endpoint = events_endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._dp_rank = dp_rank
        self._reply_deadline_s = reply_deadline_s
        self._quiet_s = quiet_s
        self._allowed = asyncio.Event()
        self._over: asyncio.Future[str] | None = None
        self._wake = asyncio.Event()
        self.counts = SubscriberCounts()
        self.connected = False
        self.last_error = ""
        self.other_rank: int | None = None
        self._sequencer = EventSequencer(self._apply, sink.restart, can_replay=replay_endpoint is not None)

    @property
    def gaps(self) -> int:
        """Holes seen in the live stream since the agent's start."""
        return self._sequencer.gaps

    @property
    def syncing(self) -> bool:
        """Whether a replay is still to come or under way."""
        return self._sequencer.syncing

    def resume(self) -> None:
        """Lets a subscription begin."""
        self._allowed.set()

    def pause(self, reason: str) -> None:
        """Ends the subscription until `resume`."""
        self._allowed.clear()
        self.restart(reason)

    def restart(self, reason: str) -> bool:
        """Ends the subscription, and whether there was one to end; the next one begins at once unless paused."""
        if self._over is None or self._over.done():
            return False
        self._over.set_result(reason)
        return True

    async def run(self) -> None:
        """Follows the engine until cancelled."""
        context = zmq.asyncio.Context()
        try:
            while True:
                await self._allowed.wait()
                reason = await self._follow(context)
                self._sequencer.begin(reason)
        finally:
            context.destroy(linger=0)

    async def _follow(self, context: zmq.asyncio.Context) -> str:
        over = self._over = asyncio.get_running_loop().create_future()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        tasks: list[asyncio.Task[None]] = []
        try:
            socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            socket.connect(self._events_endpoint)
            handshake = asyncio.Event()
            tasks = [
                asyncio.create_task(self._watch(monitor, handshake, over)),
                asyncio.create_task(self._receive(socket)),
                asyncio.create_task(self._replay_when_wanted(context, handshake)),
            ]
            await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # a defect here must end the agent, not leave it deaf
            reason: str = over.result()
            return reason
        finally:
            self.connected = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    async def _watch(self, monitor: zmq.asyncio.Socket, handshake: asyncio.Event, over: asyncio.Future[str]) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
                handshake.set()
            elif not over.done():
                over.set_result("disconnected")

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        checked = False
        while True:
            if not await socket.poll(int(self._quiet_s * 1000)):
                if not checked and not self.syncing:
                    self._sequencer.check_tail()
                    self._wake.set()
                    checked = True
                continue
            checked = False
            async for frames in _drain(socket):
                if len(frames) == 3 and len(frames[1]) == 8:
                    self._sequencer.live(int.from_bytes(frames[1], "big"), frames[2])
                else:
                    self._malformed(EventDecodeError(f"{len(frames)} frames instead of topic, seq, payload"))
            if self.syncing:
                self._wake.set()

    async def _replay_when_wanted(self, context: zmq.asyncio.Context, handshake: asyncio.Event) -> None:
        # Only once subscribed: what is published between the replay's end and the subscription would be lost.
        await handshake.wait()
        while True:
            replay = self._sequencer.wanted
            if replay is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            self.counts.replays += 1
            try:
                async with aclosing(self._replay(context, replay)) as reply:
                    async for seq, payload in reply:
                        self._sequencer.replayed(replay, seq, payload)
                        if self._sequencer.wanted is not replay:
                            break
                    else:
                        self._sequencer.replay_ended(replay)
            except ReplayError as error:
                self.counts.failed_replays += 1
                self.last_error = str(error)
                _logger.warning("replay of KV events from %d failed: %s", replay.start, error)
                self._sequencer.replay_failed(replay)

    async def _replay(self, context: zmq.asyncio.Context, replay: Replay) -> AsyncGenerator[tuple[int, bytes], None]:
        """Batches from `replay.start` to the end marker. Raises ReplayError."""
        assert self._replay_endpoint is not None
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.RCVHWM, 0)  # an unlimited inbox: the ROUTER drops what finds no room
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", replay.start.to_bytes(8, "big")])
            while True:
                if not await socket.poll(int(self._reply_deadline_s * 1000)):
                    raise ReplayError(f"no answer from {self._replay_endpoint} within {self._reply_deadline_s:g} s")
                async with aclosing(_drain(socket)) as messages:
                    async for frames in messages:
                        # [b"", topic, seq, payload]; vLLM before 0.28 leaves the topic out.
                        if len(frames) < 3 or len(frames[-2]) != 8:
                            raise ReplayError(f"{len(frames)} frames instead of an empty one, topic, seq, payload")
                        if frames[-2] == _END and not frames[-1]:
                            return
                        yield int.from_bytes(frames[-2], "big"), frames[-1]
        finally:
            socket.close(linger=0)

    def _apply(self, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except EventDecodeError as error:
            self._malformed(error)
            return
        self.counts.batches += 1
        if batch.rank is not None and batch.rank != self._dp_rank:
            self.counts.other_rank += 1
            self.other_rank = batch.rank
            return
        self.other_rank = None
        self._sink.apply(batch)

    def _malformed(self, error: EventDecodeError) -> None:
        self.counts.malformed += 1
        _logger.debug("a batch of KV events could not be read: %s", error)
        self.last_error = str(error)
        self._sequencer.reject("malformed")


async def _drain(socket: zmq.asyncio.Socket) -> AsyncGenerator[list[bytes], None]:
    """What has arrived already, giving way to other tasks now and then: receiving what is there never suspends."""
    for count in itertools.count(1):
        try:
            frames: list[bytes] = await socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield frames
        if count % MESSAGES_A_TURN == 0:
            await asyncio.sleep(0)
