"""Whose turn it is to record: several threads may use one recorder, and the usual case, one thread, must cost nothing.

In: threads that enter (`with turn:`, the long way) or announce themselves (the short way, see repeat.py). Out: one at a
time. The owner takes the short way without the lock; whoever else enters ends that and waits until the owner is out.
"""

from __future__ import annotations

import threading
import time
from typing import Any

IN_A_ROW = 32  # a thread that had the lock so often, and nobody else between, may do without it


class Turn:
    """A lock, and the thread that may do without it.

    The short way: `turn.owner == me`, then `turn.busy = True`, then look at `owner` once more; `busy = False` at the
    end. Under the interpreter lock these happen in one order for all threads, so either the owner sees that it is none
    any more, or the other thread sees that it is busy.
    """

    __slots__ = ("owner", "busy", "_lock", "_last", "_in_a_row")

    def __init__(self) -> None:
        self.owner: int | None = None
        self.busy = False
        self._lock = threading.RLock()
        self._last = 0
        self._in_a_row = 0

    def __enter__(self) -> Turn:
        self._lock.acquire()
        me = threading.get_ident()
        if self.owner != me:
            self._take(me)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._lock.release()

    def _take(self, me: int) -> None:
        """Nobody owns the turn from here on, or the thread that has the lock does."""
        if self.owner is not None:
            self.owner = None
            while self.busy:
                time.sleep(0)
        self._in_a_row = self._in_a_row + 1 if self._last == me else 1
        self._last = me
        if self._in_a_row >= IN_A_ROW:
            self.owner = me
