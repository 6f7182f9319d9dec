"""The versions of vLLM that the connector is for. Imports nothing of vLLM: another one may lack what the rest names."""

from __future__ import annotations

import re

from replica_agent.engines.vllm.errors import PoolUnusable

MINORS = range(30, 34)
"""Of vLLM 0.x: the versions whose sources were compared."""


def minor_version(version: str) -> str:
    """ "0.32" of "0.32.0+cpu". Raises PoolUnusable for a version that this connector was not made for."""
    match = re.match(r"0\.(\d+)(?:\.|$)", version)
    if match is None or int(match[1]) not in MINORS:
        raise PoolUnusable(f"vllm: this connector is for 0.{MINORS[0]} to 0.{MINORS[-1]}, not {version}")
    return f"0.{match[1]}"
