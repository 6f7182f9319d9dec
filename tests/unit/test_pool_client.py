"""The engine's end of the agent's socket, against an agent in a thread that does right or wrong."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from naive_agent import NaiveAgent

from kvstore import engine_messages as wire
from kvstore.board import CELLS
from replica_agent.engines import pool_client, pool_link
from replica_agent.engines.errors import PoolGone, PoolRefused
from replica_agent.engines.pool_client import PoolClient, Reserved
from replica_agent.engines.pool_link import PoolLink

DEADLINE_S = 30.0
BLOCK = 5000
KEYS = [bytes([number]) * 32 for number in range(4)]


def hello(**changes: object) -> wire.EngineHello:
    base: dict[str, object] = {
        "engine_id": "e",
        "role": "both",
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 1,
        "dtype": "float32",
        "layout": "test",
        "block_size": 16,
        "block_bytes": BLOCK,
        "hash_algorithm": "sha256",
        "identity": {},
    }
    return wire.EngineHello(**(base | changes))  # type: ignore[arg-type]


def until(condition: object) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


@pytest.fixture
def agent(path: Path) -> Iterator[NaiveAgent]:
    with NaiveAgent(path, slots=6) as agent:
        yield agent


@pytest.fixture
def client(agent: NaiveAgent) -> Iterator[PoolClient]:
    client = PoolClient(str(agent.path), hello())
    yield client
    client.close()


def save(client: PoolClient, keys: list[bytes], parent: bytes = b"") -> list[Reserved]:
    reserved = client.reserve(keys, parent)
    for key, slot in zip(keys, reserved, strict=True):
        assert slot is not None
        client.slot(slot.slot)[:] = key[:1] * BLOCK
    held = [slot for slot in reserved if slot is not None]
    assert client.commit(keys, held, [True] * len(keys)) == len(keys)
    return held


def test_bytes_written_to_a_slot_are_the_agents(agent: NaiveAgent, client: PoolClient) -> None:
    save(client, KEYS[:2])
    assert [agent.block(key) for key in KEYS[:2]] == [key[:1] * BLOCK for key in KEYS[:2]]
    assert client.reserve(KEYS[:3], b"")[:2] == [None, None], "held already"
    assert client.lookup("r", KEYS) == 2


def test_what_is_not_written_does_not_become_visible(agent: NaiveAgent, client: PoolClient) -> None:
    slots = [slot for slot in client.reserve(KEYS, b"") if slot]
    assert client.commit(KEYS, slots, [True, True, False, False]) == 2
    assert client.lookup("r", KEYS) == 2


def test_a_search_from_question_to_release(agent: NaiveAgent, client: PoolClient) -> None:
    slots = save(client, KEYS[:3])
    agent.pending = agent.loading = 1
    assert client.prepare("r", KEYS, 5, 200, None) == wire.Pending()
    assert client.poll("r") == wire.Accepted(blocks=3, deadline_s=30.0)
    assert client.poll("r") == wire.Loading()
    assert client.poll("r") == wire.Ready(slots=[each.slot for each in slots], generations=[1, 1, 1])
    client.release("r", 3, 0.25)
    assert agent.working == {}
    assert client.poll("r") == wire.Nothing(reason="missed")
    client.prepare("s", KEYS, 0, 200, None)
    client.cancel("s")
    client.failed("r", 2)
    assert agent.working == {}
    assert agent.asked[-1] == wire.Failed(request="r", blocks=2)


def test_clear_and_observe(agent: NaiveAgent, client: PoolClient) -> None:
    save(client, KEYS)
    client.observe(512, 131_328, 0.5)
    client.clear()
    assert client.lookup("r", KEYS) == 0
    assert wire.Observe(tokens=512, attended=131_328, seconds=0.5) in agent.asked


def test_no_agent_and_a_refusal_say_why(path: Path, agent: NaiveAgent) -> None:
    with pytest.raises(PoolGone, match="No such file"):
        PoolClient(f"{path}-not", hello())
    agent.refusal = "block_bytes: 5000, the pool is for 6000; restart the agent"
    with pytest.raises(PoolRefused, match="block_bytes: 5000"):
        PoolClient(str(path), hello())


@pytest.mark.parametrize("lie", [{"block_bytes": BLOCK + 1}, {"slots": 7}, {"slots": 0}, {"pitch": 4096}])
def test_a_welcome_that_would_have_other_memory_written_is_none(agent: NaiveAgent, lie: dict[str, int]) -> None:
    agent.welcome = lie
    with pytest.raises(PoolGone, match=r"block_bytes|slots"):
        PoolClient(str(agent.path), hello())


def test_a_slot_that_the_pool_does_not_have_ends_the_connection(client: PoolClient) -> None:
    for index in (6, -1):
        with pytest.raises(PoolGone, match=f"slot {index} of a pool of 6"):
            client.slot(index)
    assert client.closed


def test_a_cell_that_the_board_does_not_have_ends_the_connection(client: PoolClient) -> None:
    assert client.arrived(0) == 0
    for cell in (CELLS, -1):
        with pytest.raises(PoolGone, match=f"cell {cell} of a board of {CELLS}"):
            client.arrived(cell)
    assert client.closed


def test_a_verb_that_is_not_answered_ends_the_connection(agent: NaiveAgent, client: PoolClient) -> None:
    agent.silent.add(wire.Poll)
    with pytest.raises(PoolGone, match="Poll: timed out"):
        client.poll("r")
    assert client.closed
    agent.silent.clear()
    with pytest.raises(PoolGone, match="closed"):
        client.poll("r")


def test_an_answer_of_another_kind_ends_the_connection(
    agent: NaiveAgent, client: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_answer", lambda question: wire.Done())
    with pytest.raises(PoolGone, match="Lookup was answered with Done"):
        client.lookup("r", KEYS)
    assert client.closed


def test_an_agent_that_dies_is_noticed_without_asking(agent: NaiveAgent, client: PoolClient) -> None:
    view = client.slot(0)
    assert client.alive()
    agent.hang_up()
    until(lambda: not client.alive())
    view[:] = b"x" * BLOCK
    assert bytes(view[:3]) == b"xxx", "memory that somebody holds stays"


def unanswered(agent: NaiveAgent, client: PoolClient) -> tuple[threading.Thread, list[PoolGone]]:
    """A thread that waits for the answer to a commit, and where it leaves the error with which that ends."""
    agent.silent.add(wire.Commit)
    slots = [slot for slot in client.reserve(KEYS, b"") if slot]
    failures: list[PoolGone] = []

    def commit() -> None:
        with pytest.raises(PoolGone) as caught:
            client.commit(KEYS, slots, [True] * 4)
        failures.append(caught.value)

    thread = threading.Thread(target=commit)
    thread.start()
    until(lambda: agent.count(wire.Commit) == 1)
    return thread, failures


def test_closing_wakes_a_thread_that_waits_for_an_answer(agent: NaiveAgent, client: PoolClient) -> None:
    thread, failures = unanswered(agent, client)
    client.close()
    thread.join(timeout=pool_client.COMMIT_S / 2)
    assert failures


def test_a_verb_that_is_not_even_asked_ends_the_connection(agent: NaiveAgent, client: PoolClient) -> None:
    """What was to be released or cancelled by it would stay held until somebody hangs up."""
    thread, failures = unanswered(agent, client)
    with pytest.raises(PoolGone, match="Release: another question is still not answered"):
        client.release("r", 1, 0.0)
    thread.join(timeout=DEADLINE_S)
    assert (client.closed, len(failures)) == (True, 1)


def test_threads_that_ask_at_once_get_their_own_answers(agent: NaiveAgent, client: PoolClient) -> None:
    save(client, KEYS)
    wrong: list[object] = []

    def ask(count: int) -> None:
        for _ in range(200):
            if (found := client.lookup("r", KEYS[:count])) != count:
                wrong.append(found)

    threads = [threading.Thread(target=ask, args=(count,)) for count in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_link_connects_when_the_agent_comes_and_comes_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    link = PoolLink(str(path), hello())
    try:
        until(lambda: "no agent" in caplog.text)
        assert link.client is None
        for _ in range(2):
            with NaiveAgent(path):
                until(lambda: link.client is not None)
                assert link.client is not None
                link.client.lookup("r", KEYS)
            until(lambda: link.client is None)
        assert caplog.text.count("has gone") == 2
    finally:
        link.close()


def test_a_refusal_is_logged_once_and_not_asked_for_again_soon(
    agent: NaiveAgent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.refusal = "dtype: float32 here, bfloat16 there"
    link = PoolLink(str(agent.path), hello())
    until(lambda: "refuses this engine" in caplog.text)
    link.close()
    assert len(agent.hellos) == 1

    monkeypatch.setattr(pool_link, "_REFUSED_RETRY_S", 0.01)
    link = PoolLink(str(agent.path), hello())
    until(lambda: len(agent.hellos) > 5)
    link.close()
    assert caplog.text.count("refuses this engine") == 2, "once for each link"


def test_closing_a_link_does_not_wait_for_an_agent_that_hangs(agent: NaiveAgent) -> None:
    agent.silent.add(wire.EngineHello)
    link = PoolLink(str(agent.path), hello())
    until(lambda: agent.hellos)
    link.close()
    agent.hang_up()
    assert link.client is None


def test_importing_the_engine_side_loads_next_to_nothing() -> None:
    """It is imported into engines: their torch and web framework are none of its business, nor are its needs theirs."""
    code = (
        "import sys; import replica_agent.engines.pool_link\n"
        "heavy = {'torch', 'zmq', 'numpy', 'nixl', 'xxhash', 'aiohttp', 'httpx', 'starlette', 'asyncio'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
