"""Deployments of real processes on free ports."""

from __future__ import annotations

from loopback_ports import free_ports

from gateway.demo.cluster import Cluster, ClusterOptions, Ports

READY_S = 120.0


def tiny_cluster(
    *, replicas: int = 3, kv_tokens: int = 16_384, engine_flags: tuple[str, ...] = (), pool_bytes: int = 0
) -> Cluster:
    """A deployment of the tiny model on free ports, not started yet; with `pool_bytes` each agent has a pool of KV."""
    ports = free_ports(2 + 4 * replicas)
    each = [ports[2 + n * replicas : 2 + (n + 1) * replicas] for n in range(4)]
    return Cluster(
        ClusterOptions(
            ports=Ports(ports[0], ports[1], *each),
            model="tiny",
            served_name="tiny",
            kv_tokens=kv_tokens,
            engine_flags=("--threads", "1", "--dtype", "float32", *engine_flags),
            pool_bytes=pool_bytes,
            log_level="info",
        )
    )
