"""KV events over real sockets."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
import zmq
import zmq.asyncio
from reference_support import ANY_PORT, DEADLINE_S, replay

from replica_agent.reference.errors import PortTakenError, StartError
from replica_agent.reference.publisher import EventPublisher
from replica_agent.reference.wire import AllBlocksCleared, BlockRemoved, BlockStored


def stored(number: int) -> BlockStored:
    return BlockStored(
        block_hashes=[number], parent_block_hash=None, token_ids=[1, 2], block_size=2, extra_keys=[["salt"]]
    )


async def test_live_batches_have_vllms_frames_and_maps() -> None:
    with zmq.asyncio.Context() as context, EventPublisher(ANY_PORT, topic="kv", clock=lambda: 12.5) as publisher:
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(publisher.endpoint)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv")
        frames: list[bytes] = []
        number = -1
        # A subscription takes a moment: publish until one arrives.
        while not frames:
            number += 1
            publisher.publish([stored(2**64 - 1), BlockRemoved(block_hashes=[7]), AllBlocksCleared()])
            if await subscriber.poll(20):
                frames = await subscriber.recv_multipart()
        subscriber.close(linger=0)
    assert frames[0] == b"kv"
    assert len(frames) == 3
    assert 0 <= int.from_bytes(frames[1], "big") <= number
    assert len(frames[1]) == 8
    assert msgspec.msgpack.decode(frames[2]) == [
        12.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [2**64 - 1],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["salt"]],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


async def wait_replay(context: zmq.asyncio.Context, endpoint: str, start: int, last: int) -> list[int]:
    """Numbers of a replay, asked again until it reaches batch `last`."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            numbers = [number for number, _ in await replay(context, endpoint, start)]
            if numbers and numbers[-1] == last:
                return numbers


async def test_replay_begins_where_asked_and_ends_with_a_marker() -> None:
    with zmq.asyncio.Context() as context, EventPublisher(ANY_PORT, ANY_PORT) as publisher:
        assert publisher.replay_endpoint is not None
        assert await replay(context, publisher.replay_endpoint) == []
        for number in range(10):
            publisher.publish([stored(number)])
        assert await wait_replay(context, publisher.replay_endpoint, 0, 9) == list(range(10))
        assert await wait_replay(context, publisher.replay_endpoint, 7, 9) == [7, 8, 9]
        assert await replay(context, publisher.replay_endpoint, 10) == []


async def test_only_the_last_batches_are_kept() -> None:
    with (
        zmq.asyncio.Context() as context,
        EventPublisher(ANY_PORT, ANY_PORT, buffer_steps=4) as publisher,
    ):
        assert publisher.replay_endpoint is not None
        for number in range(10):
            publisher.publish([stored(number)])
        assert await wait_replay(context, publisher.replay_endpoint, 0, 9) == [6, 7, 8, 9]


async def test_a_long_replay_is_complete() -> None:
    with zmq.asyncio.Context() as context, EventPublisher(ANY_PORT, ANY_PORT) as publisher:
        assert publisher.replay_endpoint is not None
        for number in range(3000):
            publisher.publish([stored(number)])
        assert await wait_replay(context, publisher.replay_endpoint, 0, 2999) == list(range(3000))


async def test_garbage_on_the_replay_socket_is_ignored() -> None:
    with zmq.asyncio.Context() as context, EventPublisher(ANY_PORT, ANY_PORT) as publisher:
        assert publisher.replay_endpoint is not None
        socket = context.socket(zmq.DEALER)
        socket.connect(publisher.replay_endpoint)
        for frames in ([b"x"], [b"", b"short"], [b"", b"12345678", b"more", b"more"]):
            await socket.send_multipart(frames)
        assert await replay(context, publisher.replay_endpoint) == []
        socket.close(linger=0)


async def test_a_full_queue_drops_and_leaves_a_gap() -> None:
    with zmq.asyncio.Context() as context, EventPublisher(ANY_PORT, ANY_PORT, max_queue=0) as publisher:
        assert publisher.replay_endpoint is not None
        publisher.publish([stored(0)])
        publisher.publish([stored(1)])
        assert publisher.dropped == 2
        assert await replay(context, publisher.replay_endpoint) == []


@pytest.mark.parametrize("which", ["events", "replay"])
def test_a_taken_port_names_its_flag_and_leaves_nothing(which: str) -> None:
    before = threading.active_count()
    with EventPublisher(ANY_PORT, ANY_PORT) as publisher:
        if which == "events":
            with pytest.raises(PortTakenError, match=r"port \d+ is taken: choose another with --kv-events-endpoint"):
                EventPublisher(publisher.endpoint)
        else:
            with pytest.raises(PortTakenError, match="--kv-replay-endpoint"):
                EventPublisher(ANY_PORT, publisher.replay_endpoint)
    assert threading.active_count() == before


def test_a_bad_endpoint_names_its_flag() -> None:
    with pytest.raises(StartError, match="--kv-events-endpoint nonsense"):
        EventPublisher("nonsense")
