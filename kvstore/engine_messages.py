"""What an engine and its agent say to each other over a Unix socket about blocks of KV.

Frames: u32 big-endian length, then msgpack, at most 16 MiB. Each connection begins with `EngineHello`; the agent
answers `Welcome` with the pool's memfd attached to its first byte (SCM_RIGHTS), or `Refused` and closes. After that the
engine asks and the agent answers, in order, one answer to each question. Every verb is idempotent per request id, and
everything held for a request ends with `Release` or `Cancel`, or with the connection.

ContentKeys travel as one string of 32-byte keys. `request` is the engine's own id of a request.

    scheduler side   Lookup -> Found
                     Prepare -> Pending | Accepted | Nothing
                     Poll -> Pending | Accepted | Loading | Ready | Nothing
                     Release, Cancel, Failed -> Done
    worker side      Reserve -> Reserved;  Commit -> Committed;  Clear, Observe -> Done

`Pending` means: the agent has not decided, ask again; an engine that has been told so for 50 ms computes. `Accepted(n)`
means: allocate n blocks and poll, off the scheduler, until `Ready` or until the deadline in it has passed; what is not
`Ready` by then is recomputed. `Poll` says `Accepted` once, then `Loading`: from then on the pool's board
(`kvstore.board`) says what may be copied already, so that the copy is done soon after the fetch, but no token may
depend on it before `Ready` counts it. Any rank may poll; each releases once, and the blocks stay pinned until all of
the (tp, pp) grid have. A block exists once every rank of the grid has committed it under one generation.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvstore.bounds import Name
from kvstore.errors import ProtocolError
from kvstore.frames import body_length, framed
from kvstore.hint import Hint
from kvstore.messages import MAX_FRAME_BYTES
from kvstore.namespace import EngineIdentity

ENGINE_PROTOCOL_VERSION = 2
MAX_WAIT_S = 0.1
"""The longest an answer to a Poll waits for news."""

DECISION_S = 0.05
"""How long an engine waits for the agent's decision before it computes."""


class EngineHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Who connects. `engine_id` names one life of one engine: all its connections say the same, the next life another.

    `loads` is whether it takes blocks at all: an engine that answers a failed load with an error must not.
    `layers` and `kv_heads` are the whole model's; `rank` of the `tp` x `pp` grid is pp_rank * tp + tp_rank;
    `block_bytes` are those of a whole block, over all ranks. `layout` and `identity` as in `KvNamespace`.
    """

    protocol: int = ENGINE_PROTOCOL_VERSION
    engine_id: str
    role: Literal["scheduler", "worker", "both"]
    tp: int = 1
    pp: int = 1
    rank: int = 0
    layers: int
    kv_heads: int
    head_dim: int
    dtype: Name
    layout: Name
    block_size: int
    block_bytes: int
    hash_algorithm: Name
    identity: EngineIdentity
    loads: bool = True


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The pool: `slots` of `pitch` bytes each, of which the first `block_bytes` are a block's; behind them in the same
    memory is the board."""

    slots: int
    pitch: int
    block_bytes: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The engine cannot use this pool; says why, naming the field."""

    reason: str


class Lookup(msgspec.Struct, frozen=True, kw_only=True, tag="lookup"):
    """How many of these blocks, from the first on, does the agent's own pool hold? Pins nothing."""

    request: str
    keys: bytes


class Found(msgspec.Struct, frozen=True, kw_only=True, tag="found"):
    """Blocks of the longest run held."""

    blocks: int


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Find me these blocks: the ones that follow the `cached_blocks` blocks the engine holds itself.

    `prompt_tokens` is the length of the whole prompt. The last token is always computed, so keys never reach it.
    """

    request: str
    keys: bytes
    cached_blocks: int
    prompt_tokens: int
    hint: Hint | None = None


class Poll(msgspec.Struct, frozen=True, kw_only=True, tag="poll"):
    """How far is it? While that is undecided, or loading, the answer waits for a change, up to `wait_s`."""

    request: str
    wait_s: float = 0.0


class Pending(msgspec.Struct, frozen=True, kw_only=True, tag="pending"):
    """Not decided yet."""


class Nothing(msgspec.Struct, frozen=True, kw_only=True, tag="nothing"):
    """Compute everything; nothing is held for this request. `reason` is one of a bounded set of words."""

    reason: str


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """`blocks` are on their way and will be ready, or given up, within `deadline_s` from now."""

    blocks: int
    deadline_s: float


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """Accepted, and not all there yet: the blocks are, or come, in `slots`, the first `there` of them are there.

    The rest come in the order in which `cell` of the board counts them; those it counts first, `before` of them, are
    none of these (-1: nothing counts them). What is counted is verified, but the owner has not said yet that it held:
    what is copied of it is good once `Ready` names as many, and void otherwise. A cell is reused once this search is
    no more loading, so it may then count too many, of which `Ready` names none.
    """

    slots: list[int] = []
    there: int = 0
    cell: int = -1
    before: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The first `len(slots)` blocks are verified and pinned in these slots until `Release`: copy them now."""

    slots: list[int]
    generations: list[int]


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """This rank needs nothing more for this request. `loaded` blocks were copied, in `copy_s` seconds."""

    request: str
    loaded: int = 0
    copy_s: float = 0.0


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """The request was aborted, preempted, or is computed after all."""

    request: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """`blocks` that the engine had counted as cached were not loaded and are recomputed."""

    request: str
    blocks: int


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Slots to save these consecutive blocks in. `parent` is the key before the first, empty for a prompt's first."""

    keys: bytes
    parent: bytes


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved"):
    """One slot and generation a key; slot -1: do not save this one (held already, or the pool is full)."""

    slots: list[int]
    generations: list[int]


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag="commit"):
    """This rank has written its share of these blocks. `written` False for one it could not write after all."""

    keys: bytes
    slots: list[int]
    generations: list[int]
    written: list[bool]


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="committed"):
    """Blocks that became visible by this commit."""

    blocks: int


class Clear(msgspec.Struct, frozen=True, kw_only=True, tag="clear"):
    """The engine dropped its cache on purpose: nothing saved before may be served any more."""


class Observe(msgspec.Struct, frozen=True, kw_only=True, tag="observe"):
    """A prefill step took `seconds` for `tokens`, which attended to `attended` positions in sum."""

    tokens: int
    attended: int
    seconds: float


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Understood."""


Question: TypeAlias = Lookup | Prepare | Poll | Release | Cancel | Failed | Reserve | Commit | Clear | Observe
Answer: TypeAlias = (
    Welcome | Refused | Found | Pending | Nothing | Accepted | Loading | Ready | Reserved | Committed | Done
)

_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(EngineHello)
_question_decoder = msgspec.msgpack.Decoder(Question)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def encode(message: EngineHello | Question | Answer) -> bytes:
    """One frame. Raises ProtocolError above 16 MiB."""
    return framed(_encoder.encode(message), MAX_FRAME_BYTES)


def frame_length(header: bytes) -> int:
    """Bytes that follow a 4-byte header. Raises ProtocolError above 16 MiB."""
    return body_length(header, MAX_FRAME_BYTES)


def decode_hello(body: bytes) -> EngineHello:
    """The first message of a connection. Raises ProtocolError."""
    try:
        return _hello_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a hello: {error}") from error


def decode_question(body: bytes) -> Question:
    """What an engine asks. Raises ProtocolError."""
    try:
        return _question_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a question: {error}") from error


def decode_answer(body: bytes) -> Answer:
    """What an agent answers. Raises ProtocolError."""
    try:
        return _answer_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not an answer: {error}") from error
