"""How many more requests the fleet may get because some of them failed."""

from __future__ import annotations

INITIAL = 3.0
MAXIMUM = 100.0


class RetryBudget:
    """A balance that every request adds `ratio` to and every retry takes 1 from.

    So retries stay below `ratio` of the requests (plus a few at start), however badly the fleet fails, and a failing
    fleet is not drowned in second attempts.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._balance = min(INITIAL, INITIAL * ratio * 10)

    def request(self) -> None:
        """A client's request arrived."""
        self._balance = min(MAXIMUM, self._balance + self._ratio)

    def take(self) -> bool:
        """Whether one more attempt is allowed; it is counted if so."""
        if self._balance < 1:
            return False
        self._balance -= 1
        return True
