"""What is only wrong between replicas: each may be fine alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.doctor.findings import DEPLOYMENT, Finding, Patient


def compare(patients: Sequence[Patient]) -> list[Finding]:
    """Findings about what should be alike, or all there, and is not. What is not known of a replica is left out."""
    return [*_models(patients), *_block_sizes(patients), *_namespaces(patients), *_ranks(patients), *_agents(patients)]


def _found(code: str, message: str, fix: str, *, note: bool = False) -> Finding:
    return Finding(where=DEPLOYMENT, code=code, message=message, fix=fix, note=note)


def _by_model(patients: Sequence[Patient]) -> dict[str, list[Patient]]:
    """Replicas that may be asked for the same, by their base model."""
    groups: dict[str, list[Patient]] = {}
    for patient in patients:
        if patient.models:
            groups.setdefault(patient.models[0], []).append(patient)
    return groups


def _models(patients: Sequence[Patient]) -> Iterator[Finding]:
    groups = _by_model(patients)
    if len(groups) > 1:
        served = "; ".join(f"{model} by {_ids(group)}" for model, group in groups.items())
        fix = "engines: --served-model-name, alike, if they are meant to be replicas of one model"
        yield _found("models", f"replicas serve different models: {served}", fix, note=True)


def _block_sizes(patients: Sequence[Patient]) -> Iterator[Finding]:
    for model, group in _by_model(patients).items():
        sizes: dict[int, list[Patient]] = {}
        for patient in group:
            if patient.block_size:
                sizes.setdefault(patient.block_size, []).append(patient)
        if len(sizes) > 1:
            found = "; ".join(f"{size} tokens on {_ids(those)}" for size, those in sorted(sizes.items()))
            message = f"block sizes of {model} differ, so that their blocks have different names: {found}"
            yield _found("block_sizes", message, "vLLM: --block-size, SGLang: --page-size, all alike")


def _namespaces(patients: Sequence[Patient]) -> Iterator[Finding]:
    for model, group in _by_model(patients).items():
        pooled = [(patient, patient.hello.namespace) for patient in group if patient.hello is not None]
        known = [(patient, namespace) for patient, namespace in pooled if namespace is not None]
        for patient, namespace in known[1:]:
            first, reference = known[0]
            if differences := reference.differences(namespace):
                message = (
                    f"KV of {model} does not fit: {first.replica.id} and {patient.replica.id} differ in "
                    + "; ".join(differences)
                )
                yield _found("namespace", message, _alike(differences))


def _alike(differences: Sequence[str]) -> str:
    named = {difference.partition(":")[0] for difference in differences}
    fixes = {
        "hash_algorithm": "vLLM: --prefix-caching-hash-algo, all alike",
        "hash_seed": "PYTHONHASHSEED of the engines, all alike or all unset",
        "block_size": "vLLM: --block-size, all alike",
        "dtype": "vLLM: --dtype and --kv-cache-dtype, all alike",
        "vllm": "one version of vLLM",
        "weights": "one revision of the model",
    }
    found = [fix for name, fix in fixes.items() if name in named]
    return "; ".join(found) or "start the engines alike"


def _ranks(patients: Sequence[Patient]) -> Iterator[Finding]:
    """Data-parallel ranks behind one URL that no replica, or no agent, stands for."""
    engines: dict[str, list[Patient]] = {}
    for patient in patients:
        engines.setdefault(str(patient.replica.engine), []).append(patient)
    for url, group in engines.items():
        ranks = set().union(*(patient.sources or {} for patient in group))
        if len(ranks) > 1:
            covered = {patient.replica.dp_rank for patient in group}
            missing = ", ".join(str(rank) for rank in sorted(ranks - covered))
            if missing:
                message = f"{url} has {len(ranks)} data-parallel ranks, and no replica is rank {missing}"
                fix = "gateway: a replica for each rank, with its dp_rank and an agent of its own"
                yield _found("dp_ranks", message, fix)
        alone = [patient for patient in group if patient.replica.dp_rank is not None and patient.replica.agent is None]
        if alone and len(alone) < len(group):
            fix = "an agent for each rank: --dp-rank N, and --kv-events with N added to the port"
            yield _found("dp_agents", f"{_ids(alone)} of {url} have no agent, its other ranks have", fix)


def _agents(patients: Sequence[Patient]) -> Iterator[Finding]:
    agents: dict[str, list[Patient]] = {}
    for patient in patients:
        if patient.replica.agent is not None:
            agents.setdefault(str(patient.replica.agent), []).append(patient)
    for url, group in agents.items():
        if len(group) > 1:
            yield _found("agent_shared", f"{_ids(group)} have one agent, {url}", "an agent for each replica")


def _ids(patients: Sequence[Patient]) -> str:
    return ", ".join(patient.replica.id for patient in patients)
