"""The connector to an agent's pool: a thread that saves blocks, a thread that loads them, and their link."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore.engine_messages import EngineHello
from kvstore.hint import Hint
from replica_agent.engines import saver
from replica_agent.engines.pool_link import PoolLink
from replica_agent.reference.block_memory import BlockMemory
from replica_agent.reference.block_pool import BlockPool
from replica_agent.reference.connector import Connector, Saving, Search
from replica_agent.reference.loader import Loader


class PoolConnector(Connector):
    """Owns the link to the agent, the saver and the loader. `close` only when the compute thread has ended."""

    def __init__(
        self, path: str, hello: EngineHello, pool: BlockPool, memory: BlockMemory, *, max_queued: int = 4096
    ) -> None:
        self._link = PoolLink(path, hello)
        self._saver = saver.Saver(self._link, memory.read, pool.versions, max_queued=max_queued)
        self._loader = Loader(memory)

    def on_change(self, notify: Callable[[], object]) -> None:
        """Have `notify` called, from the loader's thread, whenever a search is decided or done."""
        self._loader.on_change(notify)

    @property
    def connected(self) -> bool:
        """Whether the agent answers."""
        return self._link.client is not None

    @property
    def saved(self) -> int:
        """Blocks that became visible in the pool."""
        return self._saver.saved

    @property
    def shed(self) -> int:
        """Blocks that were not saved: queue full, block reused before it was copied, or the agent went."""
        return self._saver.shed

    def seek(self, request: str, keys: Sequence[bytes], cached: int, tokens: int, hint: Hint | None) -> Search | None:
        client = self._link.client
        if client is None or self._saver.cleared != self._saver.clears:
            return None
        search = Search(request, keys, cached, tokens, hint, time.monotonic)
        return search if self._loader.begin(search, client) else None

    def settle(self) -> None:
        self._loader.wake()

    def save(self, saving: Saving) -> None:
        keys = [content.hash for content in saving.contents]
        parent = saving.contents[0].parent or b""
        self._saver.save(saver.Saving(saving.blocks, saving.versions, keys, parent))

    def clear(self) -> None:
        self._saver.clear(self._saver.clears + 1)

    def observe(self, tokens: int, attended: int, seconds: float) -> None:
        self._saver.observe(tokens, attended, lambda: seconds)

    def check(self) -> None:
        """See `Saver.check`."""
        self._saver.check()

    def close(self) -> None:
        """Disconnect and end the threads."""
        self._link.close()
        self._saver.close()
        self._loader.close()
