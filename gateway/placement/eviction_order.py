"""In which order a replica's cache will give up its blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class Segment:
    """Blocks of one chain that were used together at time `at`, and by nothing since.

    `keys` are those of the blocks from depth `depth` on, in blocks; `head` is the first of them. After them come
    `answer` blocks of whatever the engine wrote, whose keys are not known. `given` ones were given up to a peer.
    """

    __slots__ = ("answer", "at", "depth", "given", "head", "keys")

    def __init__(self, keys: Sequence[int], depth: int, at: float) -> None:
        self.keys = keys
        self.head = keys[0]
        self.depth = depth
        self.at = at
        self.answer = 0
        self.given = False

    def __len__(self) -> int:
        return len(self.keys) + self.answer

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
    """The LRU of one replica's cache, tails before heads, as far as this gateway's own placements tell.

    A prompt is one `Segment`, the youngest, when it is placed; what it has in common with older ones is cut off those.
    So there are few of them, however many blocks, and the end of the order is looked at without touching the rest. All
    blocks of a path are held if its last one is, so on a path a segment begins where an older one was cut; but once
    something that a peer took over is gone, what others had after it may be left.

    Owns the segments, oldest first but for what a peer took over, which stands before them, and finds them by the key
    of their first block; `blocks` is their size in sum. Keys are those of whole engine blocks. Only `use`, `answered`,
    `give_up`, `shrink` and `clear` change it, and count their `changes`.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.changes = 0
        self._order: OrderedDict[Segment, None] = OrderedDict()
        self._heads: dict[int, Segment] = {}
        self._torn = False

    def __iter__(self) -> Iterator[Segment]:
        """Segments, the first to go first; of each the last block goes first."""
        return iter(self._order)

    def path(self, keys: Sequence[int]) -> Iterator[tuple[Segment, int]]:
        """The segments that a prompt's path leads through, and how many blocks of each."""
        depth, heads = 0, self._heads
        while depth < len(keys):
            segment = heads.get(keys[depth])
            if segment is None:
                return
            common = segment.common(keys)
            yield segment, common
            depth += common

    def held(self, keys: Sequence[int]) -> int:
        """How many blocks of a path are in the order, from its beginning on."""
        return sum(common for _, common in self.path(keys))

    def use(self, keys: Sequence[int], at: float) -> Segment | None:
        """A prompt with these blocks was placed; None if there are none."""
        if not keys:
            return None
        self.changes += 1
        for segment, common in list(self._parts(keys)):
            del self._heads[segment.head]
            self.blocks -= common
            if common == len(segment.keys):
                # An answer that the prompt goes on with is among its own blocks now.
                self.blocks -= segment.answer
                del self._order[segment]
            else:
                segment.keys = segment.keys[common:]
                segment.head = segment.keys[0]
                segment.depth += common
                self._heads[segment.head] = segment
        youngest = Segment(keys, 0, at)
        self._order[youngest] = None
        self._heads[youngest.head] = youngest
        self.blocks += len(keys)
        return youngest

    def answered(self, segment: Segment, blocks: int) -> None:
        """The answer to a prompt took so many blocks more; no change if the segment was cut or taken up since."""
        if segment in self._order:
            self.changes += 1
            self.blocks += blocks
            segment.answer += blocks

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
            given.answer, head.answer = head.answer, 0
            head.keys = head.keys[:staying]
            self._order[given] = None
            self._heads[given.head] = given
        given.given = True
        self._order.move_to_end(given, last=False)

    def shrink(self, blocks: int) -> None:
        """Drops the first to go until no more than `blocks` are left."""
        while self.blocks > blocks:
            self.changes += 1
            segment = next(iter(self._order))
            excess = self.blocks - blocks
            if excess < len(segment):
                of_answer = min(segment.answer, excess)
                segment.answer -= of_answer
                segment.keys = segment.keys[: len(segment.keys) - (excess - of_answer)]
                self.blocks = blocks
            else:
                self.blocks -= len(segment)
                del self._order[segment], self._heads[segment.head]
            self._torn |= segment.given

    def clear(self) -> None:
        """Nothing is held any more."""
        self.blocks = 0
        self.changes += 1
        self._order.clear()
        self._heads.clear()
        self._torn = False

    def check(self) -> None:
        """Asserts that sizes and heads are those of the segments, that no block is in two, and that ages descend."""
        assert self.blocks == sum(map(len, self._order))
        assert {segment.keys[0]: segment for segment in self._order} == self._heads
        assert all(segment.head == segment.keys[0] for segment in self._order)
        assert all(segment.answer >= 0 for segment in self._order)
        keys = [key for segment in self._order for key in segment.keys]
        assert len(set(keys)) == len(keys)
        places = [(not segment.given, segment.at if not segment.given else 0.0) for segment in self._order]
        assert places == sorted(places)

    def _parts(self, keys: Sequence[int]) -> Iterator[tuple[Segment, int]]:
        """As `path`, and those behind a gap: what was given up and is gone may have had others after it."""
        if not self._torn:
            yield from self.path(keys)
            return
        for head in self._heads.keys() & keys:
            segment = self._heads[head]
            yield segment, segment.common(keys)
