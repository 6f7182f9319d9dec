"""Turns requests into RouteKeys without holding up the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

import msgspec
import xxhash

from gateway.errors import IdentityUnavailable
from gateway.identity import text
from gateway.identity.chat import Dialect
from gateway.identity.lane import Job, Lane
from gateway.identity.prompt import IdentityMode, PromptIdentity, PromptRequest
from gateway.identity.protocol import Failed, Identified, Identify, Load, Loaded, Reply, Request, Unload
from gateway.identity.status import REASONS, IdentityStats, LoadedModel, ModelMode, PromptKind
from gateway.identity.tokens import CacheStats, unpack_tokens
from kvstore.errors import IdentityError
from kvstore.identity import chain, pack_tokens, unpack_keys
from kvstore.messages import ModelFiles

INLINE_BYTES = 64 * 1024
"""Token-id prompts up to this many bytes of JSON are chained on the event loop (figure: benchmarks/identity.py)."""

RUN_SECONDS_PER_BYTE = 2e-6
"""What a worker may take longer for a long request before it is killed: honest tokenizing ran at 1.6 to
3 MB/s (benchmarks/identity.py). The request itself does not wait that long; its ids serve the next turn."""

STRIKES = 3
"""Workers that a model's requests may cost in a row before they are not tried for `SUSPENSION_SECONDS`."""
SUSPENSION_SECONDS = 60.0

_token_list = msgspec.json.Decoder(list[int])
_token_lists = msgspec.json.Decoder(list[list[int]])


class _Model:
    """What is known of a loaded model besides its files. `dialect` is None until parity with an engine told it."""

    def __init__(self, info: LoadedModel) -> None:
        self.info = info
        self.dialect: Dialect | None = None
        self.parity = True
        self.why = ""
        self.off: frozenset[PromptKind] = frozenset()
        self.strikes = 0
        self.suspended_until = 0.0


