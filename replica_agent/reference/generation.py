"""One HTTP request's choices on their way through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvstore.hint import Hint
from replica_agent.reference.engine import Engine
from replica_agent.reference.errors import EngineDownError
from replica_agent.reference.sequence import Output, SamplingParams, Sequence


class Generation:
    """Owns the sequences of one request: choice i continues prompt i // n. Used by one task of the event loop.

    Nothing is submitted before `outputs` is iterated. What has not ended when that iteration ends, or at `close`, is
    aborted.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        params: list[list[SamplingParams]],
        salt: str | None,
        request_id: str,
        hint: Hint | None = None,
    ) -> None:
        """`params[p]` holds the parameters of each choice of prompt p."""
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._salt = salt
        self._request_id = request_id
        self._hint = hint
        self._running: dict[int, Sequence] = {}
        self._last: list[Output | None] = [None] * sum(len(choices) for choices in params)

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """(choice, what it got), as they come. Raises EngineDownError when the engine ends a choice by itself."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()

        def deliver(index: int, output: Output) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, (index, output))
            except RuntimeError:
                pass  # The loop has closed under a request that nobody waits for any more.

        running = self._running
        try:
            index = 0
            for prompt, choices in zip(self._prompts, self._params, strict=True):
                for params in choices:
                    sequence = Sequence(
                        tokens=list(prompt),
                        params=params,
                        deliver=lambda output, index=index: deliver(index, output),  # type: ignore[misc]
                        salt=self._salt,
                        request=f"{self._request_id}-{index}",
                        hint=self._hint,
                    )
                    self._engine.submit(sequence)
                    running[index] = sequence
                    index += 1
            while running:
                index, output = await queue.get()
                if output.finish is not None:
                    del running[index]
                if output.finish in ("abort", "error"):
                    raise EngineDownError("the engine stopped before the answer was complete")
                self._last[index] = output
                yield index, output
        finally:
            self.close()

    def close(self) -> None:
        """Abort what has not ended: for an iteration that is left suspended, as by a response that is cancelled."""
        for sequence in self._running.values():
            self._engine.abort(sequence)
        self._running.clear()

    def usage(self) -> dict[str, Any]:
        """Token counts so far. A prompt counts once, however many choices continue it."""
        prompt = sum(map(len, self._prompts))
        generated = sum(output.generated for output in self._last if output)
        cached = index = 0
        for choices in self._params:
            first = self._last[index]
            cached += first.cached if first else 0
            index += len(choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
