"""`plan crossover`: where the two curves cross, and the published example to the digit."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kv_models import DEEPSEEK_V3, GEMMA_3_27B, GPT_OSS_120B

from gateway.cli import main
from gateway.plan.crossover import Path as Link
from gateway.plan.crossover import crossing, point
from gateway.plan.inputs import read_model
from gateway.plan.published import as_printed

LLAMA = read_model("llama-3-8b")
FAST = Link(latency_s=1e-3, bytes_per_s=50e9, flops_per_s=600e12)


def test_what_ten_thousand_tokens_cost() -> None:
    """1.31 GB over 50 GB/s after 1 ms; 2 x 6.98e9 x 10,000 operations, and 26.2e12 of attention."""
    at = point(LLAMA, FAST, 10_000)
    assert at.kv_bytes == 1_310_720_000
    assert at.fetch_s == pytest.approx(27.2e-3, abs=5e-5)
    assert at.recompute_s == pytest.approx((139.59e12 + 26.22e12) / 600e12, rel=1e-3)


@pytest.mark.parametrize("config", [None, GPT_OSS_120B, GEMMA_3_27B, DEEPSEEK_V3], ids=["llama", "oss", "gemma", "ds"])
def test_the_crossing_is_the_first_length_that_pays_and_all_longer_ones_do(
    tmp_path: Path, config: dict[str, object] | None
) -> None:
    model = LLAMA
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = read_model(str(tmp_path))
    rng = random.Random(1)
    for _ in range(30):
        link = Link(
            latency_s=rng.choice((0.0, 10 ** rng.uniform(-4, 0))),
            bytes_per_s=10 ** rng.uniform(7.5, 11),
            flops_per_s=10 ** rng.uniform(13, 15.5),
        )
        found = crossing(model, link, 50_000)
        looked_at = {1, 2, 127, 128, 129, 50_000, *(rng.randint(1, 50_000) for _ in range(50))}
        if found is not None:
            looked_at |= {found - 1, found, found + 1} - {0}
        for tokens in looked_at:
            at = point(model, link, tokens)
            assert (at.fetch_s < at.recompute_s) == (found is not None and tokens >= found), (link, found, tokens)


@pytest.mark.parametrize(
    ("flags", "crossing_tokens", "told"),
    [
        ([], 49, "fetching is cheaper from 49 tokens on"),
        (["--latency-ms", "0"], 1, "always: fetching is cheaper at every length"),
        (["--link-gbps", "1"], None, "never: recomputing is cheaper at every length up to 131,072 tokens"),
        (["--link-gbps", "400"], 49, "fetching is cheaper from 49 tokens on"),
    ],
)
def test_the_report(
    flags: list[str], crossing_tokens: int | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "crossover.svg"
    assert main(["plan", "crossover", *flags, "--plot", str(svg)]) == 0
    assert capsys.readouterr().out.endswith(f"\n{told}\n")
    lines = ElementTree.parse(svg).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2
    assert main(["plan", "crossover", *flags, "--tokens", "1000,10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["crossing_tokens"] == crossing_tokens
    assert [each["tokens"] for each in found["points"]] == [1000, 10]


def test_one_length_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "one.svg"
    assert main(["plan", "crossover", "--tokens", "500", "--latency-ms", "0", "--plot", str(svg)]) == 0
    assert ElementTree.parse(svg).getroot() is not None


PUBLISHED = {
    ("recompute", 10_000): ("267", 276.34),
    ("copy to a GPU of the node, NVLink", 10_000): ("3.5", 3.54),
    ("copy to another node, InfiniBand NDR", 10_000): ("26", 26.21),
    ("copy to the CPU, PCIe Gen5", 10_000): ("23", 23.83),
    ("copy to the CPU, NVLink-C2C", 10_000): ("1.4", 1.46),
    ("load from local NVMe", 10_000): ("183", 187.25),
    ("load from a remote object store", 10_000): ("640", 655.36),
    ("recompute", 500): ("13", 11.74),
    ("copy to another node, InfiniBand NDR", 500): ("1.3", 1.31),
}


def test_the_published_example_to_the_digit(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed column is what its arithmetic gives, rounded as printed; the exact one stands beside it."""
    assert main(["plan", "crossover", "--as-published", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["operation"], row["tokens"]): row for row in found["rows"]}
    assert rows.keys() == PUBLISHED.keys()
    for name, (printed, exact) in PUBLISHED.items():
        assert rows[name]["published_ms"] == printed == as_printed(rows[name]["arithmetic_ms"])
        assert rows[name]["exact_ms"] == pytest.approx(exact, abs=0.005)
        assert "because" in rows[name]["difference"]
    remarks = " ".join(found["remarks"])
    for said in ("1.5 times faster", "53 ms", "from 42 tokens on", "47 ms against 267 ms", "1.84 GB of 2.10 GB"):
        assert said in remarks


def test_the_published_example_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "published.svg"
    assert main(["plan", "crossover", "--as-published", "--plot", str(svg)]) == 0
    assert len(ElementTree.parse(svg).getroot().findall("{http://www.w3.org/2000/svg}polyline")) == 4


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--link-gbps", "100", "--link-gigabytes-per-s", "12"], "--link-gbps: --link-gigabytes-per-s is given, too"),
        (["--link-gbps", "0"], "--link-gbps: expected a number above 0"),
        (["--link-gigabytes-per-s", "fast"], "--link-gigabytes-per-s: expected a number above 0"),
        (["--latency-ms", "-1"], "--latency-ms: expected a number of 0 or more"),
        (["--tflops", "inf"], "--tflops: expected a number above 0"),
        (["--tokens", "1k"], "--tokens: expected whole numbers"),
        (["--model", "no-such-file"], "--model: no-such-file is neither"),
        (["--as-published", "--tflops", "700"], "--tflops: --as-published has its own"),
        (["--as-published", "--model", "llama-3-70b"], "--model: --as-published has its own"),
    ],
)
def test_a_bad_flag_is_named_in_one_line(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "crossover", *flags]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"prefix-gateway: {told}") and output.err.count("\n") == 1


def test_as_a_process_it_loads_nothing_heavy() -> None:
    code = (
        "import sys; from gateway.cli import main; status = main(sys.argv[1:]);"
        "sys.exit(status or any(name in sys.modules for name in ('torch', 'numpy', 'httpx', 'zmq')))"
    )
    command = [sys.executable, "-c", code, "plan", "crossover", "--model", "llama-3-8b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "fetching is cheaper from 49 tokens on" in done.stdout
    failed = subprocess.run([*command, "--tflops", "0"], capture_output=True, text=True, timeout=60, check=False)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("prefix-gateway: --tflops: ")
