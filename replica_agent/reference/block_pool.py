"""Which block holds what: allocation, sharing, prefix lookup and least-recently-used reuse of KV blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.identity import wire_block_hash
from replica_agent.reference.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event


class CachedBlock(NamedTuple):
    """What a reusable block holds; `parent` is None for the first block of a prompt."""

    hash: bytes
    parent: bytes | None
    tokens: tuple[int, ...]


class BlockPool:
    """Owns every block's reference count and content, the free queue, and the table of reusable blocks.

    The compute thread alone may call it. Block ids from `lookup` are valid until the next `allocate`; from `acquire`
    and `allocate` until they are released. A free block keeps its content, and can be hit, until `allocate` takes it:
    least recently released first. Equal hashes may be held by several blocks; each is announced and removed by itself.

    Changes of what is reusable collect as events, in order, until `drain`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.generation = 0
        """Number of `clear`s: blocks computed under an older one must not be stored."""
        self.versions = [0] * num_blocks
        """How often each block has been allocated. Any thread may read it: a copy of a block whose version is unchanged
        afterwards is of one piece."""
        self._refs = [0] * num_blocks
        self._content: list[CachedBlock | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._table: dict[bytes, OrderedDict[int, None]] = {}
        self._events: list[Event] = []

    @property
    def free(self) -> int:
        """Blocks that no sequence uses, reusable content or not."""
        return len(self._free)

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest run of `hashes`, from the first on, that is held. Changes nothing."""
        found = []
        for block_hash in hashes:
            copies = self._table.get(block_hash)
            if copies is None:
                break
            found.append(next(iter(copies)))
        return found

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are in the free queue, and so leave it when acquired. Changes nothing."""
        return sum(self._refs[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take a share in held blocks (from `lookup`)."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks to be written, evicting their content. The caller has checked `free`."""
        assert count <= len(self._free), f"allocate {count} of {len(self._free)} free blocks"
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            content = self._content[block]
            if content is not None:
                self._forget(block, content)
                self._events.append(BlockRemoved(block_hashes=[wire_block_hash(content.hash)]))
            self._refs[block] = 1
            self.versions[block] += 1
            taken.append(block)
        return taken

    def store(self, blocks: Sequence[int], contents: Sequence[CachedBlock], salt: str | None = None) -> None:
        """Make computed blocks reusable: a run of consecutive blocks of one sequence, each full and in use.

        `salt` is the request's, and is told only with the first block of a prompt, whose hash alone contains it.
        """
        if not blocks:
            return
        for block, content in zip(blocks, contents, strict=True):
            assert self._refs[block] > 0, f"block {block} is stored while nobody uses it"
            assert self._content[block] is None, f"block {block} is stored twice"
            self._content[block] = content
            self._table.setdefault(content.hash, OrderedDict())[block] = None
        first = contents[0].parent
        extra: list[list[str] | None] = [None] * len(contents)
        if first is None and salt is not None:
            extra[0] = [salt]
        self._events.append(
            BlockStored(
                block_hashes=[wire_block_hash(content.hash) for content in contents],
                parent_block_hash=None if first is None else wire_block_hash(first),
                token_ids=[token for content in contents for token in content.tokens],
                block_size=self.block_size,
                extra_keys=extra,
            )
        )

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a sequence's blocks, in its order. Tails are queued before heads, so that they are reused first."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._content[block] is None:
                    # Nothing to lose: taken before anything that could still be hit.
                    self._free.move_to_end(block, last=False)

    def clear(self) -> None:
        """Forget all content, also of blocks in use; their sequences go on, but must store nothing any more."""
        self._content = [None] * self.num_blocks
        self._table.clear()
        self.generation += 1
        self._events.append(AllBlocksCleared())

    def drain(self) -> list[Event]:
        """Events since the last call, in the order in which they must be applied."""
        events, self._events = self._events, []
        return events

    def cached(self) -> list[tuple[CachedBlock, int, int]]:
        """Every distinct reusable block: (content, copies, references over all copies)."""
        result = []
        for copies in self._table.values():
            content = self._content[next(iter(copies))]
            assert content is not None
            result.append((content, len(copies), sum(self._refs[block] for block in copies)))
        return result

    def content(self, block: int) -> CachedBlock | None:
        """What a block holds, None when nothing reusable."""
        return self._content[block]

    def references(self) -> list[int]:
        """References of every block, by id: a copy, for checks."""
        return list(self._refs)

    def check(self) -> None:
        """Conservation: every block is free or referenced, never both; the table is exactly the blocks' contents."""
        for block, refs in enumerate(self._refs):
            assert refs >= 0, f"block {block} has {refs} references"
            assert (refs == 0) == (block in self._free), f"block {block}: {refs} references, free {block in self._free}"
        listed = {block: block_hash for block_hash, copies in self._table.items() for block in copies}
        held = {block: content.hash for block, content in enumerate(self._content) if content is not None}
        assert listed == held, f"table and contents differ in {set(listed.items()) ^ set(held.items())}"
        assert all(self._table.values()), "a hash is listed without a block"

    def _forget(self, block: int, content: CachedBlock) -> None:
        copies = self._table[content.hash]
        del copies[block]
        if not copies:
            del self._table[content.hash]
        self._content[block] = None
