"""How much decoding slows prefills down, learned from the first tokens that came back."""

from __future__ import annotations

from typing import NamedTuple

MOST_SHARE = 0.9
"""No replica is believed to leave less than a tenth of its time to prefills."""

MEAN_WEIGHT = 0.02
"""Share of a new prefill in what is usual at its replica: about the last fifty count."""

KEEP = 0.998
"""What is left of a prefill's weight in the fit when the next one comes: about the last five hundred count. One
prefill differs from the next by more than decoding changes it."""

DOUBT = 100
"""Nothing is believed before there is more evidence than so many prefills would be that stood a quarter of the usual
load apart and took the same time."""

OUTLIER = 3.0
"""A prefill that took more times than what is usual at its replica counts as so many times."""


class Decoding(NamedTuple):
    """What a replica decodes: how many sequences, and the tokens of context that they have together."""

    sequences: float
    context: float


class _Usual:
    """Means over one replica's last prefills: seconds per token, and what decoded beside them."""

    __slots__ = ("beside", "count", "pace_s")

    def __init__(self) -> None:
        self.count = 0
        self.pace_s = 0.0
        self.beside = Decoding(0, 0)


class DecodeShare:
    """The share of time that decoding takes from prefills, by what a replica decodes.

    A step of an engine computes a piece of a prompt and one token of each sequence that decodes, whose KV it reads. So
    beside n sequences of c tokens in sum a prefill takes

        1 + a x n + b x c

    times what it takes alone, and decoding's share is 1 - 1 / that. Learned is by how much a prefill's pace differs
    from what is usual at its replica where n and c do (least squares, neither coefficient below 0), over all replicas
    together. So neither a replica that is slow, nor an hour that is, is taken for decoding. Until there is evidence
    the share is 0.

    Owns the means of each replica and of all, and the sums of the fit; only `observe` changes them.
    """

    def __init__(self) -> None:
        self._usual: dict[str, _Usual] = {}
        self._mean = _Usual()
        self._nn = self._nc = self._cc = self._ny = self._cy = 0.0
        self._slopes = (0.0, 0.0)

    def of(self, beside: Decoding) -> float:
        """From 0 to `MOST_SHARE`."""
        each, token = self._slopes
        mean = self._mean.beside
        slowed = each * beside.sequences + token * beside.context
        if not slowed:
            return 0.0
        # The slopes are shares of the usual pace, which has the usual decoding in it.
        alone = max(1 - each * mean.sequences - token * mean.context, 1 - MOST_SHARE)
        return min(slowed / (alone + slowed), MOST_SHARE)

    def observe(self, replica: str, effort: float, seconds: float, beside: Decoding) -> None:
        """A prefill of so many tokens (`gateway.placement.placement.effort`) took `seconds` while a replica decoded."""
        usual, pace_s = self._usual.setdefault(replica, _Usual()), seconds / effort
        if usual.count:
            ratio = min(pace_s / usual.pace_s, OUTLIER)
            self._add(beside.sequences - usual.beside.sequences, beside.context - usual.beside.context, ratio - 1)
            pace_s = ratio * usual.pace_s
        for means in (usual, self._mean):
            _move(means, pace_s, beside)
        self._slopes = self._solved()

    def check(self) -> None:
        """Asserts that no slope is negative, and no more is kept than fading leaves."""
        assert min(self._slopes) >= 0
        assert min(self._nn, self._cc) >= 0

    def _add(self, sequences: float, context: float, slower: float) -> None:
        self._nn = KEEP * self._nn + sequences * sequences
        self._nc = KEEP * self._nc + sequences * context
        self._cc = KEEP * self._cc + context * context
        self._ny = KEEP * self._ny + sequences * slower
        self._cy = KEEP * self._cy + context * slower

    def _solved(self) -> tuple[float, float]:
        mean = self._mean.beside
        nn = self._nn + DOUBT * max(mean.sequences, 1) ** 2 / 16
        cc = self._cc + DOUBT * max(mean.context, 1) ** 2 / 16
        determinant = nn * cc - self._nc * self._nc
        each = (self._ny * cc - self._cy * self._nc) / determinant
        token = (self._cy * nn - self._ny * self._nc) / determinant
        if each < 0:
            each, token = 0.0, max(0.0, self._cy / cc)
        elif token < 0:
            each, token = max(0.0, self._ny / nn), 0.0
        return each, token


def _move(means: _Usual, pace_s: float, beside: Decoding) -> None:
    means.count += 1
    weight = max(MEAN_WEIGHT, 1 / means.count)
    means.pace_s += weight * (pace_s - means.pace_s)
    before = means.beside
    means.beside = Decoding(*(old + weight * (new - old) for old, new in zip(before, beside, strict=True)))
