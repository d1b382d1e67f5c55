"""A cache that keeps what was used last: for what is costly to make and may be made again.

In: keys and values. Out: a value that is still there, or None. Threads may share one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """Values by key; beyond a limit the one that was not asked for the longest goes."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """The value of a key, which counts as used now; None if there is none."""
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
            return found

    def put(self, key: Hashable, value: V, limit: int) -> V:
        """Keep a value, and at most `limit` in all; returns it."""
        gone = []  # values end outside the lock: their finalizers may ask this cache
        with self._lock:
            self._values[key] = value
            while len(self._values) > limit:
                gone.append(self._values.popitem(last=False))
        return value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            gone, self._values = self._values, OrderedDict()
        del gone

    def __len__(self) -> int:
        return len(self._values)
