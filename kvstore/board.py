"""How far fetches are, told without a message: counters in the memory that an agent and its engine share.

    memory: CELLS cells of 64 bytes, each a u64 in the host's byte order at its beginning

A question for each piece of a fetch costs as much time in both processes as copying a few blocks does.
"""

from __future__ import annotations

import threading

BOARD_BYTES = 4_096
_CELL_BYTES = 64
"""A cache line: counters of two fetches do not slow each other down."""
CELLS = BOARD_BYTES // _CELL_BYTES
_STEP = _CELL_BYTES // 8


class Board:
    """Owns which cells are in use; made by an agent, once for each memory, and used on its event loop."""

    def __init__(self, memory: memoryview) -> None:
        """`memory` is of BOARD_BYTES bytes."""
        self._words = memory.cast("Q")
        self._free = [*reversed(range(CELLS))]

    def __len__(self) -> int:
        """Cells in use."""
        return CELLS - len(self._free)

    def open(self) -> Progress | None:
        """A counter that stands at 0, in use until it is closed; None when all cells are."""
        return Progress(self, self._free.pop()) if self._free else None

    def check(self) -> None:
        """Asserts that no cell is free twice."""
        assert len({*self._free}) == len(self._free) <= CELLS

    # What its counters tell.

    def write(self, cell: int, count: int) -> None:
        """In one store of a word: who reads it sees this count or the one before."""
        self._words[cell * _STEP] = count

    def closed(self, cell: int) -> None:
        """It may be another's from now on."""
        self._free.append(cell)


class Progress:
    """One cell, until it is closed. `tell` may be called from any thread, also one that comes too late."""

    def __init__(self, board: Board, cell: int) -> None:
        self.cell = cell
        self._board: Board | None = board
        self._lock = threading.Lock()
        board.write(cell, 0)

    def tell(self, count: int) -> None:
        """Show `count`, unless the counter is closed."""
        with self._lock:
            if self._board is not None:
                self._board.write(self.cell, count)

    def close(self) -> None:
        """Give the cell back; on the board's thread. What it shows stays, and may be another's any time, so a reader
        must not take it for more than it is: see `kvstore.engine_messages.Loading`."""
        with self._lock:
            board, self._board = self._board, None
        if board is not None:
            board.closed(self.cell)


def read(words: memoryview, cell: int) -> int:
    """What a cell of a board shows now; `words` is its memory as words of 8 bytes. Raises IndexError."""
    return int(words[cell * _STEP])
