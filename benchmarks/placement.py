"""CPU time of one placement decision, by fleet size and prompt length.

    python benchmarks/placement.py [--out benchmarks/results/placement.jsonl]

Every replica shares the first quarter of the prompt, one holds three quarters, all have load: the walk over the index,
the ring and the cost terms all run. Caches are full, but for what is shared of prompts of 256 blocks that this gateway
placed, so that what must be evicted is looked up and priced. `place` decides, `placed` commits (traffic, claim) and its
claim is released. With `pools` every agent has a pool that holds what its engine holds, so that every replica but one
is offered a fetch.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from array import array
from pathlib import Path

from stamp import stamp

from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import Claims, ReplicaView
from gateway.placement.placer import Placer
from kvstore.cost import LinkEstimate
from kvstore.messages import ROOT_PARENT, FetchState, Tier

CASES = [(1, 64), (8, 64), (8, 512), (8, 6250), (64, 64), (64, 6250), (256, 64)]


CAPACITY = 156 * 256
POOL = FetchState(namespace="n", acts=True, slots=100_000, link=LinkEstimate(0.002, 25e9), links={})


def measure(replicas: int, units: int, pools: bool = False) -> dict[str, float]:
    """Microseconds of CPU per `place` and per `placed` + `release`."""
    rng = random.Random(0)
    index = PrefixIndex()
    placer = Placer(index)
    prompts = []
    base = array("Q", [rng.getrandbits(64) for _ in range(units * 3 // 4)])
    for _ in range(50):
        keys = base + array("Q", [rng.getrandbits(64) for _ in range(units - len(base))])
        prompts.append(PromptIdentity(mode=IdentityMode.EXACT, keys=keys, tokens=units * 16 + 7))
    views = []
    for i in range(replicas):
        replica = f"replica-{i}"
        index.add_replica(replica)
        views.append(
            ReplicaView(
                id=replica,
                claims=Claims.REPORTS,
                queued_prefill_tokens=rng.randrange(2000),
                running=rng.randrange(8),
                prefill_tokens_per_s=30_000.0,
                capacity_blocks=CAPACITY,
                held_blocks=CAPACITY,
                block_bytes=1 << 21,
                fetch=POOL if pools else None,
            )
        )
    for i, view in enumerate(views):
        for _ in range(CAPACITY // 256):
            placer.evictions.used(view, array("Q", [rng.getrandbits(64) for _ in range(256)]))
        held = base if i == replicas // 2 else base[: units // 4]
        for tier in (Tier.HBM, Tier.DRAM)[: 1 + pools]:
            index.store(view.id, tier, held, [ROOT_PARENT, *held[:-1]])
    placer.place(prompts[0], views)
    rounds = max(100, 4000 // replicas)
    begin = time.process_time()
    for i in range(rounds):
        placer.place(prompts[i % 50], views)
    place = time.process_time() - begin
    placements = [(placer.place(prompt, views), prompt) for prompt in prompts]
    begin = time.process_time()
    for placement, prompt in placements:
        placer.release(placer.placed(placement, prompt))
    placed = time.process_time() - begin
    return {"place_us": place / rounds * 1e6, "placed_us": placed / len(placements) * 1e6}


def main() -> None:
    """Prints one line per case, and adds them to a file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    where = stamp() | {"python": platform.python_version()}
    print(f"Python {where['python']}, {where['host']}; CPU microseconds")
    print(f"{'replicas':>8}  {'tokens':>7}  {'place':>8}  {'placed':>8}  {'pools':>8}")
    for replicas, units in CASES:
        result = measure(replicas, units)
        result["place_pools_us"] = measure(replicas, units, pools=True)["place_us"]
        print(f"{replicas:>8}  {units * 16:>7}  " + "  ".join(f"{us:>8.0f}" for us in result.values()), flush=True)
        if options.out:
            told = {"replicas": replicas, "tokens": units * 16} | {name: round(us, 1) for name, us in result.items()}
            with options.out.open("a") as file:
                file.write(json.dumps(told | where) + "\n")


if __name__ == "__main__":
    main()
