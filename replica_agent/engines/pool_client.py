"""An engine's connection to its agent's pool: the verbs of `kvstore.engine_messages`, blocking, with deadlines."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvstore import engine_messages as wire
from kvstore.board import BOARD_BYTES, CELLS, read
from kvstore.errors import ProtocolError
from kvstore.frames import LENGTH
from kvstore.hint import Hint
from kvstore.namespace import pack_content_keys
from replica_agent.engines.errors import PoolGone, PoolRefused

_A = TypeVar("_A", bound=wire.Answer)

HELLO_S = 10.0
"""For the first answer: the first engine that says hello has the agent make its pool."""
VERB_S = 1.0
COMMIT_S = 5.0
"""For a commit: the agent computes a checksum over all the bytes."""


class Reserved(NamedTuple):
    """A slot to write to, under the generation that a commit must name."""

    slot: int
    generation: int


class PoolClient:
    """Owns a socket and a mapping of the agent's pool; any thread may use it, one question at a time.

    Whatever goes wrong, a late answer included, ends the connection: answers carry no name, so after one is missing the
    next could not be told apart. Every later call raises PoolGone as well. The memory stays mapped as long as anybody
    holds a slot of it, so a copy that is under way when the agent goes hurts nobody.
    """

    def __init__(self, path: str, hello: wire.EngineHello, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Connect and say hello. Raises PoolRefused with the agent's reason, or PoolGone."""
        self._clock = clock
        self._lock = threading.RLock()
        self._closed = False
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # out of descriptors
            raise PoolGone(f"{path}: {error}") from error
        try:
            self._welcome, self._memory = self._greet(path, hello)
            end = self._welcome.slots * self._welcome.pitch
            self._board = self._memory[end : end + BOARD_BYTES].cast("Q")
        except (OSError, ProtocolError) as error:
            self.close()
            raise PoolGone(f"{path}: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        """Slots of the pool."""
        return self._welcome.slots

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._closed

    def slot(self, index: int) -> memoryview:
        """The `block_bytes` bytes of a slot. Raises PoolGone for one that the pool does not have."""
        if not 0 <= index < self._welcome.slots:
            raise self._end(f"slot {index} of a pool of {self._welcome.slots}")
        start = index * self._welcome.pitch
        return self._memory[start : start + self._welcome.block_bytes]

    def arrived(self, cell: int) -> int:
        """What a cell of the pool's board counts now. Raises PoolGone for one that it does not have."""
        if not 0 <= cell < CELLS:
            raise self._end(f"cell {cell} of a board of {CELLS}")
        return read(self._board, cell)

    def lookup(self, request: str, keys: Sequence[bytes]) -> int:
        """Blocks of the longest run that the agent's own pool holds."""
        return self._ask(wire.Lookup(request=request, keys=pack_content_keys(keys)), wire.Found).blocks

    def prepare(
        self, request: str, keys: Sequence[bytes], cached_blocks: int, prompt_tokens: int, hint: Hint | None
    ) -> wire.Pending | wire.Accepted | wire.Nothing:
        """Ask for the blocks that follow `cached_blocks`."""
        question = wire.Prepare(
            request=request,
            keys=pack_content_keys(keys),
            cached_blocks=cached_blocks,
            prompt_tokens=prompt_tokens,
            hint=hint,
        )
        answer = self._exchange(question)
        if isinstance(answer, wire.Pending | wire.Accepted | wire.Nothing):
            return answer
        raise self._misled(question, answer)

    def poll(
        self, request: str, wait_s: float = 0.0
    ) -> wire.Pending | wire.Accepted | wire.Loading | wire.Ready | wire.Nothing:
        """How far the blocks of a prepared request are. Waits up to `wait_s` for a change, and keeps others from asking
        meanwhile."""
        question = wire.Poll(request=request, wait_s=wait_s)
        answer = self._exchange(question, VERB_S + wait_s)
        if isinstance(answer, wire.Pending | wire.Accepted | wire.Loading | wire.Ready | wire.Nothing):
            return answer
        raise self._misled(question, answer)

    def release(self, request: str, loaded: int, copy_s: float) -> None:
        """The slots of a request are needed no more; `loaded` blocks were copied in `copy_s` seconds."""
        self._ask(wire.Release(request=request, loaded=loaded, copy_s=copy_s), wire.Done)

    def cancel(self, request: str) -> None:
        """Nothing is wanted for a request any more."""
        self._ask(wire.Cancel(request=request), wire.Done)

    def failed(self, request: str, blocks: int) -> None:
        """`blocks` that the engine counted as cached are recomputed."""
        self._ask(wire.Failed(request=request, blocks=blocks), wire.Done)

    def reserve(self, keys: Sequence[bytes], parent: bytes) -> list[Reserved | None]:
        """Slots for consecutive blocks, None for one that is not to be saved. `parent` is b"" at a prompt's start."""
        reserved = self._ask(wire.Reserve(keys=pack_content_keys(keys), parent=parent), wire.Reserved)
        if not len(reserved.slots) == len(reserved.generations) == len(keys):
            raise self._end(f"{len(reserved.slots)} slots for {len(keys)} blocks")
        pairs = zip(reserved.slots, reserved.generations, strict=True)
        return [None if slot < 0 else Reserved(slot, generation) for slot, generation in pairs]

    def commit(self, keys: Sequence[bytes], reserved: Sequence[Reserved], written: Sequence[bool]) -> int:
        """These reserved slots are written, or given up. Returns how many blocks became visible by it."""
        question = wire.Commit(
            keys=pack_content_keys(keys),
            slots=[each.slot for each in reserved],
            generations=[each.generation for each in reserved],
            written=[*written],
        )
        return self._ask(question, wire.Committed, COMMIT_S).blocks

    def clear(self) -> None:
        """Nothing saved before may be served any more."""
        self._ask(wire.Clear(), wire.Done)

    def observe(self, tokens: int, attended: int, seconds: float) -> None:
        """A prefill step of `tokens` that attended to `attended` positions in sum took `seconds`."""
        self._ask(wire.Observe(tokens=tokens, attended=attended, seconds=seconds), wire.Done)

    def alive(self) -> bool:
        """Whether the agent has not hung up, as far as can be seen without waiting; one that has is closed here."""
        # Whoever asks right now will find out by itself.
        if not self._closed and self._lock.acquire(blocking=False):
            try:
                self._socket.settimeout(0.0)
                # Between two questions there is nothing to read, except the end.
                self._socket.recv(1, socket.MSG_PEEK)
                self.close()
            except BlockingIOError:
                pass
            except OSError:
                self.close()
            finally:
                self._lock.release()
        return not self._closed

    def close(self) -> None:
        """End the connection, also under a thread that waits for an answer: its call raises PoolGone. Idempotent."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # It was never connected, or the agent was first.
        # Not before whoever waits for an answer has been woken by the shutdown: its descriptor must not become another.
        with self._lock:
            self._socket.close()

    def _greet(self, path: str, hello: wire.EngineHello) -> tuple[wire.Welcome, memoryview]:
        deadline = self._clock() + HELLO_S
        self._socket.settimeout(HELLO_S)
        self._socket.connect(path)
        self._socket.sendall(wire.encode(hello))
        # The descriptor comes with the first byte, so that byte is read by the call that can take it.
        first, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if not first:
                raise PoolGone(f"{path}: the agent hung up")
            header = first + self._receive(LENGTH.size - 1, deadline)
            answer = wire.decode_answer(self._receive(wire.frame_length(header), deadline))
            if isinstance(answer, wire.Refused):
                raise PoolRefused(answer.reason)
            if not isinstance(answer, wire.Welcome) or not descriptors:
                raise PoolGone(f"{path}: {type(answer).__name__} with {len(descriptors)} descriptors is no welcome")
            return answer, _map(descriptors[0], answer, hello.block_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _ask(self, question: wire.Question, kind: type[_A], seconds: float | None = None) -> _A:
        answer = self._exchange(question, seconds)
        if isinstance(answer, kind):
            return answer
        raise self._misled(question, answer)

    def _exchange(self, question: wire.Question, seconds: float | None = None) -> wire.Answer:
        seconds = VERB_S if seconds is None else seconds
        frame = wire.encode(question)
        deadline = self._clock() + seconds
        if not self._lock.acquire(timeout=seconds):
            # Left unasked, a release would leave its blocks pinned for as long as the connection lives.
            raise self._end(f"{type(question).__name__}: another question is still not answered")
        try:
            if self._closed:
                raise PoolGone("the connection is closed")
            self._socket.settimeout(max(deadline - self._clock(), 0.001))
            self._socket.sendall(frame)
            length = wire.frame_length(self._receive(LENGTH.size, deadline))
            return wire.decode_answer(self._receive(length, deadline))
        except (OSError, ProtocolError) as error:
            raise self._end(f"{type(question).__name__}: {error}") from error
        finally:
            self._lock.release()

    def _receive(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        got = 0
        while got < count:
            self._socket.settimeout(max(deadline - self._clock(), 0.001))
            more = self._socket.recv_into(view[got:])
            if not more:
                raise ConnectionResetError("the agent hung up")
            got += more
        return bytes(data)

    def _misled(self, question: wire.Question, answer: wire.Answer) -> PoolGone:
        return self._end(f"{type(question).__name__} was answered with {type(answer).__name__}")

    def _end(self, message: str) -> PoolGone:
        self.close()
        return PoolGone(message)


def _map(descriptor: int, welcome: wire.Welcome, block_bytes: int) -> memoryview:
    """The pool's memory. What the agent says of it is checked here, for it decides which addresses are written to."""
    size = os.fstat(descriptor).st_size
    if welcome.block_bytes != block_bytes:
        raise PoolGone(f"block_bytes: the pool is for blocks of {welcome.block_bytes}, not {block_bytes}")
    if not block_bytes <= welcome.pitch or not 0 < welcome.slots * welcome.pitch <= size - BOARD_BYTES:
        raise PoolGone(f"slots: {welcome.slots} of {welcome.pitch} bytes in a region of {size}")
    return memoryview(mmap.mmap(descriptor, size))
