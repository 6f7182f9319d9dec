"""Gets the model ready before anything is started, so that its progress is seen and not logged three times."""

from __future__ import annotations

import subprocess
import sys

from gateway.demo.cluster import ClusterError


def prepare_model(model: str) -> None:
    """Build the model's directory in the user's cache if it is not there. Raises ClusterError."""
    arguments = [sys.executable, "-m", "replica_agent.reference.prepare", model]
    done = subprocess.run(arguments, check=False, start_new_session=True)
    if done.returncode:
        raise ClusterError(f"model {model!r} could not be prepared")
