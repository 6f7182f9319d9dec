"""Frames of a report stream: whatever is sent arrives, however it is cut; what is no frame is an error."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_support import beat

from kvstore.errors import ProtocolError, UnknownProtocol
from kvstore.geometry import KvGeometry
from kvstore.identity import pack_keys
from kvstore.messages import (
    MAX_CHANGED_BLOCKS,
    MAX_FRAME_BYTES,
    MAX_SNAPSHOT_PARTS,
    PROTOCOL_VERSION,
    Cleared,
    Delta,
    FrameReader,
    Heartbeat,
    Hello,
    ModelFiles,
    Problem,
    Removed,
    Report,
    Snapshot,
    Stored,
    Tier,
    decode_hello,
    digest_of,
    digest_term,
    encode_frame,
)

u64 = st.integers(0, 2**64 - 1)
packed = st.lists(u64, max_size=5).map(pack_keys)
tiers = st.sampled_from(Tier)
stores = st.builds(Stored, tier=tiers, keys=packed, parents=packed)
snapshots = st.builds(
    Snapshot,
    epoch=u64,
    seq=u64,
    part=st.integers(0, MAX_SNAPSHOT_PARTS - 1),
    last=st.booleans(),
    stored=st.lists(stores, max_size=4),
)
changes = st.one_of(stores, st.builds(Removed, tier=tiers, keys=packed), st.builds(Cleared, tier=tiers))
counts = st.integers(0, 2**53)
deltas = st.builds(Delta, epoch=u64, seq=u64, changes=st.lists(changes, max_size=4))
heartbeats = st.builds(
    Heartbeat,
    epoch=u64,
    seq=u64,
    engine_up=st.booleans(),
    running=counts,
    waiting=counts,
    queued_prefill_tokens=st.none() | counts,
    prefill_tokens_per_s=st.none() | st.floats(0.001, 1e9),
    kv_usage=st.floats(0, 1),
    capacity_blocks=counts,
    blocks=counts,
    digest=u64,
)
reports = st.one_of(snapshots, deltas, heartbeats)


@given(st.lists(reports, max_size=6), st.data())
def test_reports_survive_any_cuts(sent: list[Report], data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = FrameReader()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += list(reader.feed(stream[start:end]))
    assert received == sent


def test_reports_survive_byte_by_byte() -> None:
    reader = FrameReader()
    received = [report for byte in encode_frame(BEAT) * 3 for report in reader.feed(bytes([byte]))]
    assert received == [BEAT] * 3


BEAT = beat(1, 2, capacity_blocks=3)
HELLO = Hello(
    replica_id="r",
    dp_rank=1,
    epoch=2**63,
    engine="vllm",
    engine_version="0.32.0",
    engine_up=True,
    models=["m", "adapter"],
    block_size=16,
    capacity_blocks=7,
    geometry=KvGeometry(layers=1, kv_heads=2, head_dim=3, dtype="float32"),
    identity_modes=["exact"],
    route_seed_check=2**64 - 1,
    kv_events=True,
    attention=3e-5,
)


def test_messages_over_http_survive() -> None:
    assert decode_hello(msgspec.json.encode(HELLO)) == HELLO
    files = ModelFiles(
        model="m", tokenizer_json=b"\xff{}", chat_template=None, special_tokens={"eos_token": "</s>"}, digest="d"
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(files), type=ModelFiles) == files


def test_an_agent_that_says_nothing_of_attention_is_understood() -> None:
    said = msgspec.to_builtins(HELLO)
    assert said.pop("attention") == 3e-5
    assert decode_hello(msgspec.json.encode(said)).attention == 0.0


def test_fields_of_a_later_version_are_ignored() -> None:
    body = {"type": "delta", "epoch": 1, "seq": 2, "changes": [["stored", 0, b"", b"", "new"]], "new": {"a": [1]}}
    encoded = msgspec.msgpack.encode(body)
    (report,) = FrameReader().feed(struct.pack(">I", len(encoded)) + encoded)
    assert report == Delta(epoch=1, seq=2, changes=[Stored(tier=Tier.HBM, keys=b"", parents=b"")])


def test_a_full_snapshot_part_fits_into_a_frame() -> None:
    keys = pack_keys(range(2**63, 2**63 + MAX_CHANGED_BLOCKS))
    stored = [Stored(tier=Tier.REMOTE, keys=keys, parents=keys)]
    frame = encode_frame(Snapshot(epoch=2**63, seq=1, part=0, last=True, stored=stored))
    assert len(frame) < MAX_FRAME_BYTES / 8
    assert len(list(FrameReader().feed(frame))) == 1


def test_an_oversize_frame_is_refused_on_both_sides() -> None:
    keys = bytes(MAX_FRAME_BYTES)
    with pytest.raises(ProtocolError, match="over the limit"):
        encode_frame(Delta(epoch=0, seq=0, changes=[Removed(tier=Tier.HBM, keys=keys)]))
    with pytest.raises(ProtocolError, match="announced a frame of 16777217 bytes"):
        list(FrameReader().feed(struct.pack(">I", MAX_FRAME_BYTES + 1)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xff\xff",
        msgspec.msgpack.encode({"type": "unknown"}),
        msgspec.msgpack.encode({"type": "delta", "epoch": 1}),
        msgspec.msgpack.encode({"type": "delta", "epoch": 1, "seq": "2", "changes": []}),
        msgspec.msgpack.encode({"type": "delta", "epoch": 1, "seq": 2, "changes": [["stored", 9, b"", b""]]}),
        msgspec.msgpack.encode([1, 2, 3]),
        b"\xa4\xff\xff\xff\xff",
        b"\x82\xa4type\xa5delta\xa1x" + b"\x91" * 100_000,
    ],
    ids=["empty", "invalid", "negative", "tag", "missing", "type", "tier", "array", "utf-8", "deep"],
)
def test_garbage_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a report"):
        list(FrameReader().feed(struct.pack(">I", len(body)) + body))


LINK = {"latency_s": 0.0, "bytes_per_s": 1.0}
FETCH = {"namespace": "n", "acts": True, "slots": 1, "link": LINK, "links": {}}
PROBLEM = msgspec.to_builtins(Problem(code="c", message="m", fix="f"))
KEYS = bytes(8 * MAX_CHANGED_BLOCKS + 8)


@pytest.mark.parametrize(
    ("report", "field"),
    [
        (BEAT, {"running": -1}),
        (BEAT, {"waiting": 2**53 + 1}),
        (BEAT, {"epoch": -1}),
        (BEAT, {"queued_prefill_tokens": 2**60}),
        (BEAT, {"prefill_tokens_per_s": 0.0}),
        (BEAT, {"prefill_tokens_per_s": float("inf")}),
        (BEAT, {"kv_usage": float("nan")}),
        (BEAT, {"kv_usage": 1.5}),
        (BEAT, {"problems": [PROBLEM] * 65}),
        (BEAT, {"problems": [PROBLEM | {"message": "m" * 4_097}]}),
        (BEAT, {"fetch": FETCH | {"namespace": "n" * 513}}),
        (BEAT, {"fetch": FETCH | {"links": {str(number): LINK for number in range(4_097)}}}),
        (BEAT, {"fetch": FETCH | {"links": {"n" * 513: LINK}}}),
        (BEAT, {"fetch": FETCH | {"link": LINK | {"latency_s": float("inf")}}}),
        (Snapshot(epoch=1, seq=1, part=0, last=True, stored=[]), {"part": MAX_SNAPSHOT_PARTS}),
        (Snapshot(epoch=1, seq=1, part=0, last=True, stored=[]), {"stored": [["stored", 0, b"", b""]] * 5}),
        (Snapshot(epoch=1, seq=1, part=0, last=True, stored=[]), {"stored": [["stored", 0, KEYS, KEYS]]}),
        (Delta(epoch=1, seq=1, changes=[]), {"changes": [["removed", 0, b""]] * 13}),
        (Delta(epoch=1, seq=1, changes=[]), {"changes": [["removed", 0, KEYS]]}),
    ],
)
def test_every_length_and_number_has_a_bound(report: Report, field: dict[str, object]) -> None:
    (name,) = field
    body = msgspec.msgpack.encode(msgspec.to_builtins(report, builtin_types=(bytes,)) | field)
    with pytest.raises(ProtocolError, match=rf"not a report: .*\$\.{name}"):
        list(FrameReader().feed(struct.pack(">I", len(body)) + body))


@pytest.mark.parametrize(
    "field",
    [
        {"replica_id": "r" * 513},
        {"models": ["m"] * 4_097},
        {"models": ["m" * 513]},
        {"identity_modes": ["exact"] * 17},
        {"block_size": -1},
        {"block_size": 2**21},
        {"capacity_blocks": 2**60},
        {"dp_rank": -1},
        {"attention": -1e-9},
        {"attention": 1.5},
        {"geometry": {"layers": 65_537, "kv_heads": 1, "head_dim": 1, "dtype": "float32"}},
        {"geometry": {"layers": 0, "kv_heads": 1, "head_dim": 1, "dtype": "float32"}},
    ],
)
def test_so_has_a_hello(field: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="not a hello: "):
        decode_hello(msgspec.json.encode(msgspec.to_builtins(HELLO) | field))


def test_another_protocol_is_refused_by_number_whatever_else_it_says() -> None:
    raw = msgspec.json.encode({"protocol": PROTOCOL_VERSION + 1, "replica_id": ["of", "another", "kind"]})
    with pytest.raises(UnknownProtocol, match=f"speaks protocol {PROTOCOL_VERSION + 1}, this side {PROTOCOL_VERSION}"):
        decode_hello(raw)


@given(st.binary(max_size=300))
def test_random_bytes_are_reports_or_a_protocol_error(data: bytes) -> None:
    try:
        for report in FrameReader().feed(data):
            assert isinstance(report, Snapshot | Delta | Heartbeat)
    except ProtocolError:
        pass


@given(st.sets(u64), tiers)
def test_a_digest_is_the_sum_of_its_terms(keys: set[int], tier: Tier) -> None:
    assert digest_of(keys, tier) == sum(digest_term(key, tier) for key in keys) % 2**64


def test_a_digest_tells_the_tier() -> None:
    assert len({digest_of([2**40 + 1], tier) for tier in Tier}) == len(Tier)
