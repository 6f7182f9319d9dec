"""The page about `plan` shows what its commands really print."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from kv_models import GPT_OSS_120B

from gateway.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
EXAMPLES = re.findall(r"^```console\n\$ prefix-gateway (.*)\n((?s:.*?))^```", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_an_example_of_the_page(
    command: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt-oss-120b").mkdir()
    Path("gpt-oss-120b/config.json").write_text(json.dumps(GPT_OSS_120B))
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_the_page_has_examples_of_both_plans() -> None:
    assert {command.split()[1] for command, _ in EXAMPLES} == {"splits", "crossover"}
