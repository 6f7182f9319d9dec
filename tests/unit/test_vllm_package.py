"""What the vLLM connector drags into an engine's processes, what it says of the engine, and what it refuses by name."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm_support import facts

from kvstore.layout import Share
from replica_agent.engines.vllm.errors import PoolUnusable
from replica_agent.engines.vllm.step import Cleared
from replica_agent.engines.vllm.tally import Tally, add, summary

ROOT = Path(__file__).parents[2]
PACKAGE = "replica_agent.engines.vllm"
OURS = ("kvstore", "gateway", "replica_agent")
OF_VLLM = ("connector", "compat", "stats")
"""The modules that import vLLM."""

MAY_LOAD = {"msgspec", "numpy", "torch", "vllm"}


def module_file(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imported(name: str) -> set[str]:
    """Modules that importing a module of ours loads, ours in full and others by their first name."""
    file = module_file(name)
    assert file is not None, name
    found: set[str] = set()
    nodes: list[ast.stmt] = list(ast.parse(file.read_text()).body)
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module.startswith(OURS)}
    # A module of ours brings the packages around it; what is no module is a name in one.
    ours = {each for each in found if each.startswith(OURS) and module_file(each)}
    ours |= {each.rsplit(".", depth)[0] for each in ours for depth in range(1, each.count(".") + 1)}
    return ours | {each.partition(".")[0] for each in found if not each.startswith(OURS)}


def closure(start: str) -> set[str]:
    seen: set[str] = set()
    todo = {start}
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            if name.startswith(OURS):
                todo |= imported(name)
    return seen


def test_the_connector_loads_nothing_but_vllm_brings_it() -> None:
    """Our wheel is installed beside vLLM without its dependencies."""
    loaded = closure(f"{PACKAGE}.connector")
    others = {name for name in loaded if not name.startswith(OURS)} - sys.stdlib_module_names - {"__future__"}
    assert others == MAY_LOAD
    ours = {name for name in loaded if name.startswith(OURS)}
    assert f"{PACKAGE}.worker_side" in ours, "the walk found something"
    strangers = {name for name in ours if not name.startswith(("kvstore", "replica_agent.engines"))}
    assert strangers == {"replica_agent"}


def test_all_but_the_seam_can_be_loaded_without_vllm() -> None:
    modules = sorted(
        f"{PACKAGE}.{path.stem}"
        for path in (ROOT / "replica_agent/engines/vllm").glob("*.py")
        if path.stem not in ("__init__", *OF_VLLM)
    )
    assert len(modules) > 8
    code = (
        f"import importlib, sys\nfor name in {[PACKAGE, *modules]!r}: importlib.import_module(name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'vllm', 'fastapi', 'starlette', 'uvicorn', 'aiohttp', 'httpx', 'zmq', 'xxhash', 'transformers', 'gateway'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_hello_names_what_decides_the_bytes() -> None:
    hello = facts(tp=2, rank=1, interior="CPU_ATTN:vec").hello()
    assert (hello.role, hello.tp, hello.rank, hello.kv_heads, hello.layers) == ("worker", 2, 1, 4, 3)
    assert hello.block_bytes == 3 * 4 * 2 * 8 * 4 * 4
    assert "CPU_ATTN:vec" in hello.layout
    assert facts(interior="CPU_ATTN:amx").hello().layout != hello.layout


@pytest.mark.parametrize(
    ("more", "share"),
    [
        ({"tp": 2, "rank": 1}, Share(2, 2, 0, 3, True)),
        ({"tp": 8, "rank": 3}, Share(1, 1, 0, 3, False)),
        ({"tp": 2, "pp": 2, "rank": 3, "first_layer": 2, "rank_layers": 1}, Share(2, 2, 2, 1, True)),
    ],
)
def test_a_ranks_share_is_of_its_heads_and_its_own_layers(more: dict[str, Any], share: Share) -> None:
    assert facts(**more).share == share


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"hash_algorithm": "xxhash"}, "--prefix-caching-hash-algo: expected one of sha256, sha256_cbor, got xxhash"),
        ({"dtype": "int4"}, "dtype: 'int4'"),
        ({"tp": 3}, "tp: 3 ranks and 4 KV heads"),
        ({"head_dim": 0}, "head_dim"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    engine = facts(**more)
    with pytest.raises(PoolUnusable, match=named):
        (engine.hello(), engine.share)


@pytest.mark.parametrize("version", ["0.30.1", "0.31", "0.32.0", "0.33.0+cpu"])
def test_the_connector_is_for_these_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing in this vLLM is looked for, as its version is one that has it."""
    monkeypatch.setitem(sys.modules, "vllm", module_of(version))
    with pytest.raises(ModuleNotFoundError, match=r"vllm\."):
        connector()


@pytest.mark.parametrize("version", ["0.29.0", "0.29.2+cpu", "0.34", "0.34.0rc1", "0.3", "1.0", "1.31.0", "dev"])
def test_another_version_is_refused_by_name_whatever_it_lacks(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", module_of(version))
    with pytest.raises(PoolUnusable) as refused:
        connector()
    assert str(refused.value) == f"vllm: this connector is for 0.30 to 0.33, not {version}"


def module_of(version: str) -> ModuleType:
    """A vLLM that has moved everything but its version."""
    vllm = ModuleType("vllm")
    vllm.__version__ = version  # type: ignore[attr-defined]
    return vllm


def connector() -> Any:
    """As vLLM asks for it."""
    return getattr(importlib.import_module(PACKAGE), "PrefixGatewayConnector")  # noqa: B009


def test_ranks_confirm_together() -> None:
    assert Cleared({0: 1}).aggregate(Cleared({1: 2})) == Cleared({0: 1, 1: 2})


def test_a_tally_adds_up_over_ranks_and_time() -> None:
    now = [0.0]
    tally = Tally(lambda: now[0])
    for _ in range(100):
        tally.spent(0.001)
        tally.spent(0.002)
        tally.step()
    tally.spent(0.05)
    tally.step()
    assert tally.take({"saved": 5}) is None, "once a second"
    now[0] = 1.5
    told = tally.take({"saved": 5})
    assert told is not None
    assert told["blocks"] == {"saved": 5}
    now[0] = 3.0
    tally.step()
    more = tally.take({"saved": 7})
    assert more is not None
    whole = add(add({}, told), more)
    assert summary(whole) == {
        "saved": 7,
        "steps": 102,
        "step_ms_p50": 3.0,
        "step_ms_p99": 3.0,
        "step_ms_max": 50.0,
    }
    assert summary({}) == {}
