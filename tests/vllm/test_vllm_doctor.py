"""A real vLLM started without the flags that routing needs: the doctor names each of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import pytest
from agent_support import agent_running, until
from vllm_deployment import COMMAND
from vllm_engine import agent_settings
from vllm_models import model_directory
from vllm_server import VllmServer

pytestmark = pytest.mark.vllm


def findings(*flags: str) -> dict[str, dict[str, Any]]:
    """What `prefix-gateway doctor` finds, by code."""
    done = subprocess.run([COMMAND, "doctor", "--json", *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    return {finding["code"]: finding for finding in json.loads(done.stdout)["findings"]}


async def test_what_is_missing_is_named_with_its_flag() -> None:
    with VllmServer(
        model_directory("tiny"),
        kv_tokens=4096,
        events=False,
        flags=["--no-enable-prefix-caching", "--no-enable-prompt-tokens-details"],
    ) as server:
        server.start()
        server.wait_ready()
        alone = findings("--engine", server.url)
        assert alone["prompt_tokens_details"]["fix"].startswith("vLLM: --enable-prompt-tokens-details")
        assert alone["prefix_caching_off"]["fix"] == "vLLM: --enable-prefix-caching"
        async with agent_running(agent_settings(server)) as (replica, url):
            await until(lambda: replica.engine_state().up)
            beside = await asyncio.to_thread(findings, "--engine", server.url, "--agent", url)
            assert beside.keys() >= {"prompt_tokens_details", "prefix_caching_off", "pool_off"}
