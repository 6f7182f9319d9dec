"""Frames of a report stream: whatever is sent arrives, however it is cut; what is no frame is an error."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ProtocolError
from kvstore.geometry import KvGeometry
from kvstore.identity import pack_keys
from kvstore.messages import (
    MAX_FRAME_BYTES,
    SNAPSHOT_PART_BLOCKS,
    Delta,
    FrameReader,
    Heartbeat,
    Hello,
    ModelFiles,
    Removed,
    Report,
    Snapshot,
    Stored,
    Tier,
    digest_of,
    digest_term,
    encode_frame,
)

u64 = st.integers(0, 2**64 - 1)
packed = st.lists(u64, max_size=5).map(pack_keys)
tiers = st.sampled_from(Tier)
snapshots = st.builds(Snapshot, epoch=u64, seq=u64, part=u64, parts=u64, tier=tiers, keys=packed, parents=packed)
changes = st.one_of(
    st.builds(Stored, tier=tiers, keys=packed, parents=packed), st.builds(Removed, tier=tiers, keys=packed)
)
deltas = st.builds(Delta, epoch=u64, seq=u64, changes=st.lists(changes, max_size=4))
heartbeats = st.builds(
    Heartbeat,
    epoch=u64,
    seq=u64,
    engine_up=st.booleans(),
    running=u64,
    waiting=u64,
    queued_prefill_tokens=st.none() | u64,
    prefill_tokens_per_s=st.none() | st.floats(0, 1e9),
    kv_usage=st.floats(0, 1),
    capacity_blocks=u64,
    blocks=u64,
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
    beat = Heartbeat(
        epoch=1,
        seq=2,
        engine_up=True,
        running=0,
        waiting=0,
        queued_prefill_tokens=None,
        prefill_tokens_per_s=None,
        kv_usage=0.0,
        capacity_blocks=3,
        blocks=0,
        digest=0,
    )
    reader = FrameReader()
    received = [report for byte in encode_frame(beat) * 3 for report in reader.feed(bytes([byte]))]
    assert received == [beat] * 3


def test_messages_over_http_survive() -> None:
    hello = Hello(
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
    )
    assert msgspec.json.decode(msgspec.json.encode(hello), type=Hello) == hello
    files = ModelFiles(
        model="m", tokenizer_json=b"\xff{}", chat_template=None, special_tokens={"eos_token": "</s>"}, digest="d"
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(files), type=ModelFiles) == files


def test_fields_of_a_later_version_are_ignored() -> None:
    body = {"type": "delta", "epoch": 1, "seq": 2, "changes": [["stored", 0, b"", b"", "new"]], "new": {"a": [1]}}
    encoded = msgspec.msgpack.encode(body)
    (report,) = FrameReader().feed(struct.pack(">I", len(encoded)) + encoded)
    assert report == Delta(epoch=1, seq=2, changes=[Stored(tier=Tier.HBM, keys=b"", parents=b"")])


def test_a_full_snapshot_part_fits_into_a_frame() -> None:
    keys = pack_keys(range(2**63, 2**63 + SNAPSHOT_PART_BLOCKS))
    part = Snapshot(epoch=2**63, seq=1, part=0, parts=1, tier=Tier.REMOTE, keys=keys, parents=keys)
    assert len(encode_frame(part)) < MAX_FRAME_BYTES / 8


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
