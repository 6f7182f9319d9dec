"""What an agent says of a fetch."""

from __future__ import annotations

from typing import Any

from kvstore.messages import FetchOutcome, FetchRecord


def record(**fields: Any) -> FetchRecord:
    """Ten blocks of 100 bytes from replica-0 to replica-1: 50 ms, expected 40, recomputing 400 and the rest 20."""
    plain: dict[str, Any] = {
        "request": "engine-1",
        "gateway_request": "id-1",
        "at": 1000.0,
        "replica": "replica-1",
        "source": "replica-0",
        "transport": "shm",
        "outcome": FetchOutcome.FETCHED,
        "reason": "",
        "block_tokens": 16,
        "block_bytes": 100,
        "asked": 10,
        "own": 0,
        "moved": 10,
        "loaded": 10,
        "failed": 0,
        "predicted_fetch_s": 0.04,
        "predicted_rest_s": 0.02,
        "predicted_recompute_s": 0.4,
        "decide_s": 0.001,
        "lease_s": 0.002,
        "move_s": 0.03,
        "verify_s": 0.01,
        "confirm_s": 0.002,
        "copy_s": 0.005,
        "total_s": 0.05,
    }
    return FetchRecord(**plain | fields)
