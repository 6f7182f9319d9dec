"""Bytes that a real vLLM published: decoded, folded, and held against what its requests then found cached.

`tests/vllm/capture_events.py` captured them. Older and other encodings, by hand from their schemas, are in
test_agent_decode.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_support import SEED
from vllm_engine import prompt_of

from kvstore.identity import Namespace, pack_tokens, token_keys
from kvstore.messages import Tier
from replica_agent.catalogue import Catalogue
from replica_agent.events.decode import AllCleared, BlockRemoved, BlockStored, decode_batch

GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures" / "kv_events_vllm_0.32.json").read_text())
TOKENS = pack_tokens(range(32))


@pytest.mark.parametrize("hashes", ["int", "bytes"])
@pytest.mark.parametrize("knows_capacity", [False, True])
def test_what_a_server_published_foretells_what_its_requests_found(hashes: str, knows_capacity: bool) -> None:
    """Also where it told blocks again, computed one twice, evicted, and was reset."""
    told: dict[str, Any] = GOLDEN["served"][hashes]
    block = told["block"]
    subject = Catalogue("tiny", SEED)
    subject.capacity_blocks = told["capacity"] if knows_capacity else 0
    seq = 0
    for request in told["requests"]:
        what, prompt = request["what"], prompt_of(*request["parts"], extra=request["extra"], block=block)
        root = Namespace("tiny", salt="tenant" if what == "salted" else "").root(SEED)
        usable = prompt[: (len(prompt) - 1) // block * block]  # one token at least is computed
        keys, held = token_keys(root, usable)[block // 16 - 1 :: block // 16], set(subject.held(Tier.HBM)[0])
        leading = next((at for at, key in enumerate(keys) if key not in held), len(keys))
        if what != "after a reset":  # which an idle engine tells with its next batch alone
            assert (what, leading * block) == (what, request["cached"])
        for topic, number, payload in request["batches"]:
            assert (topic, int(number, 16)) == ("", seq)
            seq += 1
            batch = decode_batch(bytes.fromhex(payload))
            assert (batch.rank, batch.ignored) == (0, 0)
            kinds = {type(each) for event in batch.events if isinstance(event, BlockStored) for each in event.hashes}
            assert kinds <= {int if hashes == "int" else bytes}
            subject.apply(batch.events)
            subject.check()
    assert subject.counts.told_again == 2 + 2 + 3
    assert subject.block_size == block
    salted = next(request for request in told["requests"] if request["what"] == "salted")
    (event,) = decode_batch(bytes.fromhex(salted["batches"][0][2])).events
    assert isinstance(event, BlockStored) and event.extra == [["tenant"], []]


def test_a_replay_has_the_topic_and_ends_with_a_number_of_its_own() -> None:
    first, last = GOLDEN["served"]["int"]["replay"]
    (_, number, payload), *_ = GOLDEN["served"]["int"]["requests"][0]["batches"]
    assert first == ["", "", number, payload]
    assert last == ["", "", "ff" * 8, ""]


STORED = BlockStored(
    hashes=[2**64 - 1, 7], parent=None, tokens=TOKENS, block_size=16, tier=Tier.HBM, extra=[[], []], full=False
)
EXPECTED: dict[str, tuple[list[dict[str, Any]], int]] = {
    "least": ([{"hashes": [1, 2], "extra": None}], 0),
    "adapter": ([{"lora": "sql", "extra": [["sql"], ["sql"]]}], 0),
    "adapter and salt": ([{"lora": "sql", "extra": [["sql", "tenant"], ["sql"]]}], 0),
    "image": ([{"extra": [[], [["a1b2", 3]]], "full": True}], 0),
    "image and salt": ([{"extra": [[["a1b2", -5], "tenant"], [["a1b2", 3]]]}], 0),
    "embeddings": ([{"extra": [[b"digest"], []]}], 0),
    "sliding window": ([], 1),
    "mamba": ([], 1),
    "latent attention": ([{"full": True}], 0),
    "session": ([{"full": True}], 0),
    "offloaded": ([{"tier": Tier.DRAM}], 0),
    "storage": ([], 2),
    "bytes": ([{"hashes": [bytes(32), b"\xff" * 32], "parent": b"\1" * 32}], 0),
    "removed and cleared": ([], 0),
}
NAMED = {
    "least": Namespace("m"),
    "adapter": Namespace("m", "sql"),
    "adapter and salt": Namespace("m", "sql", "tenant"),
    "latent attention": Namespace("m"),
    "session": Namespace("m"),
}
"""Whose blocks have a name that a prompt could have; the second of "image" cannot, but its first."""


@pytest.mark.parametrize("case", EXPECTED)
def test_what_vllms_own_classes_encode_is_understood(case: str) -> None:
    batch = decode_batch(bytes.fromhex(GOLDEN["encoded"][case]))
    stored, ignored = EXPECTED[case]
    assert (batch.timestamp, batch.rank, batch.ignored) == (1.5, 1, ignored)
    others = [event for event in batch.events if not isinstance(event, BlockStored)]
    assert [event for event in batch.events if isinstance(event, BlockStored)] == [
        msgspec.structs.replace(STORED, **fields) for fields in stored
    ]
    if case == "removed and cleared":
        assert others == [BlockRemoved(hashes=[7], tier=Tier.HBM, group=1), AllCleared()]
    if case == "offloaded":
        assert others == [BlockRemoved(hashes=[7], tier=Tier.DRAM)]
    subject = Catalogue("m", SEED)
    subject.apply(batch.events)
    subject.check()
    expected: set[int] = set()
    if case in NAMED:
        expected = set(token_keys(NAMED[case].root(SEED), range(32)))
    elif case == "image":
        expected = set(token_keys(Namespace("m").root(SEED), range(16)))
    assert set(subject.held(Tier.HBM)[0]) == expected


def test_every_captured_case_is_looked_at() -> None:
    assert EXPECTED.keys() == GOLDEN["encoded"].keys()
