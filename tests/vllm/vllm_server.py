"""One real vLLM server as a process tree that never outlives the tests.

Its processes (API server, engine cores, workers) share one session. A leash, a process of its own, holds the reading
end of a pipe from here: should the tests be killed in whatever way, the pipe ends and the leash kills that session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx
import vllm_env
from loopback_ports import HOST, adjacent_ports
from vllm_models import kv_bytes_per_token

READY_S = 300.0
STOP_S = 30.0
BLOCK = 128
"""Tokens in a block: vLLM's choice on a CPU."""

_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_LEASH = "import sys, vllm_server; sys.stdin.read(); vllm_server.kill_session(int(sys.argv[1]))"


class VllmServer:
    """A vLLM server on ports of its own, by default with KV events and their replay; leaving the context stops it.

    Owns the process tree and its log. `restart` brings up another life at the same ports. `ranks` data-parallel engines
    publish at `events(rank)`; each tensor-parallel worker of `tp` has its share of the heads. `kv_tokens` is the size
    of the KV cache and bounds a prompt. `core` is where the first of them computes, e.g. "0" or "0|1" (a core a rank).
    """

    def __init__(
        self,
        model: Path,
        *,
        name: str = "tiny",
        kv_tokens: int = 16_384,
        dtype: str = "float32",
        core: str = "auto",
        tp: int = 1,
        ranks: int = 1,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        events: bool = True,
        replay: bool = True,
        dev_mode: bool = False,
    ) -> None:
        self.model = model
        self.name = name
        self.ranks = ranks
        first = adjacent_ports(1 + 2 * ranks)
        self.port, self.events_port, self.replay_port = first, first + 1, first + 1 + ranks
        self._events, self._replay = events, replay
        self._logs = tempfile.TemporaryDirectory(prefix="prefix-gateway-vllm-")
        self._process: subprocess.Popen[bytes] | None = None
        self._leash: subprocess.Popen[bytes] | None = None
        kv_bytes = (kv_tokens + BLOCK) * kv_bytes_per_token(model, _ITEMSIZE[dtype]) // tp
        self._flags = [
            *("--model", str(model), "--served-model-name", name, "--host", HOST, "--port", str(self.port)),
            *("--dtype", dtype, "--max-model-len", str(min(kv_tokens, 8192 if name == "smollm2" else 16_384))),
            *("--kv-cache-memory-bytes", str(kv_bytes), "--enforce-eager", "--enable-prompt-tokens-details"),
            *(("--tensor-parallel-size", str(tp)) if tp > 1 else ()),
            *(("--data-parallel-size", str(ranks)) if ranks > 1 else ()),
            *(("--kv-events-config", self._events_config()) if events else ()),
            *flags,
        ]
        self._environ = {key: value for key, value in os.environ.items() if key != "VLLM_CPU_KVCACHE_SPACE"} | {
            "PYTHONPATH": str(vllm_env.CHECKOUT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": self._logs.name,  # its sockets, which it leaves behind when it is killed
            "VLLM_CPU_OMP_THREADS_BIND": core,
            **({"VLLM_SERVER_DEV_MODE": "1"} if dev_mode else {}),
            **(env or {}),
        }

    def _events_config(self) -> str:
        replay = f', "replay_endpoint": "tcp://*:{self.replay_port}"' if self._replay else ""
        endpoint = f'"endpoint": "tcp://*:{self.events_port}"'
        return f'{{"enable_kv_cache_events": true, "publisher": "zmq", {endpoint}{replay}}}'

    @property
    def url(self) -> str:
        """The server's address, without `/v1`."""
        return f"http://{HOST}:{self.port}"

    def events(self, rank: int = 0) -> str:
        """Where a rank publishes its KV events."""
        return f"tcp://{HOST}:{self.events_port + rank}"

    def replay(self, rank: int = 0) -> str:
        """Where a rank replays them."""
        return f"tcp://{HOST}:{self.replay_port + rank}"

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._logs.cleanup()

    def start(self) -> None:
        """Start it; several may be started before the first is waited for."""
        assert self._process is None, "it runs already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(vllm_env.python()), "-m", "vllm.entrypoints.openai.api_server", *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                cwd=self._logs.name,
                start_new_session=True,
            )
        self._leash = subprocess.Popen(
            [sys.executable, "-c", _LEASH, str(self._process.pid)],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parent,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(map(str, (vllm_env.CHECKOUT, *Path(__file__).parents[:2])))},
            start_new_session=True,
        )

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until it answers requests. Fails with the end of the log when it ends or takes longer."""
        assert self._process is not None, "not started"
        deadline = time.monotonic() + timeout_s
        while not self._is_healthy():
            assert self._process.poll() is None, f"vLLM ended with {self._process.returncode}:\n{self.log(300)}"
            assert time.monotonic() < deadline, f"vLLM not ready within {timeout_s:g} s:\n{self.log()}"
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        """Stop it as an operator would; what is left after a while is killed."""
        if self._process is not None:
            self.send(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                pass
            self.kill()

    def kill(self) -> None:
        """kill -9 of everything: no one says goodbye."""
        if self._process is None:
            return
        kill_session(self._process.pid)
        self._process.wait()
        assert self._leash is not None and self._leash.stdin is not None
        self._leash.stdin.close()
        self._leash.wait()
        self._process = self._leash = None

    def restart(self) -> None:
        """Another life at the same ports, once it is ready."""
        self.kill()
        self.start()
        self.wait_ready()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process of the server: SIGSTOP freezes it, SIGCONT lets it go on."""
        assert self._process is not None, "not started"
        for pid in session_members(self._process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    @property
    def pids(self) -> list[int]:
        """Its processes that are alive."""
        return [] if self._process is None else session_members(self._process.pid)

    @property
    def _log(self) -> Path:
        return Path(self._logs.name) / "vllm.log"

    def log(self, lines: int = 60) -> str:
        """The end of what it said, all lives together."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def start_servers(servers: Sequence[VllmServer]) -> None:
    """All of them at once, and until each is ready."""
    for server in servers:
        server.start()
    for server in servers:
        server.wait_ready()


def session_members(session: int) -> list[int]:
    """Living processes whose session this is."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members


def kill_session(session: int) -> None:
    """kill -9 of every process of a session, also of those that they start meanwhile; returns when all are gone."""
    while members := session_members(session):
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)