class Identifier:
    """Identifies prompts, by token ids where a model's tokenizer is at hand, else by text.

    Owns the worker processes and the table of models; used from one event loop. A loaded model counts as matching its
    engine until `set_parity` says otherwise: run `gateway.identity.parity.check` right after loading it.
    """

    def __init__(
        self,
        seed: int,
        *,
        workers: int = 1,
        deadline_s: float = 2.0,
        load_deadline_s: float = 30.0,
        queue: int = 256,
        cache_bytes: int = 256 << 20,
        memory_bytes: int = 4 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seed` is the deployment's; `queue` requests may wait in all.

        `cache_bytes` (over all workers) bounds remembered token ids, `memory_bytes` one worker's address space.
        """
        self._seed = seed
        self._deadline = deadline_s
        self._load_deadline = load_deadline_s
        self._queue = queue
        self._clock = clock
        self._files: dict[str, ModelFiles] = {}
        self._broken: dict[str, str] = {}
        self._models: dict[str, _Model] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        self._stats = IdentityStats()
        self._caches = [CacheStats() for _ in range(workers)]
        self._lanes = [
            Lane(
                self._files,
                self._broken,
                cache_bytes=cache_bytes // workers,
                memory_bytes=memory_bytes,
                load_seconds=load_deadline_s,
                on_kill=self._strike,
                clock=clock,
            )
            for _ in range(workers)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts the workers and waits until they answer. Raises IdentityUnavailable when they do not."""
        self._tasks = [asyncio.create_task(lane.run(), name="identity worker") for lane in self._lanes]
        try:
            async with asyncio.timeout(self._load_deadline):
                await asyncio.gather(*(lane.live.wait() for lane in self._lanes))
        except TimeoutError as error:
            await self.close()
            raise IdentityUnavailable("worker_died", "the identity worker does not start") from error

    async def close(self) -> None:
        """Ends the workers; requests that wait are answered in text mode."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def load(self, files: ModelFiles) -> LoadedModel:
        """Makes a model's requests exact. Files of the digest already loaded change nothing, but that they are loaded
        again where a worker had died of them: what was said of them still holds. Others replace them.

        Raises IdentityUnavailable when they cannot be used; what was loaded under the name before is then gone as well,
        and `modes` says why until they are loaded or unloaded.
        """
        model = files.model
        async with self._loading.setdefault(model, asyncio.Lock()):
            known = self._models.get(model)
            if known is not None and known.info.digest != files.digest:
                known = None
            if known is not None and model not in self._broken:
                return known.info
            self._models.pop(model, None)  # its requests are text until it is loaded
            self._broken.pop(model, None)
            self._files[model] = files
            try:
                loaded = await asyncio.gather(*(self._load_on(lane, files) for lane in self._lanes))
            except BaseException as error:
                failed = (
                    f"{error.reason}: {error}" if isinstance(error, IdentityUnavailable) else "not loaded to the end"
                )
                self._broken.setdefault(model, failed)
                if known is not None:
                    self._models[model] = known
                raise
            info = LoadedModel(
                model=model,
                digest=files.digest,
                segmented=not loaded[0].whole_because,
                whole_because=loaded[0].whole_because,
                chat=loaded[0].chat,
            )
            self._models[model] = known or _Model(info)
            return info

    async def _load_on(self, lane: Lane, files: ModelFiles) -> Loaded:
        """The worker of a lane holds the model on return; workers started later load it from the table."""
        try:
            async with asyncio.timeout(2 * self._load_deadline):
                while True:
                    await lane.live.wait()
                    try:
                        reply = await self._ask(lane, Load(files), self._load_deadline)
                    except IdentityUnavailable as error:
                        if error.reason != "restarting" or files.model in self._broken or not self._tasks:
                            raise
                        await asyncio.sleep(0.02)  # another model's request took the worker down: ask the next one
                        continue
                    assert isinstance(reply, Loaded)
                    return reply
        except TimeoutError as error:
            raise IdentityUnavailable("worker_died", "no identity worker to load the model into") from error

    async def unload(self, model: str) -> None:
        """Forgets a model; its requests are identified by text."""
        for table in (self._models, self._files, self._broken, self._loading):
            table.pop(model, None)
        for lane in self._lanes:
            try:
                await self._ask(lane, Unload(model), self._load_deadline)
            except IdentityUnavailable:
                pass  # a worker being restarted will not load it again

    def set_parity(self, model: str, ok: bool, why: str = "") -> None:
        """Says whether a loaded model's token ids equal its engine's. Nothing happens for one that is not loaded."""
        if (entry := self._models.get(model)) is not None:
            entry.parity, entry.why = ok, why

    def restrict(self, model: str, kinds: Collection[PromptKind]) -> None:
        """Says that requests of these kinds, and no others, differ from the engine's, whatever else equals."""
        if (entry := self._models.get(model)) is not None:
            entry.off = frozenset(kinds)

    def dialect(self, model: str) -> Dialect | None:
        """How the model's engines rewrite chats, None while unknown."""
        entry = self._models.get(model)
        return entry.dialect if entry is not None else None

    def set_dialect(self, model: str, dialect: Dialect | None) -> None:
        """Says how the model's engines rewrite chats, None that it has to be found out."""
        if (entry := self._models.get(model)) is not None:
            entry.dialect = dialect

    def modes(self) -> dict[str, ModelMode]:
        """How requests of every model that is loaded, or could not be, are identified now."""
        return {model: self._mode(model) for model in (*self._models, *self._broken)}

    def _mode(self, model: str) -> ModelMode:
        entry = self._models.get(model)
        reason = self._refusal(entry) if entry is not None else "no_tokenizer"
        told = self._broken.get(model) or (entry.why if entry is not None and reason == "no_parity" else "")
        return ModelMode(
            mode=IdentityMode.TEXT if reason else IdentityMode.EXACT,
            why=told or reason,
            off=entry.off if entry is not None else frozenset(),
            dialect=entry.dialect if entry is not None else None,
            segmented=entry is not None and entry.info.segmented,
        )

    @property
    def stats(self) -> IdentityStats:
        """Counters, up to date; the object stays the identifier's."""
        stats = self._stats
        stats.deadline_kills = sum(lane.kills for lane in self._lanes)
        stats.worker_starts = sum(lane.starts for lane in self._lanes)
        stats.cache.bytes = sum(cache.bytes for cache in self._caches)
        stats.cache.entries = sum(cache.entries for cache in self._caches)
        return stats

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [lane.pid for lane in self._lanes if lane.pid is not None]

    async def identify(self, request: PromptRequest) -> PromptIdentity:
        """The keys of a request. Raises nothing for anything a client sends: what cannot be exact is text."""
        try:
            identity = self._inline(request)
            if identity is None:
                reply = await self._tokenize(request, ids=False, judged=True, dialect=None)
                identity = PromptIdentity(mode=IdentityMode.EXACT, keys=unpack_keys(reply.keys), tokens=reply.tokens)
        except IdentityUnavailable as error:
            self._stats.fallbacks[error.reason] += 1
            return self.identify_text(request, fallback=error.reason)
        self._stats.exact += 1
        return identity

    def identify_text(
        self, request: PromptRequest, mode: IdentityMode = IdentityMode.TEXT, fallback: str = ""
    ) -> PromptIdentity:
        """The keys of a request by its text alone; `fallback` says why."""
        return text.identify(request, self._seed, mode, fallback)

    async def token_ids(self, request: PromptRequest, dialect: Dialect | None = None) -> list[int]:
        """A request's token ids, whatever was said about parity, in the model's dialect unless one is given.

        Raises IdentityUnavailable.
        """
        reply = await self._tokenize(request, ids=True, judged=False, dialect=dialect)
        assert reply.ids is not None
        return unpack_tokens(reply.ids)

    def _inline(self, request: PromptRequest) -> PromptIdentity | None:
        """Keys of a short prompt that is token ids already; it needs no tokenizer."""
        prompt = request.prompt
        if prompt is None or len(prompt) > INLINE_BYTES or not _is_token_ids(request):
            return None
        try:
            nested = prompt.lstrip()[1:].lstrip()[:1] == b"["
            tokens = _token_lists.decode(prompt)[0] if nested else _token_list.decode(prompt)
            packed = pack_tokens(tokens)
        except (msgspec.MsgspecError, IdentityError) as error:
            raise IdentityUnavailable("bad_request", str(error)) from error
        keys = chain(request.namespace.root(self._seed), packed)
        return PromptIdentity(mode=IdentityMode.EXACT, keys=keys, tokens=len(tokens))

    async def _tokenize(
        self, request: PromptRequest, *, ids: bool, judged: bool, dialect: Dialect | None
    ) -> Identified:
        model: str | None = None
        entry: _Model | None = None
        if not _is_token_ids(request):
            entry = self._models.get(request.namespace.model) or self._models.get(request.model)
            if entry is None:
                raise IdentityUnavailable("no_tokenizer", "the model's tokenizer is not loaded")
            reason = self._refusal(entry) if judged else ""
            if reason or (judged and _kind(request) in entry.off):
                raise IdentityUnavailable(reason or "no_parity")
            model, dialect = entry.info.model, dialect or entry.dialect
        if sum(lane.depth for lane in self._lanes) >= self._queue:
            raise IdentityUnavailable("busy", "too many prompts wait for the identity worker")
        lane = self._lane(request)
        root = request.namespace.root(self._seed)
        job = Identify(model, root, request, dialect or Dialect.VLLM, ids)
        extra = RUN_SECONDS_PER_BYTE * len(request.messages or request.prompt or b"")
        reply = await self._ask(lane, job, self._deadline, extra)
        assert isinstance(reply, Identified)
        if entry is not None:
            entry.strikes = 0
        self._count(self._lanes.index(lane), reply.cache)
        return reply

    def _lane(self, request: PromptRequest) -> Lane:
        """The worker that saw this conversation before, unless it is much busier than another."""
        live = [lane for lane in self._lanes if lane.live.is_set()] or self._lanes
        if len(live) == 1:
            return live[0]
        start = (request.messages or request.prompt or b"")[:1024]
        home = live[xxhash.xxh3_64_intdigest(start) % len(live)]
        idlest = min(live, key=lambda lane: lane.depth)
        return home if home.depth <= idlest.depth + 2 else idlest

    def _refusal(self, entry: _Model) -> str:
        """Why a model's requests are not tried now, "" if they are."""
        if entry.info.model in self._broken:
            return "worker_died"
        if self._clock() < entry.suspended_until:
            return "suspended"
        return "" if entry.parity else "no_parity"

    async def _ask(self, lane: Lane, request: Request, seconds: float, extra: float = 0.0) -> Reply:
        """A worker's reply within `seconds` of now, in the queue, too; the worker may run `extra` seconds more."""
        job = Job(request, seconds + extra)
        lane.submit(job)
        try:
            async with asyncio.timeout(seconds):
                reply = await job.answer
        except TimeoutError as error:
            raise IdentityUnavailable("deadline", f"no answer within {seconds} s") from error
        if isinstance(reply, Failed):
            raise IdentityUnavailable(reply.reason if reply.reason in REASONS else "bad_request", reply.message)
        return reply

    def _count(self, lane: int, seen: CacheStats) -> None:
        """Adds up a worker's lookups; one started anew counts from 0 again."""
        before = self._caches[lane]
        if seen.hits + seen.misses < before.hits + before.misses:
            before = CacheStats()
        self._stats.cache.hits += seen.hits - before.hits
        self._stats.cache.misses += seen.misses - before.misses
        self._caches[lane] = seen

    def _strike(self, job: Identify) -> None:
        """A request of this model cost a worker its life."""
        entry = self._models.get(job.model) if job.model is not None else None
        if entry is not None:
            entry.strikes += 1
            if entry.strikes >= STRIKES:
                entry.strikes = 0
                entry.suspended_until = self._clock() + SUSPENSION_SECONDS


def _kind(request: PromptRequest) -> PromptKind:
    if request.messages is None:
        return PromptKind.PROMPT
    return PromptKind.TOOLS if request.tools not in (None, b"null", b"[]") else PromptKind.CHAT


def _is_token_ids(request: PromptRequest) -> bool:
    """Whether the prompt begins as a list of numbers, or a list of such lists, does."""
    if request.messages is not None or request.prompt is None:
        return False
    head = request.prompt[:64].translate(None, b" \t\r\n")
    return head[:1] == b"[" and head.lstrip(b"[")[:1].isdigit()
