"""A kept connection to an agent, for short messages that are sent often."""

from __future__ import annotations

import asyncio
import ssl

import httpx

from gateway.fleet.agent_access import AgentAccess

MAX_ANSWER = 16 * 1024


class LineFailed(Exception):
    """The message was not taken; `kind` is a word fit for a metric: connection, timeout, protocol or status."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class AgentLine:
    """HTTP/1.1 `POST`s of one path, one after the other, over one connection that is made again when it breaks.

    Written out because a client that can do everything costs several times as much, for every request that is placed
    (`benchmarks/README.md`, load exchange). `access` counts where the URL is https. Owns the connection; one `post` at
    a time.
    """

    def __init__(
        self, url: httpx.URL, *, access: AgentAccess | None = None, token: str = "", timeout_s: float = 1.0
    ) -> None:
        self._host, self._port = url.host, url.port or (443 if url.scheme == "https" else 80)
        self._tls: ssl.SSLContext | None = None
        self._server_name: str | None = None
        if url.scheme == "https":
            self._tls = access.tls if access else ssl.create_default_context()
            self._server_name = (access.server_name if access else "") or self._host
        self._timeout_s = timeout_s
        lines = [
            f"POST {url.raw_path.decode()} HTTP/1.1",
            f"host: {url.netloc.decode()}",
            "content-type: application/json",
        ]
        if token:
            lines.append(f"authorization: Bearer {token}")
        self._head = "\r\n".join([*lines, "content-length: "]).encode()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, body: bytes) -> None:
        """Until a 204. Raises LineFailed; the next call begins with a new connection."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._writer is not None:
                    try:
                        await self._exchange(body)
                        return
                    except (OSError, asyncio.IncompleteReadError):  # it has been closed meanwhile: not the agent's end
                        self.close()
                await self._connect()
                await self._exchange(body)
        except TimeoutError as error:
            self.close()
            raise LineFailed("timeout", f"no answer within {self._timeout_s:g} s") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            raise LineFailed("connection", f"{type(error).__name__}: {error}") from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            self.close()
            raise LineFailed("protocol", f"not an answer: {error}") from error
        except BaseException:  # half a message may be on its way
            self.close()
            raise

    def close(self) -> None:
        """Drops the connection."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, server_hostname=self._server_name, limit=MAX_ANSWER
        )

    async def _exchange(self, body: bytes) -> None:
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 "):
            raise ValueError(repr(head[:40]))
        status = int(head[9:12])
        if status != 204:
            text = await self._reader.read(400)
            raise LineFailed("status", f"answered {status}: {text.decode(errors='replace')}")
