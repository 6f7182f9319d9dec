"""How likely it is that cached blocks are used again, learned from the traffic."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

BUCKETS = 64
STEPS = 4
"""Buckets of idle time per factor of two, from a second on: the last begins at 15 hours."""

TAILS = 1 << 16
"""Prompts whose end is remembered, whether anybody still holds it or not: about 10 MB."""

PRIOR_CHANCE = 0.25
PRIOR_TOKENS = 65_536.0
"""Until more than this has been seen, a block counts as likely to be used again whatever its age. Low, because a wrong
certainty costs more than no price at all: S = 1 made it 1.27 and 2.58 times one big cache's TTFT, no price 1.08 and
1.72 (chats and agents, simulated). How low, and for how long, recorded traffic does not show (`benchmarks/README.md`,
"Constants of placement")."""

REFRESH = 16
"""The curve is drawn anew after so many prompts."""

MEMORY = 1 << 18
"""Prompts after which all that was counted counts half: three days at one a second, an hour at a hundred. What traffic
once was would otherwise outweigh for months what it has become. A multiple of `TAILS`, for gaps of so many prompts are
what can be seen."""


class ReuseCurve:
    """P(a block is used again | it has been idle for so long), from the gaps between uses of the same prefix.

    And how much a conversation grows (`growth`): one goes on where the last prompt of it ended.

    Owns, per bucket of the logarithm of time, the tokens that were used again after such a gap, the tokens used in all,
    and when the last `TAILS` prompts ended in which block. Gaps of blocks that were evicted in between count as well:
    else what is evicted early would never look worth keeping. Counts are of tokens, and fade by `MEMORY`.
    """

    def __init__(self) -> None:
        self._again = [0.0] * BUCKETS
        self._used = 0.0
        self._begun = self._grown = 0.0
        self._tails: OrderedDict[int, float] = OrderedDict()
        self._drawn = 0
        self._curve = [PRIOR_CHANCE] * BUCKETS

    def observe(self, blocks: Sequence[int], block_tokens: int, held: int, gap_s: float, now: float) -> None:
        """A prompt with these blocks was placed, of which the first `held` are cached somewhere and were last used
        `gap_s` ago."""
        tails = self._tails
        if ends := tails.keys() & blocks:  # looks at thousands of keys in C
            depth = len(blocks)
            while blocks[depth - 1] not in ends:
                depth -= 1
            self._grown += (len(blocks) - depth) * block_tokens
            if depth > held:
                held, gap_s = depth, now - tails[blocks[depth - 1]]
        else:
            self._begun += 1
        self._used += len(blocks) * block_tokens
        if held:
            self._again[_bucket(gap_s)] += held * block_tokens
        if blocks:
            tails[blocks[-1]] = now
            tails.move_to_end(blocks[-1])
            if len(tails) > TAILS:
                tails.popitem(last=False)
        self._drawn += 1
        if self._drawn % MEMORY == 0:
            self._fade()
        if self._drawn % REFRESH == 0:
            self._draw()

    @property
    def growth(self) -> float:
        """Tokens that a conversation grows by after its first prompt, in the mean."""
        return self._grown / self._begun if self._begun else 0.0

    def chance(self, idle_s: float) -> float:
        """For a block that has been idle for so long."""
        return self._curve[_bucket(idle_s)]

    def _fade(self) -> None:
        self._again = [again / 2 for again in self._again]
        self._used /= 2
        self._begun /= 2
        self._grown /= 2

    def _draw(self) -> None:
        later, left = sum(self._again) + PRIOR_CHANCE * PRIOR_TOKENS, self._used + PRIOR_TOKENS
        for bucket, again in enumerate(self._again):
            self._curve[bucket] = max(0.0, later / left)
            later -= again
            left -= again


def _bucket(seconds: float) -> int:
    return min(BUCKETS - 1, int(STEPS * math.log2(1.0 + seconds)))
