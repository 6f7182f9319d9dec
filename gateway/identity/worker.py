"""The process in which templates run and texts are tokenized: `python -m gateway.identity.worker`.

It exits when its stdin ends, or when the process that started it is gone while a template keeps it busy. A Ctrl-C meant
for the gateway does not reach it. It is trusted with nothing: the gateway kills it when it misses a deadline.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from typing import BinaryIO

from gateway.errors import IdentityUnavailable
from gateway.identity import protocol
from gateway.identity.model import PromptModel, first_prompt
from gateway.identity.protocol import Done, Failed, Identified, Identify, Load, Loaded, Reply, Request, Unload
from gateway.identity.tokens import SegmentCache
from kvstore.identity import TOKEN_BYTES, chain, pack_keys

PARENT_CHECK_SECONDS = 0.5


class Shelf:
    """The models that this process holds. Owns them and their segment cache."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache = SegmentCache(cache_bytes)
        self._models: dict[str, PromptModel] = {}

    def answer(self, request: Request) -> Reply:
        """The reply to a request; whatever a template or tokenizer raises becomes `Failed`."""
        try:
            if isinstance(request, Load):
                model = PromptModel(request.files, self._cache)
                self._models[request.files.model] = model
                return Loaded(model.tokenizer.whole_because, model.template is not None)
            if isinstance(request, Unload):
                self._models.pop(request.model, None)
                return Done()
            return self._identify(request)
        except IdentityUnavailable as error:
            return Failed(error.reason, str(error))
        except RecursionError as error:
            return Failed("bad_request", str(error))
        except MemoryError:
            return Failed("template_error", "out of memory")

    def _identify(self, job: Identify) -> Identified:
        if job.model is None:
            ids = first_prompt(job.request.prompt or b"")
            if isinstance(ids, str):
                raise IdentityUnavailable("no_tokenizer", "a text needs a model")
        else:
            model = self._models.get(job.model)
            if model is None:
                raise IdentityUnavailable("no_tokenizer", f"model {job.model!r} is not loaded")
            ids = model.tokens(job.request, job.dialect)
        keys = pack_keys(chain(job.root, ids))
        return Identified(len(ids) // TOKEN_BYTES, keys, ids if job.ids else None, self._cache.stats)


def serve(shelf: Shelf, source: BinaryIO, sink: BinaryIO) -> None:
    """Answers requests until `source` ends."""
    while len(head := source.read(protocol.LENGTH.size)) == protocol.LENGTH.size:
        (length,) = protocol.LENGTH.unpack(head)
        body = source.read(length)
        if len(body) < length:
            return
        sink.write(protocol.frame(shelf.answer(protocol.decode_request(body))))
        sink.flush()


def _exit_with(parent: int) -> None:
    """Stdin says that the parent is gone, but nobody reads it while a template runs."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def main(cache_bytes: int, memory_bytes: int) -> None:
    """Serves the parent. Whatever else writes to stdout is sent to stderr, where it cannot spoil a frame."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
    source, sink = os.fdopen(os.dup(0), "rb", buffering=1 << 16), os.fdopen(os.dup(1), "wb", buffering=1 << 16)
    os.dup2(2, 1)
    with source, sink:
        serve(Shelf(cache_bytes), source, sink)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
