"""Whose turn it is to record: several threads may use one recorder, and the usual case, one thread, must cost nothing.

In: threads that enter (`with turn:`, the long way) or announce themselves (the short way, see repeat.py). Out: one at a
time. The owner takes the short way without the lock; whoever else enters ends that and waits until the owner is out.
"""

from __future__ import annotations

import threading
import time
from typing import Any

HANDED_ON = 16  # so often does the short way pass to another thread; threads that take turns all use the lock


class Turn:
    """A lock, and the thread that may do without it.

    The short way: `turn.owner == me`, then `turn.busy = True`, then look at `owner` once more; `busy = False` at the
    end. Under the interpreter lock these happen in one order for all threads, so either the owner sees that it is none
    any more, or the other thread sees that it is busy.
    """

    __slots__ = ("owner", "busy", "_lock", "_left")

    def __init__(self) -> None:
        self.owner: int | None = None
        self.busy = False
        self._lock = threading.RLock()
        self._left = HANDED_ON

    def __enter__(self) -> Turn:
        self._lock.acquire()
        if self.owner != threading.get_ident():
            self._take()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._lock.release()

    def _take(self) -> None:
        """Nobody owns the turn from here on, until the thread that has the lock does; a few times only."""
        self.owner = None
        while self.busy:
            time.sleep(0)
        if self._left:
            self._left -= 1
            self.owner = threading.get_ident()
