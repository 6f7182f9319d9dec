"""Benchmarks of what an agent does: `python -m replica_agent.bench --help`."""
