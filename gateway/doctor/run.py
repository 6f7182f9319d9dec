"""One examination: all replicas at once, then what is between them."""

from __future__ import annotations

import asyncio

from gateway.doctor.agent_check import AgentCheck
from gateway.doctor.comparison import compare
from gateway.doctor.engine_check import EngineCheck
from gateway.doctor.findings import Patient
from gateway.doctor.report import Diagnosis, diagnose
from gateway.fleet.agent_access import agent_access, agent_client
from gateway.fleet.engine_access import engine_accesses
from gateway.fleet.engine_http import EngineHttp
from gateway.fleet.replica import Replica
from gateway.settings import Settings


def examine(settings: Settings, *, probe: bool, timeout_s: float) -> Diagnosis:
    """Looks at the deployment that a gateway with these settings would serve. Raises SettingsError."""
    return asyncio.run(examine_all(settings, probe=probe, timeout_s=timeout_s))


async def examine_all(settings: Settings, *, probe: bool, timeout_s: float) -> Diagnosis:
    """The same, on a running event loop."""
    accesses = engine_accesses(settings)
    patients = [Patient(Replica(each, accesses[each.id])) for each in settings.replicas]
    engines = EngineHttp()
    try:
        async with agent_client(agent_access(settings)) as client:
            engine_check = EngineCheck(engines, probe=probe, timeout_s=timeout_s)
            agent_check = AgentCheck(
                client,
                token=settings.agent_token,
                route_seed=settings.placement.route_seed,
                timeout_s=timeout_s,
            )

            async def one(patient: Patient) -> None:
                await engine_check.examine(patient)
                await agent_check.examine(patient)

            await asyncio.gather(*map(one, patients))
    finally:
        await engines.close()
    return diagnose(patients, compare(patients))
