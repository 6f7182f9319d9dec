"""Rules of the code base that no single module can keep: imports, dependencies, sizes, and what the text may say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("kvstore", "gateway", "replica_agent")
MAY_IMPORT = {"kvstore": set(), "gateway": {"kvstore"}, "replica_agent": {"kvstore"}}
HEAVY = ("torch", "zmq", "nixl", "transformers", "safetensors", "gguf", "replica_agent")
MAX_LINES = 400

MACHINE_PATHS = re.compile(r"/(?:work|root|tmp)/\w")
"""Places on the machine somebody happened to work on."""

PRIVATE_WORDS = re.compile(r"\.(?:internal|corp|lan)\b|\bissue (?:#|no\.? ?)?\d", re.IGNORECASE)
"""Hosts of a private network, and references to a tracker that readers do not have."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Top-level names of everything a module imports, at whatever depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module.partition(".")[0]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_in_one_direction(package: str) -> None:
    for path in modules(package):
        others = set(imports(path)) & set(PACKAGES) - {package}
        assert others <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {others}"


def test_importing_the_gateway_loads_nothing_heavy() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in modules("gateway")
        if path.name != "__main__.py"
    ]
    assert len(names) > 40
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("package", "extras"), [("kvstore", ()), ("gateway", ()), ("replica_agent", ("agent",))], ids=PACKAGES
)
def test_every_import_is_a_declared_dependency(package: str, extras: tuple[str, ...]) -> None:
    declared = [*PROJECT["dependencies"]]
    for extra in extras:
        declared += PROJECT["optional-dependencies"][extra]
    known = {normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in declared}
    distributions = packages_distributions()
    seen = set()
    for path in modules(package):
        for name in imports(path):
            # What runs inside an engine finds that engine there.
            if name == path.parent.name and path.parent.parent.name == "engines":
                continue
            if name in PACKAGES or name in sys.stdlib_module_names or name == "__future__":
                continue
            seen.add(name)
            found = {normal(each) for each in distributions.get(name, ())}
            assert found & known, f"{path.relative_to(ROOT)} imports {name}, of {found or 'nothing installed'}"
    assert seen, "the walk found something"


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_blocks_an_event_loop(package: str) -> None:
    """No sleep of a thread and no synchronous HTTP in an `async def`; nested functions count, they run there too."""
    for path in modules(package):
        assert "requests" not in set(imports(path)), path
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    blocking = called in ("time.sleep", "subprocess.run", "urllib.request.urlopen") or re.fullmatch(
                        r"httpx\.(get|post|put|request|Client)", called
                    )
                    assert not blocking, f"{path.relative_to(ROOT)}:{node.lineno}: {called} in async code"


@pytest.mark.parametrize("package", PACKAGES)
def test_one_noun_per_file(package: str) -> None:
    long = {str(path.relative_to(ROOT)): n for path in modules(package) if (n := lines(path)) > MAX_LINES}
    assert not long


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed_and_described(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    for path in modules(package):
        text = path.read_text()
        assert not text or ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} says nothing of itself"


def test_the_text_speaks_of_the_product_alone() -> None:
    """No path of somebody's machine, no private host, no reference to how the work was organised."""
    found = []
    for path in tracked():
        if path == Path(__file__) or "fixtures" in path.parts or path.suffix in (".png", ".gz"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if match := MACHINE_PATHS.search(line) or PRIVATE_WORDS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not found


def test_only_tests_look_beside_the_checkout() -> None:
    """Data that lies next to the repository is used where it is there, and by tests alone."""
    for package in PACKAGES:
        for path in modules(package):
            assert not re.search(r"""/ ["']shared["']""", path.read_text()), path


def test_the_changelog_knows_the_version() -> None:
    """The newest release in the changelog is the version that is built."""
    text = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", text, re.MULTILINE)
    assert released, "a heading such as ## [0.1.0]"
    assert released[0] == PROJECT["version"]
