"""The engine: one compute thread that schedules, computes, samples and publishes, step after step."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import torch

from kvstore.cost import attended
from replica_agent.reference.block_pool import BlockPool
from replica_agent.reference.detokenizer import Decoder, Detokenizer, StopFilter
from replica_agent.reference.errors import EngineDownError
from replica_agent.reference.metrics import BlockCounts, Metrics
from replica_agent.reference.model import Interrupted, Llama, Span
from replica_agent.reference.pool_connector import PoolConnector
from replica_agent.reference.publisher import EventPublisher
from replica_agent.reference.sampler import Sampler
from replica_agent.reference.scheduler import Scheduler
from replica_agent.reference.sequence import FinishReason, Output, Sequence

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Load(NamedTuple):
    """How busy the engine is; `usage` is the share of blocks that running sequences use."""

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    usage: float = 0.0


class _Choice(NamedTuple):
    sampler: Sampler
    detokenizer: Detokenizer
    stops: StopFilter


def _look() -> None:
    """A message that says nothing but that the scheduler should be asked again."""


class Engine:
    """Owns the compute thread, and through it scheduler, pool and model, which no other thread may touch.

    Any thread may `submit`, `abort` and `call`: these leave a message and return at once. A sequence's `deliver` is
    called from the compute thread, the last time with a finish reason. When a step fails, every sequence ends with
    "error" and `alive` turns false.
    """

    def __init__(
        self,
        model: Llama,
        pool: BlockPool,
        scheduler: Scheduler,
        decoder: Decoder,
        metrics: Metrics,
        publisher: EventPublisher | None,
        connector: PoolConnector | None = None,
        *,
        threads: int = 1,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self._model = model
        self._decoder = decoder
        self._metrics = metrics
        self._publisher = publisher
        self._connector = connector
        self._threads = threads
        self._random = random.Random(seed)
        self._clock = clock
        self._eos = model.config.eos_token_ids
        self._choices: dict[Sequence, _Choice] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._submitted: dict[Sequence, int] = {}
        self._accepted: list[Sequence] = []
        self._wake = threading.Condition()
        self._computed = False
        """Whether the last step found work; if not, the next one waits for a message or for the scheduler's time."""
        self._stopping = False
        self._interrupt = threading.Event()
        self.alive = True
        self._load = Load()
        metrics.watch(self.load, lambda: publisher.dropped if publisher else 0)
        if connector is not None:
            metrics.watch_blocks(self._block_counts)
            connector.on_change(lambda: self._post(_look))
        self._thread = threading.Thread(target=self._run, name="compute")
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises EngineDownError when nothing will ever compute it."""
        sequence.arrival = self._clock()
        with self._wake:
            if not self.alive or self._stopping:
                raise EngineDownError("the engine has stopped")
            self._submitted[sequence] = len(sequence.tokens)
            self._inbox.append(lambda: self._accept(sequence))
            self._wake.notify()

    def abort(self, sequence: Sequence) -> None:
        """End a sequence and free what it holds, at the end of the step under way; ended ones are left alone."""
        self._post(lambda: self._end(sequence, "", "abort"))

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run `function` on the compute thread between two steps: a consistent view of pool and scheduler."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if not self._post(run):
            future.set_exception(EngineDownError("the engine has stopped"))
        return future

    def load(self) -> Load:
        """Load at the end of the last step, with what has been submitted since."""
        with self._wake:
            load, submitted = self._load, list(self._submitted.values())
        return load._replace(
            waiting=load.waiting + len(submitted),
            queued_prefill_tokens=load.queued_prefill_tokens + sum(submitted),
        )

    def close(self) -> None:
        """Abort everything and stop the thread, giving up the step under way."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._interrupt.set()
        self._thread.join()

    def _post(self, message: Callable[[], None]) -> bool:
        with self._wake:
            if not self.alive or self._stopping:
                return False
            self._inbox.append(message)
            self._wake.notify()
        return True

    def _run(self) -> None:
        # The number of threads belongs to the thread that asks for the work.
        torch.set_num_threads(self._threads)
        try:
            while self._receive():
                self._computed = self._step()
        except Interrupted:
            pass
        except Exception:
            _log.exception("the compute thread failed")
        with self._wake:
            self.alive = False
            left = list(self._inbox)
            self._inbox.clear()
        for message in left:
            message()
        reason: FinishReason = "abort" if self._stopping else "error"
        for sequence in list(self._choices):
            self._end(sequence, "", reason)
        self._publish()

    def _receive(self) -> bool:
        """Take in messages; wait for one when there is nothing to compute. False when it is time to stop."""
        with self._wake:
            while not self._inbox and not self._stopping and not self._computed:
                until = self.scheduler.wake_at()
                patience = None if until is None else until - self._clock()
                if patience is not None and patience <= 0:
                    break
                self._wake.wait(patience)
            messages = list(self._inbox)
            self._inbox.clear()
            stopping = self._stopping
        for message in messages:
            message()
        if messages:
            self._publish()
            self._note_load()
        return not stopping

    def _accept(self, sequence: Sequence) -> None:
        self._choices[sequence] = _Choice(
            Sampler(sequence.params, self._random.getrandbits(63)),
            Detokenizer(self._decoder),
            StopFilter(sequence.params.stop),
        )
        self.scheduler.add(sequence)
        self._accepted.append(sequence)

    def _step(self) -> bool:
        """One step. False when there was nothing to compute."""
        began = self._clock()
        work = self.scheduler.schedule()
        if not work:
            self._publish()
            self._note_load()
            return False
        try:
            spans = [
                Span(
                    item.sequence.tokens[item.sequence.computed :][: item.tokens],
                    item.sequence.computed,
                    item.sequence.blocks,
                )
                for item in work
            ]
            logits = self._model.forward(spans, self._interrupt)
            rows = {id(item.sequence): row for row, item in enumerate(work)}
            for sequence in self.scheduler.commit(work):
                self._advance(sequence, logits[rows[id(sequence)]])
        finally:
            # Evictions of this step have happened even if the computation failed.
            self._publish()
        self._note_load()
        self._observe(spans, self._clock() - began)
        return True

    def _observe(self, spans: list[Span], seconds: float) -> None:
        """Tell what prefill costs, by steps in which decodes are at most a sixteenth of the tokens: more would count
        their share of the weights' reading as prefill's."""
        tokens = sum(len(span.tokens) for span in spans)
        decodes = sum(len(span.tokens) == 1 for span in spans)
        if self._connector is not None and 16 * decodes <= tokens:
            seen = sum(attended(len(span.tokens), span.start) for span in spans)
            self._connector.observe(tokens, seen, seconds)

    def _advance(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Give a sequence its next token and tell its reader."""
        choice = self._choices[sequence]
        token = choice.sampler.draw(logits)
        sequence.tokens.append(token)
        if sequence.first_token_at is None:
            sequence.first_token_at = self._clock()
            self._metrics.first_token(sequence.prompt_length, sequence.first_token_at - sequence.arrival)
        self._metrics.generated()
        at_eos = token in self._eos and not sequence.params.ignore_eos
        text, stopped = ("", False) if at_eos else choice.stops.push(choice.detokenizer.push(token))
        if not stopped and (at_eos or sequence.generated >= sequence.params.max_tokens):
            tail, stopped = choice.stops.push(choice.detokenizer.finish())
            text += tail if stopped else tail + choice.stops.finish()
            self._end(sequence, text, "stop" if at_eos or stopped else "length")
        elif stopped:
            self._end(sequence, text, "stop")
        else:
            self._deliver(sequence, text, None)

    def _end(self, sequence: Sequence, text: str, reason: FinishReason) -> None:
        if self._choices.pop(sequence, None) is None:
            return
        self.scheduler.finish(sequence)
        self._metrics.finished(reason, self._clock() - sequence.arrival)
        self._deliver(sequence, text, reason)

    def _deliver(self, sequence: Sequence, text: str, reason: FinishReason | None) -> None:
        sequence.deliver(Output(text, sequence.generated, sequence.cached or 0, reason))

    def _block_counts(self) -> BlockCounts:
        assert self._connector is not None
        scheduler = self.scheduler
        return BlockCounts(
            self._connector.saved, self._connector.shed, scheduler.loaded_blocks, scheduler.failed_blocks
        )

    def _publish(self) -> None:
        events = self.pool.drain()
        if events and self._publisher is not None:
            self._publisher.publish(events)

    def _note_load(self) -> None:
        scheduler = self.scheduler
        load = Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_prefill_tokens=scheduler.queued_prefill_tokens(),
            usage=scheduler.used_blocks / self.pool.num_blocks,
        )
        with self._wake:
            # In one move, so that a sequence is never counted twice or not at all.
            self._load = load
            for sequence in self._accepted:
                self._submitted.pop(sequence, None)
        self._accepted.clear()
        self._metrics.cache(scheduler.queried_tokens, scheduler.hit_tokens, scheduler.preemptions)
