"""Keeps an engine connected to its agent's pool, in the background."""

from __future__ import annotations

import logging
import threading

from kvstore.engine_messages import EngineHello
from replica_agent.engines.defects import Defects
from replica_agent.engines.errors import PoolGone, PoolRefused
from replica_agent.engines.pool_client import PoolClient

_log = logging.getLogger(__name__)

_WATCH_S = 0.5
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 5.0
_REFUSED_RETRY_S = 30.0
_CLOSE_S = 1.0


class PoolLink:
    """Owns the current `PoolClient` and the thread that replaces one that has gone. An engine works without it.

    Attempts back off from 0.1 s to 5 s; after a refusal, which only an operator can end, 30 s. What is wrong is logged
    when it changes, not each time. Nothing that is raised ends the thread.
    """

    def __init__(self, path: str, hello: EngineHello) -> None:
        self.path = path
        self._hello = hello
        self._client: PoolClient | None = None
        self._said = ""
        self._defects = Defects(_log)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)
        self._thread.start()

    @property
    def client(self) -> PoolClient | None:
        """The connection, None while there is none. Any thread; never waits. It may end at any time."""
        client = self._client
        return None if client is None or client.closed else client

    def close(self) -> None:
        """Disconnect for good. A thread in the midst of a question gets PoolGone."""
        self._closing.set()
        if (client := self._client) is not None:
            client.close()
        # One that waits for a hello right now closes what it gets, and ends by itself.
        self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        wait = 0.0
        while not self._closing.wait(wait if self._client is None else _WATCH_S):
            try:
                wait = self._look(wait)
            except Exception:
                self._defects.note(f"no agent at {self.path}, computing without it")
                wait = _longer(wait)
        if self._client is not None:
            self._client.close()

    def _look(self, wait: float) -> float:
        """Whether the connection lives, or one more attempt at it; how long to wait before the next."""
        if self._client is not None:
            if not self._client.alive():
                self._client = None
                self._say(logging.WARNING, f"the agent at {self.path} has gone; computing without it")
            return _FIRST_RETRY_S
        try:
            self._client = PoolClient(self.path, self._hello)
        except PoolRefused as error:
            self._say(logging.ERROR, f"the agent at {self.path} refuses this engine: {error}")
            return _REFUSED_RETRY_S
        except PoolGone as error:
            self._say(logging.WARNING, f"no agent, computing without it: {error}")
            return _longer(wait)
        # As loud as what it puts an end to.
        level = logging.WARNING if self._said else logging.INFO
        self._say(level, f"connected to the agent's pool at {self.path}: {self._client.slots} slots")
        return _FIRST_RETRY_S

    def _say(self, level: int, text: str) -> None:
        if text != self._said:
            self._said = text
            _log.log(level, "%s", text)


def _longer(wait: float) -> float:
    return min(max(2 * wait, _FIRST_RETRY_S), _LONGEST_RETRY_S)
