"""What an agent says of itself, of its engine, and of what it finds wrong there."""

from __future__ import annotations

import httpx
import msgspec

from gateway.doctor.findings import Patient
from kvstore.errors import ProtocolError
from kvstore.identity import Namespace
from kvstore.messages import Problem, decode_hello

NO_AGENT = "no agent: its requests are routed by hash, whatever its cache holds"


class _Health(msgspec.Struct):
    replica_id: str
    problems: list[Problem]


class AgentCheck:
    """Asks agents with the gateway's token; they must have its route seed."""

    def __init__(self, client: httpx.AsyncClient, *, token: str, route_seed: int, timeout_s: float) -> None:
        self._client = client
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._seed_check = Namespace("").root(route_seed)
        self._timeout_s = timeout_s

    async def examine(self, patient: Patient) -> None:
        """Fills in what the agent says, and passes on what it finds."""
        agent = patient.replica.agent
        if agent is None:
            fix = "run `prefix-gateway agent` beside the engine, and give the replica its URL as agent"
            patient.report("no_agent", NO_AGENT, fix, note=True)
            return
        try:
            health = await self._client.get(agent.join("/health"), timeout=self._timeout_s)
            hello = await self._client.get(agent.join("/v1/hello"), headers=self._headers, timeout=self._timeout_s)
        except httpx.HTTPError as error:
            fix = "start the agent, or correct the replica's agent"
            patient.report("agent_down", f"the agent at {agent}: {type(error).__name__}: {error}", fix)
            return
        try:
            for problem in msgspec.json.decode(health.content, type=_Health).problems:
                patient.pass_on(problem)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            fix = "correct the replica's agent; update gateway and agents together"
            patient.report("agent_unknown", f"what answers at {agent} is no agent of this version", fix)
            return
        patient.agent_answers = True
        if hello.status_code == 401:
            fix = "gateway: PREFIX_GATEWAY_AGENT_TOKEN with the agents' REPLICA_AGENT_TOKEN, or their --token-file"
            patient.report("agent_token", f"the agent at {agent} refuses the gateway's token", fix)
        elif hello.status_code == 403:
            fix = "gateway: tls.cert_file and tls.key_file, of the authority that is the agent's --tls-ca-file"
            patient.report("agent_tls", f"the agent at {agent} asks for the gateway's certificate", fix)
        elif hello.status_code == 200:
            self._introduced(patient, hello.content)

    def _introduced(self, patient: Patient, raw: bytes) -> None:
        replica = patient.replica
        try:
            hello = decode_hello(raw)
        except ProtocolError as error:
            fix = "update gateway and agents together"
            patient.report("agent_protocol", f"the agent's /v1/hello cannot be read: {error}", fix)
            return
        patient.hello = hello
        patient.engine, patient.version = hello.engine, hello.engine_version
        patient.block_size = hello.block_size
        if hello.replica_id != replica.id:
            message = f"the agent at {replica.agent} says it is {hello.replica_id!r}"
            patient.report("agent_id", message, f"agent: --replica-id {replica.id}; or correct the replica's agent")
        if hello.route_seed_check != self._seed_check:
            fix = "agent: --route-seed, gateway: placement.route_seed, all alike"
            patient.report("route_seed", "the agent has another route seed: no key of it is ever found", fix)
        if replica.dp_rank is not None and hello.dp_rank != replica.dp_rank:
            message = f"the agent speaks for data-parallel rank {hello.dp_rank}, the replica is rank {replica.dp_rank}"
            patient.report("agent_rank", message, f"agent: --dp-rank {replica.dp_rank}; or the replica's dp_rank")
        if patient.models and not set(hello.models) & set(patient.models):
            served, seen = ", ".join(patient.models), ", ".join(hello.models)
            message = f"the agent watches an engine that serves {seen}, the replica's serves {served}"
            patient.report("agent_engine", message, "agent: --engine, or the replica's agent")
        if hello.namespace is not None and hello.namespace.block_size != hello.block_size:
            message = f"blocks have {hello.block_size} tokens, in the KV pool {hello.namespace.block_size}"
            patient.report("pool_block_size", message, "agent: --engine and --kv-socket of one and the same engine")
