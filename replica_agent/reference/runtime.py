"""From settings to a running engine and back: what is started in which order, and stopped in which."""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import os
import socket
from collections.abc import AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from replica_agent.reference.errors import PortTakenError, StartError
from replica_agent.reference.prepare import prepare
from replica_agent.reference.publisher import EventPublisher
from replica_agent.reference.settings import Settings

if TYPE_CHECKING:
    from replica_agent.reference.server import Service

_NAMED = ("smollm2", "tiny")


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine that computes and publishes, and the socket on which it is about to answer."""

    service: Service
    listener: socket.socket
    publisher: EventPublisher | None
    dtype: str
    kv_socket: str | None

    @property
    def url(self) -> str:
        """Base address of the HTTP endpoints."""
        host, port = self.listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def describe(self) -> str:
        """The line that is logged at start."""
        pool = self.service.engine.pool
        events = self.publisher.endpoint if self.publisher else "none"
        pool_at = f", KV pool at {self.kv_socket}" if self.kv_socket else ""
        replay = (self.publisher.replay_endpoint if self.publisher else None) or "none"
        return (
            f"reference engine ready: {self.service.model} ({self.dtype}), {pool.num_blocks} blocks of "
            f"{pool.block_size} tokens, {self.url}, events {events}, replay {replay}{pool_at}"
        )


@contextmanager
def opened(settings: Settings, cache: Path | None = None) -> Generator[Opened]:
    """Bind, load and start computing; everything is closed at the end. Blocks for seconds.

    Addresses are bound before anything slow, so that a taken one is told at once. Raises StartError.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Threads that spin while they wait for each other make a step several times slower as soon as something else, such
    # as a second engine, wants the same cores (figures in bench.py). Read when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(settings.host, settings.port))
        publisher = None
        if settings.kv_events_endpoint is not None:
            publisher = EventPublisher(settings.kv_events_endpoint, settings.kv_replay_endpoint)
            stack.callback(publisher.close)
        service, dtype = _load(settings, cache, publisher, stack)
        yield Opened(service, listener, publisher, dtype, settings.kv_socket)


async def serve(engine: Opened, stop: asyncio.Event, verbose: bool = False) -> None:
    """Answer requests until `stop` is set; then end open streams with an error and close all connections."""
    from replica_agent.reference.server import build_app

    config = uvicorn.Config(
        build_app(engine.service),
        log_level="info" if verbose else "warning",
        access_log=verbose,
        lifespan="off",
        ws="none",
        # Longer than a proxy's pool keeps a connection: else it is closed just as the next request is sent on it.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)

    async def stopper() -> None:
        await stop.wait()
        # The engine first: it ends the streams that the server would otherwise wait for.
        await asyncio.to_thread(engine.service.engine.close)
        server.should_exit = True

    watch = asyncio.create_task(stopper())
    try:
        await server.serve(sockets=[engine.listener])
    finally:
        watch.cancel()


@asynccontextmanager
async def running(settings: Settings, cache: Path | None = None) -> AsyncIterator[Opened]:
    """A whole engine inside this process, answering by the time it is entered."""
    with ExitStack() as stack:
        engine = await asyncio.to_thread(stack.enter_context, opened(settings, cache))
        stop = asyncio.Event()
        # The listener takes connections already: they wait until the server gets to them.
        task = asyncio.create_task(serve(engine, stop))
        try:
            yield engine
        finally:
            stop.set()
            await task


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to the process: uvicorn would raise them again after a clean stop."""
        yield


def _load(
    settings: Settings, cache: Path | None, publisher: EventPublisher | None, stack: ExitStack
) -> tuple[Service, str]:
    num_blocks = settings.kv_tokens // settings.block_size
    if num_blocks < 2:
        raise StartError(f"--kv-tokens {settings.kv_tokens}: at least two blocks of {settings.block_size} are needed")
    directory = prepare(settings.model, cache)

    # Imported here, because they take a second: wrong flags and taken ports are told before.
    import torch

    from replica_agent.reference.block_pool import BlockPool
    from replica_agent.reference.chat import Tokenizer
    from replica_agent.reference.engine import Engine
    from replica_agent.reference.identity import engine_hello
    from replica_agent.reference.kv_cache import PagedKv
    from replica_agent.reference.metrics import Metrics
    from replica_agent.reference.model import Llama
    from replica_agent.reference.pool_connector import PoolConnector
    from replica_agent.reference.scheduler import Scheduler
    from replica_agent.reference.server import Service
    from replica_agent.reference.weights import DTYPES, ModelConfig, Weights, resolve_dtype

    torch.set_num_threads(settings.threads)
    config = ModelConfig.load(directory)
    context = min(config.max_positions, num_blocks * settings.block_size)
    if settings.max_model_len is not None:
        if settings.max_model_len > context:
            raise StartError(
                f"--max-model-len {settings.max_model_len}: more than {context}, which model and --kv-tokens allow"
            )
        context = settings.max_model_len
    dtype_name = resolve_dtype(settings.dtype, config)
    dtype = DTYPES[dtype_name]
    tokenizer = Tokenizer(directory)
    kv = PagedKv(config, num_blocks, settings.block_size, dtype)
    model = Llama(config, Weights.load(directory, config, dtype), kv, context)
    name = settings.served_model_name or (settings.model if settings.model in _NAMED else directory.name)
    metrics = Metrics(name, settings.block_size, num_blocks, dtype_name)
    pool = BlockPool(num_blocks, settings.block_size)
    connector = None
    if settings.kv_socket is not None:
        hello = engine_hello(name, directory, config, kv, dtype_name)
        connector = PoolConnector(settings.kv_socket, hello, pool, kv.memory())
        stack.callback(connector.close)
    workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
    stack.callback(workers.shutdown)
    engine = Engine(
        model,
        pool,
        Scheduler(pool, settings.prefill_chunk, settings.max_num_seqs, connector),
        tokenizer,
        metrics,
        publisher,
        connector,
        threads=settings.threads,
        seed=settings.seed,
    )
    stack.callback(engine.close)
    service = Service(
        engine=engine,
        tokenizer=tokenizer,
        metrics=metrics,
        workers=workers,
        model=name,
        root=str(directory),
        max_model_len=context,
        block_bytes=kv.block_bytes,
        version=importlib.metadata.version("prefix-gateway"),
        debug=settings.debug,
    )
    return service, dtype_name


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartError(f"--host {host}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # At once: with SO_REUSEADDR, only a listening socket keeps others off the port.
        listener.listen(512)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(port, "--port") from error
        raise StartError(f"--host {host} --port {port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
