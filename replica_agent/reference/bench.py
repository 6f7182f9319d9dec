"""How fast the model computes here: `python -m replica_agent.reference.bench --model smollm2 --threads 2`.

One JSON object. `wall` is what one sees; `cpu` divides by the processor time of all threads, and so hardly depends on
what else runs on the machine. Two Zen 4 cores with AVX512-BF16, SmolLM2-135M, wall tokens/s:

    dtype     threads  prefill 512  prefill 2048  decode 1 at 128  decode 8 at 128  decode 8 at 2000
    bfloat16        1          693           492               24              138                42
    bfloat16        2          880           735               28              176                65
    float32         1          353           271               18               81                27
    float32         2          609           490               19               95                38

OMP_WAIT_POLICY=ACTIVE instead of the engine's PASSIVE gives 1283 and 841 for bfloat16 prefill with 2 threads while
nothing else runs. With a second engine at work on the same cores, threads that spin fall below 200; passive ones keep
670.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence

_BLOCK = 16
_CHUNK = 512
_PROMPT = 2048
_STEPS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure prefill of 512 and 2048 tokens, and decode of 1 and 8 sequences at two context lengths."""
    parser = argparse.ArgumentParser(prog="python -m replica_agent.reference.bench", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)

    # Before torch is imported, as the engine does.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from replica_agent.reference.kv_cache import PagedKv
    from replica_agent.reference.model import Llama, Span
    from replica_agent.reference.prepare import prepare
    from replica_agent.reference.weights import DTYPES, ModelConfig, Weights

    torch.set_num_threads(options.threads)
    directory = prepare(options.model)
    config = ModelConfig.load(directory)
    dtype = DTYPES[options.dtype]
    per_sequence = (_PROMPT + _STEPS) // _BLOCK + 1
    kv = PagedKv(config, 8 * per_sequence, _BLOCK, dtype)
    model = Llama(config, Weights.load(directory, config, dtype), kv, per_sequence * _BLOCK)
    rng = random.Random(0)
    tokens = [rng.randrange(config.vocab_size) for _ in range(_PROMPT)]
    tables = [list(range(index * per_sequence, (index + 1) * per_sequence)) for index in range(8)]

    def prefill(length: int) -> None:
        for start in range(0, length, _CHUNK):
            model.forward([Span(tokens[start : start + _CHUNK], start, tables[0])])

    def decode(sequences: int, context: int) -> None:
        for step in range(_STEPS):
            model.forward([Span(tokens[:1], context + step, table) for table in tables[:sequences]])

    prefill(_CHUNK)
    result: dict[str, object] = {"model": options.model, "dtype": options.dtype, "threads": options.threads}
    for length in (_CHUNK, _PROMPT):
        result[f"prefill_{length}"] = _rates(length, lambda length=length: prefill(length))
    for context in (128, 2000):
        for sequences in (1, 8):
            run = lambda n=sequences, context=context: decode(n, context)  # noqa: E731
            result[f"decode_{sequences}_at_{context}"] = _rates(sequences * _STEPS, run)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _rates(tokens: int, run: object) -> dict[str, int]:
    assert callable(run)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {
        "wall_tokens_per_s": round(tokens / (time.perf_counter() - wall)),
        "cpu_tokens_per_s": round(tokens / (time.process_time() - cpu)),
    }


if __name__ == "__main__":
    sys.exit(main())
