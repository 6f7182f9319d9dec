"""The page about `replay` shows what its commands really print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from replay_support import trace

from gateway.cli import main
from gateway.replay.policies import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
EXAMPLES = re.findall(r"^```console\n\$ prefix-gateway (.*)\n((?s:.*?))^```", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_an_example_of_the_page(
    command: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)
    Path(arguments[1]).symlink_to(trace(arguments[1].removesuffix(".jsonl.gz")))
    assert main(arguments) == 0
    assert capsys.readouterr().out == shown


def test_the_page_has_examples_and_names_every_policy() -> None:
    assert len(EXAMPLES) == 3
    assert set(NAMES) <= set(re.findall(r"`([^`\s]+)`", PAGE.partition("## The policies")[2]))
