"""In which order a replica's cache will give up its blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence


class Segment:
    """Blocks of one chain that were used together at time `at`, and by nothing since.

    `keys` are those of the blocks from depth `depth` on, in blocks; `head` is the first of them. `given` ones were
    given up to a peer.
    """

    __slots__ = ("at", "depth", "given", "head", "keys")

    def __init__(self, keys: Sequence[int], depth: int, at: float) -> None:
        self.keys = keys
        self.head = keys[0]
        self.depth = depth
        self.at = at
        self.given = False

    def __len__(self) -> int:
        return len(self.keys)

    def common(self, path: Sequence[int]) -> int:
        """How many of its blocks are on a path that begins at depth 0."""
        keys, depth = self.keys, self.depth
        most = min(len(keys), len(path) - depth)
        if most <= 0 or path[depth] != self.head:
            return 0
        if keys[most - 1] == path[depth + most - 1]:
            return most
        # Keys are chained: where they are equal, all before them are.
        return bisect_left(range(most), True, key=lambda at: keys[at] != path[depth + at])


class EvictionOrder:
    """The LRU of one replica's cache, tails before heads, as far as it is known what was used there.

    A prompt is one `Segment`, the youngest, when it is used; what it has in common with older ones is cut off those.
    So there are few of them, however many blocks, and the end of the order is looked at without touching the rest. All
    blocks of a path are held if its last one is, so on a path a segment begins where an older one was cut; but once
    something that a peer took over is gone, or something out of turn, what others had after it may be left.

    Owns the segments, oldest first but for what a peer took over, which stands before them, and finds them by the keys
    of their first and last blocks; `blocks` is their size in sum. Keys are those of whole engine blocks. Only `use`,
    `give_up`, `drop`, `shrink` and `clear` change it, and count their `changes`.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.changes = 0
        self._order: OrderedDict[Segment, None] = OrderedDict()
        self._heads: dict[int, Segment] = {}
        self._tails: dict[int, Segment] = {}
        self._torn = False

    def __iter__(self) -> Iterator[Segment]:
        """Segments, the first to go first; of each the last block goes first."""
        return iter(self._order)

    def path(self, keys: Sequence[int]) -> Iterator[tuple[Segment, int]]:
        """The segments that a prompt's path leads through, and how many blocks of each."""
        depth, heads = 0, self._heads
        while depth < len(keys):
            segment = heads.get(keys[depth])
            if segment is None or segment.depth != depth:
                return
            common = segment.common(keys)
            yield segment, common
            depth += common

    def held(self, keys: Sequence[int]) -> int:
        """How many blocks of a path are in the order, from its beginning on."""
        return sum(common for _, common in self.path(keys))

    def ending(self, key: int) -> Segment | None:
        """The segment of which this block is the last one."""
        return self._tails.get(key)

    def use(self, keys: Sequence[int], at: float) -> None:
        """A prompt with these blocks is used."""
        if not keys:
            return
        self.changes += 1
        for segment, common in list(self._parts(keys)):
            self._unlink(segment)
            self.blocks -= common
            if common == len(segment):
                del self._order[segment]
            else:
                segment.keys = segment.keys[common:]
                segment.head = segment.keys[0]
                segment.depth += common
                self._link(segment)
        youngest = Segment(keys, 0, at)
        self._order[youngest] = None
        self._link(youngest)
        self.blocks += len(keys)

    def give_up(self, keys: Sequence[int], keep: int) -> None:
        """A peer has read this path and takes over: what one prompt used last of it goes next, but for the first `keep`
        blocks of the path. What else that prompt had after them cannot be used without them, and goes, too.

        It keeps the time of its last use, which tells how long conversations pause.
        """
        path = list(self.path(keys))
        if not path:
            return
        given, _ = path[-1]
        staying = max(0, keep - given.depth)
        if given.given or staying >= len(given.keys):
            return
        self.changes += 1
        if staying:
            head = given
            given = Segment(head.keys[staying:], keep, head.at)
            self._unlink(head)
            head.keys = head.keys[:staying]
            self._order[given] = None
            self._link(head)
            self._link(given)
        given.given = True
        self._order.move_to_end(given, last=False)

    def drop(self, keys: Collection[int]) -> int:
        """These blocks have been evicted, a chain from its end on: those of them that segments end with are dropped.

        Returns how many.
        """
        gone, before = set(keys), self.blocks
        while self._order:
            first = next(iter(self._order))
            left = _left(first, gone)
            if left < len(first):
                self._cut(first, left)
            if left:
                break
        for tail in self._tails.keys() & gone:
            # Not the first to go, as it seemed: what is believed to go on from there need not have gone before it.
            segment = self._tails[tail]
            self._cut(segment, _left(segment, gone))
            self._torn = True
        return before - self.blocks

    def shrink(self, blocks: int) -> None:
        """Drops the first to go until no more than `blocks` are left."""
        while self.blocks > blocks:
            segment = next(iter(self._order))
            self._cut(segment, max(0, len(segment) - (self.blocks - blocks)))

    def clear(self) -> None:
        """Nothing is held any more."""
        self.blocks = 0
        self.changes += 1
        self._order.clear()
        self._heads.clear()
        self._tails.clear()
        self._torn = False

    def check(self) -> None:
        """Asserts that sizes and ends are those of the segments, that no block is in two, and that ages descend."""
        assert self.blocks == sum(map(len, self._order))
        assert {segment.keys[0]: segment for segment in self._order} == self._heads
        assert {segment.keys[-1]: segment for segment in self._order} == self._tails
        assert all(segment.head == segment.keys[0] for segment in self._order)
        keys = [key for segment in self._order for key in segment.keys]
        assert len(set(keys)) == len(keys)
        places = [(not segment.given, segment.at if not segment.given else 0.0) for segment in self._order]
        assert places == sorted(places)

    def _cut(self, segment: Segment, left: int) -> None:
        """Only the first `left` blocks of it stay."""
        self.changes += 1
        self.blocks -= len(segment) - left
        self._unlink(segment)
        if left:
            segment.keys = segment.keys[:left]
            self._link(segment)
        else:
            del self._order[segment]
        self._torn |= segment.given

    def _link(self, segment: Segment) -> None:
        self._heads[segment.head] = self._tails[segment.keys[-1]] = segment

    def _unlink(self, segment: Segment) -> None:
        # Where reports tell of chains that are none, a block may be in two segments, and be found in one of them.
        if self._heads.get(segment.head) is segment:
            del self._heads[segment.head]
        if self._tails.get(segment.keys[-1]) is segment:
            del self._tails[segment.keys[-1]]

    def _parts(self, keys: Sequence[int]) -> Iterator[tuple[Segment, int]]:
        """As `path`, and those behind a gap: what was given up and is gone may have had others after it, and so may
        what was evicted out of turn."""
        if not self._torn:
            yield from self.path(keys)
            return
        for head in self._heads.keys() & keys:
            segment = self._heads[head]
            if common := segment.common(keys):
                yield segment, common


def _left(segment: Segment, gone: Collection[int]) -> int:
    """How many of its blocks stay when these have gone, as far as it ends with them."""
    keys, left = segment.keys, len(segment)
    while left and keys[left - 1] in gone:
        left -= 1
    return left
