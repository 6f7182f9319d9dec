"""Relays a server-sent event stream: passes bytes on as they come, and reads the usage that they carry."""

from __future__ import annotations

import re

from gateway.api.errors import error_body
from gateway.path.usage import Usage, read_reply

_END = re.compile(rb"\r?\n\r?\n")
_CONTENT = b'"choices":[{'
MAX_EVENT_BYTES = 1024 * 1024


class EventRelay:
    """One stream's relay. Feed it every chunk of the engine's; what `feed` returns goes to the client at once.

    With `drop_usage` (the gateway asked for usage that the client did not) the one event whose `choices` are empty and
    whose `usage` is set is left out. Only then, and only while the unfinished last event could still be that one, is
    a part of an event held back; everything else passes unchanged and unbuffered.
    """

    def __init__(self, *, drop_usage: bool) -> None:
        self._drop_usage = drop_usage
        self._tail = b""
        self._sent_of_tail = 0
        self.usage: Usage | None = None
        self.events = 0
        self.done = False

    def feed(self, chunk: bytes) -> bytes:
        """Bytes to pass on for this chunk; b"" when there are none yet."""
        data = self._tail + chunk
        sent = self._sent_of_tail
        out: list[bytes] = []
        start = 0
        for end in _END.finditer(data):
            event = data[start : end.end()]
            if self._keep(event, already=sent > 0):
                out.append(event[sent:] if sent else event)
            start, sent = end.end(), 0
        self._tail = data[start:]
        if self._tail and (not self._drop_usage or _CONTENT in self._tail or len(self._tail) > MAX_EVENT_BYTES):
            out.append(self._tail[sent:])
            sent = len(self._tail)
        self._sent_of_tail = sent
        if len(self._tail) > MAX_EVENT_BYTES:
            self._tail, self._sent_of_tail = self._tail[-4:], 4
        return b"".join(out)

    def finish(self) -> bytes:
        """What is still held back when the engine ended the stream cleanly."""
        rest = self._tail[self._sent_of_tail :]
        self._tail, self._sent_of_tail = b"", 0
        return rest

    def broken(self, message: str, code: str) -> bytes:
        """How the stream ends when the engine's broke: an `error` event and no `[DONE]`.

        A part of an event that the client has seen is ended first, one that it has not seen is left out.
        """
        opening = b"\n\n" if self._sent_of_tail else b""
        return opening + b"data: " + error_body(message, "upstream_error", code) + b"\n\n"

    def _keep(self, event: bytes, *, already: bool) -> bool:
        self.events += 1
        if b'"usage"' in event:
            reply = read_reply(_data(event))
            if reply is not None and reply.usage is not None:
                self.usage = reply.usage
                return not (self._drop_usage and not already and reply.choices == [])
        elif event.startswith(b"data: [DONE]"):
            self.done = True
        return True


def _data(event: bytes) -> bytes:
    """The data of an event, its lines joined."""
    lines = event.splitlines()
    if len(lines) == 2 and not lines[1]:
        return lines[0].removeprefix(b"data:")
    return b"\n".join(line.removeprefix(b"data:") for line in lines if line.startswith(b"data:"))
