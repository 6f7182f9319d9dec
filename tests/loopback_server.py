"""A threaded HTTP server on a free loopback port, for stand-ins that answer processes under test."""

from __future__ import annotations

import http.server
import threading
from typing import Any, Self


class Handler(http.server.BaseHTTPRequestHandler):
    """Says nothing on stderr, and answers whole bodies."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class LoopbackServer:
    """Serves `handler` while entered; `url` is known from the beginning."""

    def __init__(self, handler: type[Handler]) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
