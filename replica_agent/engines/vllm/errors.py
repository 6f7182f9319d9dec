"""Every exception this package raises.

PoolUnusable    this engine, as it is configured, cannot exchange blocks of KV; names the setting
"""

from __future__ import annotations


class PoolUnusable(Exception):
    """This engine cannot exchange blocks with others. It runs on without; the message names what stands in the way.

    Only a vLLM of another version ends with it, as not even the connector's class may be possible there."""
