"""Every exception this package raises.

PoolGone            the agent's pool cannot be used: not there, hung up, too slow, or not speaking the protocol
└── PoolRefused     the agent is there and refuses this engine; says why
"""

from __future__ import annotations


class PoolGone(Exception):
    """The agent's pool cannot be used any more through this connection, which is closed."""


class PoolRefused(PoolGone):
    """The agent refuses this engine: the message is its reason, which names the field."""
