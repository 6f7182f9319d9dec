"""What an agent and a gateway say to each other: msgspec structs in length-prefixed msgpack frames.

A report stream (`GET /v1/reports`) is a sequence of frames: a `Snapshot` in one or more parts, `Delta`s, and
`Heartbeat`s in between. All of these carry `(epoch, seq)`; a `FetchRecord` may stand anywhere after the first part and
carries none. The epoch changes whenever the agent cannot vouch that what it knew is still held (engine or agent
restart, a gap in the engine's events); it begins with a new snapshot. `seq` counts the deltas of an epoch: a delta
carries the next number, everything else the last one sent.

A snapshot is not one moment. Keys are cut into `SHARDS` by their highest bits, and a part is what is held in some of
them when its turn comes, whatever happens meanwhile: a delta that stands between two parts says only what changed in
the shards told before it. So parts and deltas, applied in the order they come, are exactly what is held once the last
part is there; nobody has to copy a catalogue, or to keep one still. Until then a heartbeat tells the load alone. From
then on its digest must be the reader's own. Only then is anything believed. A reader that sees a gap, or a digest that
differs from its own, asks again.

A block is reported by one RouteKey, that of its last unit, with the RouteKey of the block before it as its parent
(`ROOT_PARENT` for the first block of a prompt).

Every length is bounded (`kvstore.bounds`): a frame has at most 16 MiB, a part, a delta and a replica at most so many
blocks. A peer that speaks another protocol is refused by number, before anything else it says is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum, StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvstore.bounds import U64, Count, Name, Rate, Seconds, Share, Text, check_u64
from kvstore.cost import LinkEstimate
from kvstore.errors import GeometryError, ProtocolError, UnknownProtocol
from kvstore.frames import Frames, framed
from kvstore.geometry import KvGeometry
from kvstore.namespace import KvNamespace

PROTOCOL_VERSION = 3
MAX_FRAME_BYTES = 16 * 1024 * 1024

MAX_CHANGED_BLOCKS = 65_536
"""Blocks in one part of a snapshot, and in one delta."""

MAX_SNAPSHOT_PARTS = 4_096
MAX_REPLICA_BLOCKS = 1 << 24
"""Blocks that one replica may report, over all tiers: 268 M tokens in blocks of 16."""

MAX_PROBLEMS = 64
MAX_MODELS = 4_096
SHARDS = 256
ROOT_PARENT = 0
GATEWAY_NAME = r"^[A-Za-z0-9._:-]{1,128}\Z"
MAX_GATEWAYS = 64
"""Gateways that an agent knows at one time."""
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

    code: Name
    message: Text
    fix: Text
    note: bool = False


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/hello` (JSON): who an agent is and what its engine serves.

    `epoch` is the one in force now; `capacity_blocks` is the engine's HBM pool, 0 when unknown; `route_seed_check` is
    the root of an empty namespace under the agent's seed, so that a gateway with another seed is told and not misled.
    `namespace` is that of the engine's blocks in the pool, None as long as no engine has connected to it; `kv_events`
    whether the agent is connected to the engine's KV events: without them there is nothing to report. `attention` is
    how much longer a token's prefill takes for each one before it, as a share of the first one's, by the model's own
    description; 0 where that is not known.
    """

    protocol: Count = PROTOCOL_VERSION
    replica_id: Name
    dp_rank: Count = 0
    epoch: U64
    engine: Name
    engine_version: Name
    engine_up: bool
    models: Annotated[list[Name], Meta(max_length=MAX_MODELS)]
    block_size: Annotated[int, Meta(ge=0, le=1 << 20)]
    capacity_blocks: Count
    geometry: KvGeometry | None
    identity_modes: Annotated[list[Name], Meta(max_length=16)]
    route_seed_check: U64
    namespace: KvNamespace | None = None
    kv_events: bool = False
    attention: Share = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError naming the field: it comes as JSON."""
        check_u64(epoch=self.epoch, route_seed_check=self.route_seed_check)


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/model-files` (msgpack): what is needed to turn a chat into the engine's token ids.

    `special_tokens` maps names used by templates (bos_token, eos_token, ...) to their text; `digest` names the content.
    """

    model: Name
    tokenizer_json: bytes
    chat_template: Annotated[str, Meta(max_length=1 << 24)] | None
    special_tokens: Annotated[dict[Name, Text], Meta(max_length=1_024)]
    add_bos_token: bool | None = None
    digest: Name


_Packed = Annotated[bytes, Meta(max_length=8 * MAX_CHANGED_BLOCKS)]


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag="stored", array_like=True):
    """Blocks that became held; `keys` and `parents` are packed little-endian u64 of equal length."""

    tier: Tier
    keys: _Packed
    parents: _Packed


class Removed(msgspec.Struct, frozen=True, kw_only=True, tag="removed", array_like=True):
    """Blocks that are held no more in this tier; `keys` is packed u64."""

    tier: Tier
    keys: _Packed


class Cleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared", array_like=True):
    """Nothing is held any more in this tier."""

    tier: Tier


