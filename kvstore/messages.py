"""What an agent and a gateway say to each other: msgspec structs in length-prefixed msgpack frames.

A report stream (`GET /v1/reports`) is a sequence of frames: a `Snapshot` in one or more parts, tier after tier, then
`Delta`s, with a `Heartbeat` in between; the first report that is no snapshot says that the snapshot is whole. All of
these carry `(epoch, seq)`; a `FetchRecord` may stand anywhere after the snapshot and carries none. The epoch changes
whenever the agent cannot vouch that what it knew is still held (engine or agent restart, a gap in the engine's events);
it begins with a new snapshot. `seq` counts the deltas of an epoch: a snapshot carries the number of the last delta it
contains, a delta the next number, a heartbeat the last number sent. A reader that sees a gap, or a digest that differs
from its own, asks again.

A block is reported by one RouteKey, that of its last unit, with the RouteKey of the block before it as its parent
(`ROOT_PARENT` for the first block of a prompt).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum, StrEnum
from typing import Annotated, TypeAlias

import msgspec

from kvstore.cost import LinkEstimate
from kvstore.errors import ProtocolError
from kvstore.geometry import KvGeometry
from kvstore.namespace import KvNamespace

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 16 * 1024 * 1024
SNAPSHOT_PART_BLOCKS = 65_536
ROOT_PARENT = 0
GATEWAY_NAME = r"^[A-Za-z0-9._:-]{1,128}\Z"
MAX_GATEWAYS = 64
"""Gateways that an agent knows at one time."""
_LENGTH = struct.Struct(">I")
_MASK = (1 << 64) - 1


class Tier(IntEnum):
    """Where a replica keeps a block, nearest to its compute first."""

    HBM = 0
    DRAM = 1
    NVME = 2
    REMOTE = 3


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps a replica from something it could do. `code` is one of a bounded set of words, `message` says what is
    wrong and `fix` which flag of which process changes it. A `note` may be what somebody wants."""

    code: str
    message: str
    fix: str
    note: bool = False


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/hello` (JSON): who an agent is and what its engine serves.

    `epoch` is the one in force now; `capacity_blocks` is the engine's HBM pool, 0 when unknown; `route_seed_check` is
    the root of an empty namespace under the agent's seed, so that a gateway with another seed is told and not misled.
    `namespace` is that of the engine's blocks in the pool, None as long as no engine has connected to it.
    """

    protocol: int = PROTOCOL_VERSION
    replica_id: str
    dp_rank: int = 0
    epoch: int
    engine: str
    engine_version: str
    engine_up: bool
    models: list[str]
    block_size: int
    capacity_blocks: int
    geometry: KvGeometry | None
    identity_modes: list[str]
    route_seed_check: int
    namespace: KvNamespace | None = None


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/model-files` (msgpack): what is needed to turn a chat into the engine's token ids.

    `special_tokens` maps names used by templates (bos_token, eos_token, ...) to their text; `digest` names the content.
    """

    model: str
    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    add_bos_token: bool | None = None
    digest: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Part `part` of `parts` of everything held in one tier when delta `seq` had been applied.

    `keys` and `parents` are packed little-endian u64 of equal length.
    """

    epoch: int
    seq: int
    part: int
    parts: int
    tier: Tier
    keys: bytes
    parents: bytes


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag="stored", array_like=True):
    """Blocks that became held; `keys` and `parents` are packed u64 of equal length."""

    tier: Tier
    keys: bytes
    parents: bytes


class Removed(msgspec.Struct, frozen=True, kw_only=True, tag="removed", array_like=True):
    """Blocks that are held no more in this tier; `keys` is packed u64."""

    tier: Tier
    keys: bytes


Change: TypeAlias = Stored | Removed


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """Changes number `seq` of an epoch, to be applied in order."""

    epoch: int
    seq: int
    changes: list[Change]


