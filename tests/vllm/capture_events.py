"""Captures what a real vLLM says of its KV cache, as bytes: the golden fixtures of the agent's decoder.

    PYTHONPATH=tests/vllm:tests python tests/vllm/capture_events.py tests/fixtures/kv_events_vllm_0.32.json

`served` is what two servers published, one with integers for hashes and one with bytes, request by request, with the
cached tokens that each request was answered with, and the first and last messages of a replay. `encoded` are events
that a CPU server does not come to (adapters, images, other kinds of attention, other media), encoded by vLLM's own
classes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import vllm_env
import zmq
from vllm_engine import prompt_of
from vllm_models import model_directory
from vllm_server import BLOCK, VllmServer

BLOCKS = 8
"""The size of the cache."""

FULL = {"vllm_xargs": {"kv_cache_report_mode": "full"}}

REQUESTS: list[tuple[str, list[int], int, dict[str, Any]]] = [
    ("two blocks", [1, 2], 5, {}),
    ("the same again", [1, 2], 5, {}),
    ("nothing but the two blocks, so that the second is computed again", [1, 2], 0, {}),
    ("salted", [1, 2], 5, {"cache_salt": "tenant"}),
    ("reported in full", [1, 2], 5, FULL),
    ("reported in full, and one block more", [1, 2, 3], 5, FULL),
    ("reported in full again", [1, 2, 3], 5, FULL),
    ("five others, which evicts", [10, 11, 12, 13, 14], 5, {}),
    ("the two blocks, one copy of which is left", [1, 2], 5, {}),
    ("five others, which evicts again", [20, 21, 22, 23, 24], 5, {}),
    ("five more", [30, 31, 32, 33, 34], 5, {}),
    ("the two blocks, which are gone", [1, 2, 3], 5, {}),
    ("RESET", [], 0, {}),
    ("after a reset", [1, 2], 5, {}),
]

ENCODE = """
import json, msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

base = dict(parent_block_hash=None, token_ids=list(range(32)), block_size=16, lora_id=None, medium="GPU")
base["lora_name"] = None
full = dict(group_idx=0, kv_cache_spec_kind="full_attention")
def stored(**more):
    return BlockStored(**(base | dict(block_hashes=[2**64 - 1, 7], extra_keys=[None, None]) | more))
cases = {
    "least": [BlockStored(**base, block_hashes=[1, 2])],
    "adapter": [stored(lora_id=3, lora_name="sql", extra_keys=[("sql",), ("sql",)], group_idx=0)],
    "adapter and salt": [stored(lora_id=3, lora_name="sql", extra_keys=[("sql", "tenant"), ("sql",)], group_idx=0)],
    "image": [stored(extra_keys=[None, (("a1b2", 3),)], group_idx=0, kv_cache_spec_kind="full_attention")],
    "image and salt": [stored(extra_keys=[(("a1b2", -5), "tenant"), (("a1b2", 3),)], group_idx=0)],
    "embeddings": [stored(extra_keys=[(b"digest",), None], group_idx=0)],
    "sliding window": [stored(group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128)],
    "mamba": [stored(group_idx=2, kv_cache_spec_kind="mamba")],
    "latent attention": [stored(group_idx=0, kv_cache_spec_kind="mla_attention")],
    "session": [stored(**full, session_id="s", locality="LOCAL", ownership="o")],
    "offloaded": [stored(medium="CPU", group_idx=0), BlockRemoved(block_hashes=[7], medium="CPU", group_idx=0)],
    "storage": [stored(medium="STORAGE", group_idx=0), BlockRemoved(block_hashes=[7], medium="STORAGE")],
    "bytes": [stored(block_hashes=[bytes(32), bytes([255] * 32)], parent_block_hash=bytes([1] * 32), group_idx=0)],
    "removed and cleared": [BlockRemoved(block_hashes=[7], medium="GPU", group_idx=1), AllBlocksCleared()],
}
encoder = msgspec.msgpack.Encoder()
print(json.dumps({name: encoder.encode(KVEventBatch(ts=1.5, events=events, data_parallel_rank=1)).hex()
                  for name, events in cases.items()}))
"""


def served(hashes: str) -> dict[str, Any]:
    """What one server said."""
    env = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1" if hashes == "int" else "0"}
    context = zmq.Context()
    requests: list[dict[str, Any]] = []
    with VllmServer(model_directory("tiny"), kv_tokens=BLOCKS * BLOCK, dev_mode=True, env=env) as server:
        server.start()
        server.wait_ready()
        events = context.socket(zmq.SUB)
        events.setsockopt(zmq.SUBSCRIBE, b"")
        events.connect(server.events())
        events.poll(2_000)  # for the subscription to arrive
        for what, parts, extra, more in REQUESTS:
            if what == "RESET":
                httpx.post(f"{server.url}/reset_prefix_cache", trust_env=False, timeout=60).raise_for_status()
                continue
            body = {
                "model": "tiny",
                "prompt": prompt_of(*parts, extra=extra),
                "max_tokens": 1,
                "temperature": 0,
                **more,
            }
            answer = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False, timeout=120).json()
            batches = []
            while events.poll(1_000):
                topic, seq, payload = events.recv_multipart()
                batches.append([topic.hex(), seq.hex(), payload.hex()])
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            requests.append({"what": what, "parts": parts, "extra": extra, "cached": cached, "batches": batches})
            sys.stderr.write(f"{what}: {cached} cached, {len(batches)} batches\n")
        replay = context.socket(zmq.DEALER)
        replay.connect(server.replay())
        replay.send_multipart([b"", (0).to_bytes(8, "big")])
        frames: list[list[str]] = []
        while replay.poll(5_000):
            frames.append([frame.hex() for frame in replay.recv_multipart()])
            if frames[-1][-2] == "ff" * 8:
                break
        context.destroy(linger=0)
    return {"block": BLOCK, "capacity": BLOCKS + 1, "requests": requests, "replay": [frames[0], frames[-1]]}


def main() -> None:
    """Writes the file that is named."""
    command = [str(vllm_env.python()), "-c", ENCODE]
    encoded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    told = {
        "vllm": vllm_env.VERSION,
        "served": {hashes: served(hashes) for hashes in ("int", "bytes")},
        "encoded": json.loads(encoded),
    }
    Path(sys.argv[1]).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