Change: TypeAlias = Stored | Removed | Cleared


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Part `part` of a snapshot, from 0 on: what was held in the next shards after delta `seq`; `last` says whether any
    part follows. `stored` has at most `MAX_CHANGED_BLOCKS` blocks."""

    epoch: U64
    seq: U64
    part: Annotated[int, Meta(ge=0, lt=MAX_SNAPSHOT_PARTS)]
    last: bool
    stored: Annotated[list[Stored], Meta(max_length=len(Tier))]


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """Changes number `seq` of an epoch, to be applied in order; at most `MAX_CHANGED_BLOCKS` blocks."""

    epoch: U64
    seq: U64
    changes: Annotated[list[Change], Meta(max_length=3 * len(Tier))]


class FetchState(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway must know to name a source for a replica, or to name the replica as one.

    `namespace` is the digest of the engine's `KvNamespace` (hex): only replicas of one namespace fetch from each other.
    `acts` is False where hints are understood but not followed (shadow mode, or fetching is off). `links` holds what
    reading from each replica has cost, by its id (an hour, for one whose reads fail); `link` what is assumed of any
    other. `slots` is the pool's size.
    """

    namespace: Name
    acts: bool
    slots: Count
    link: LinkEstimate
    links: Annotated[dict[Name, LinkEstimate], Meta(max_length=4_096)]


class GatewayLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway has placed on a replica and not seen finished (`POST /v1/load`, JSON; and in every heartbeat).

    `gateway` names it and `epoch` its life, so that two of one name are two. `sequences` counts its requests there,
    `prefill_tokens` those of their uncached prompt tokens whose first token it has not seen, deep ones counted for more
    (`Hello.attention`).
    """

    gateway: Annotated[str, Meta(pattern=GATEWAY_NAME)]
    epoch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    prefill_tokens: Annotated[int, Meta(ge=0, lt=1 << 53)]
    sequences: Annotated[int, Meta(ge=0, lt=1 << 31)]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Load of the engine and state of the catalogue, sent at least every 250 ms.

    `running` and `waiting` count sequences; `queued_prefill_tokens` is None where the engine does not tell;
    `prefill_tokens_per_s` is fitted from observed prefills, None until there are any; `kv_usage` is the share of blocks
    in use by running requests; `blocks` and `digest` (see `digest_term`) describe what is held after delta `seq`.
    `fetch` is None while no engine has connected to the agent's pool. `kv_events` is whether the agent is connected to
    the engine's KV events, and `problems` what the agent finds wrong now. `gateways` has the load that each gateway
    heard of within the last second announced here, the reader's own too; empty from an agent that does not collect it.
    """

    epoch: U64
    seq: U64
    engine_up: bool
    running: Count
    waiting: Count
    queued_prefill_tokens: Count | None
    prefill_tokens_per_s: Rate | None
    kv_usage: Share
    capacity_blocks: Count
    blocks: Count
    digest: U64
    fetch: FetchState | None = None
    kv_events: bool = False
    problems: Annotated[list[Problem], Meta(max_length=MAX_PROBLEMS)] = []
    gateways: Annotated[list[GatewayLoad], Meta(max_length=MAX_GATEWAYS)] = []


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

    request: Name
    gateway_request: Name
    at: Seconds
    replica: Name
    source: Name
    transport: Name
    outcome: FetchOutcome
    reason: Text
    block_tokens: Count
    block_bytes: Count
    asked: Count
    own: Count
    moved: Count
    loaded: Count
    failed: Count
    predicted_fetch_s: Seconds
    predicted_rest_s: Seconds
    predicted_recompute_s: Seconds
    decide_s: Seconds
    lease_s: Seconds
    move_s: Seconds
    verify_s: Seconds
    confirm_s: Seconds
    copy_s: Seconds
    total_s: Seconds


Report: TypeAlias = Snapshot | Delta | Heartbeat | FetchRecord

_encoder = msgspec.msgpack.Encoder()
_report_decoder = msgspec.msgpack.Decoder(Report)


_hello_decoder = msgspec.json.Decoder(Hello)


class _Spoken(msgspec.Struct):
    protocol: Count


_spoken_decoder = msgspec.json.Decoder(_Spoken)


def check_protocol(theirs: int) -> None:
    """Raises UnknownProtocol for any other than this one."""
    if theirs != PROTOCOL_VERSION:
        raise UnknownProtocol(theirs, PROTOCOL_VERSION)


def decode_hello(raw: bytes) -> Hello:
    """What an agent says of itself. Raises ProtocolError: UnknownProtocol where it speaks another one, of which nothing
    but the number is read."""
    try:
        check_protocol(_spoken_decoder.decode(raw).protocol)
        return _hello_decoder.decode(raw)
    except (msgspec.MsgspecError, GeometryError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"not a hello: {error}") from error


def shard_of(key: int) -> int:
    """The shard of snapshots that a RouteKey is in."""
    return key >> 56


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
    return framed(_encoder.encode(message), MAX_FRAME_BYTES)


class FrameReader:
    """Cuts a byte stream into reports. Owns at most one incomplete frame; feed it whatever arrives."""

    def __init__(self) -> None:
        self._frames = Frames(MAX_FRAME_BYTES)

    def feed(self, data: bytes) -> Iterator[Report]:
        """Reports completed by `data`. Raises ProtocolError; the stream is then unusable."""
        for body in self._frames.feed(data):
            try:
                report = _report_decoder.decode(body)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ProtocolError(f"not a report: {error}") from error
            yield report