class FetchState(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway must know to name a source for a replica, or to name the replica as one.

    `namespace` is the digest of the engine's `KvNamespace` (hex): only replicas of one namespace fetch from each other.
    `acts` is False where hints are understood but not followed (shadow mode, or fetching is off). `links` holds what
    reading from each replica has cost, by its id; `link` what is assumed of any other. `slots` is the pool's size.
    """

    namespace: str
    acts: bool
    slots: int
    link: LinkEstimate
    links: dict[str, LinkEstimate]


class GatewayLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway has placed on a replica and not seen finished (`POST /v1/load`, JSON; and in every heartbeat).

    `gateway` names it and `epoch` its life, so that two of one name are two. `sequences` counts its requests there,
    `prefill_tokens` those of their uncached prompt tokens whose first token it has not seen.
    """

    gateway: Annotated[str, msgspec.Meta(pattern=GATEWAY_NAME)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    prefill_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    sequences: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Load of the engine and state of the catalogue, sent at least every 250 ms.

    `running` and `waiting` count sequences; `queued_prefill_tokens` is None where the engine does not tell;
    `prefill_tokens_per_s` is fitted from observed prefills, None until there are any; `kv_usage` is the share of blocks
    in use by running requests; `blocks` and `digest` (see `digest_term`) describe what is held after delta `seq`.
    `fetch` is None while no engine has connected to the agent's pool. `kv_events` is whether the agent is connected to
    the engine's KV events, and `problems` what the agent finds wrong now. `gateways` has the load that each gateway
    heard of within the last second announced here, the reader's own too; empty from an agent that does not collect it.
    """

    epoch: int
    seq: int
    engine_up: bool
    running: int
    waiting: int
    queued_prefill_tokens: int | None
    prefill_tokens_per_s: float | None
    kv_usage: float
    capacity_blocks: int
    blocks: int
    digest: int
    fetch: FetchState | None = None
    kv_events: bool = False
    problems: list[Problem] = []
    gateways: list[GatewayLoad] = []


class FetchOutcome(StrEnum):
    """How a request's search for its prefix outside the engine's cache ended; a bounded set, fit for a metric label."""

    FETCHED = "fetched"
    """Every block asked for was copied into the engine, some of them from the source."""
    LOCAL = "local"
    """Every block came from the agent's own pool."""
    PARTIAL = "partial"
    """A first part of the blocks was used, the rest recomputed."""
    DECLINED = "declined"
    """Recomputing was expected to be cheaper."""
    SHADOW = "shadow"
    """Would have been fetched, but the agent only keeps records."""
    MISSED = "missed"
    """The source holds none of the blocks under their full names."""
    REFUSED = "refused"
    """The hint, or the reader, was refused: signature, namespace, layout."""
    FAILED = "failed"
    """Nothing usable came: source gone, transfer broken, wrong bytes, lease not held."""
    LATE = "late"
    """The deadline passed first."""
    CANCELLED = "cancelled"
    """The request ended, or was computed, before its blocks were there."""


class FetchRecord(msgspec.Struct, frozen=True, kw_only=True, tag="fetched"):
    """What was expected of one fetch and what came of it (`GET /v1/fetches`, and on every report stream).

    `request` is the engine's id of the request, `gateway_request` the hint's; `at` Unix time. Blocks: `asked` for,
    found in the `own` pool, `moved` from the source, `loaded` into the engine, `failed` ones that the engine had
    already counted as cached. All other figures are seconds; a step that was not reached took 0. `predicted_fetch_s`
    covers everything from the hint to the last copy, `predicted_rest_s` computing what remains of the prompt then,
    `predicted_recompute_s` computing all that the engine lacks.
    """

    request: str
    gateway_request: str
    at: float
    replica: str
    source: str
    transport: str
    outcome: FetchOutcome
    reason: str
    block_tokens: int
    block_bytes: int
    asked: int
    own: int
    moved: int
    loaded: int
    failed: int
    predicted_fetch_s: float
    predicted_rest_s: float
    predicted_recompute_s: float
    decide_s: float
    lease_s: float
    move_s: float
    verify_s: float
    confirm_s: float
    copy_s: float
    total_s: float


Report: TypeAlias = Snapshot | Delta | Heartbeat | FetchRecord

_encoder = msgspec.msgpack.Encoder()
_report_decoder = msgspec.msgpack.Decoder(Report)


def digest_term(key: int, tier: Tier) -> int:
    """What one held block adds to a catalogue digest; a digest is the sum of the terms modulo 2**64.

    Keys are uniform hashes already, so their sum detects any missing or extra block; order does not matter.
    """
    return key * (2 * tier + 1) & _MASK


def digest_of(keys: Iterable[int], tier: Tier) -> int:
    """The digest of a set of held blocks."""
    return sum(keys) * (2 * tier + 1) & _MASK


def encode_frame(message: Report) -> bytes:
    """One frame: u32 big-endian length, then the message. Raises ProtocolError above 16 MiB."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into reports. Owns at most one incomplete frame; feed it whatever arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Report]:
        """Reports completed by `data`. Raises ProtocolError; the stream is then unusable."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"peer announced a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                report = _report_decoder.decode(bytes(buffer[start + _LENGTH.size : end]))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ProtocolError(f"not a report: {error}") from error
            start = end
            yield report
        del buffer[:start]
