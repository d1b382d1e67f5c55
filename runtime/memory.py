"""The shared memory through which host tensors reach workers of the same machine, and come back.

In: byte counts. Out: slots in one arena that the controller and its workers have mapped. The arena is a memory file
without a name, inherited by the workers: when the last process that maps it ends, it is gone. The controller alone
hands out slots; a slot is free again once all workers that read it have said so.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable

import torch

ALIGNMENT = 64


class Arena:
    """Bytes shared with other processes. `fd` is what they map; `view` gives a tensor over a range."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        owned = fd is None
        if fd is None:
            fd = os.memfd_create("dtorch", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
        self.fd, self.size = fd, os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._owned = owned

    def view(self, offset: int, length: int) -> torch.Tensor:
        """The bytes of a range, shared. Raises ValueError outside of the arena."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"bytes {offset} to {offset + length} of an arena of {self.size}")
        return self._bytes[offset : offset + length]

    def fill(self, offset: int, data: bytes) -> None:
        """Copy bytes into it."""
        self._map[offset : offset + len(data)] = data

    def close(self) -> None:
        """Unmap it here."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        try:
            self._map.close()
        except BufferError:  # a view of it is still held; the mapping goes with it
            pass
        os.close(self.fd)


class Slots:
    """Which ranges of an arena are in use: first fit, neighbours merged, waits while it is full."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]  # (offset, length), by offset
        self._lock = threading.Lock()

    def take(self, length: int, wait: Callable[[], None]) -> int:
        """The offset of a range that is now in use; `wait` is called between tries while none is free."""
        length = -(-max(length, 1) // ALIGNMENT) * ALIGNMENT
        while True:
            with self._lock:
                for index, (offset, free) in enumerate(self._free):
                    if free >= length:
                        rest = (offset + length, free - length)
                        self._free[index : index + 1] = [rest] if rest[1] else []
                        return offset
            wait()

    def give(self, offset: int, length: int) -> None:
        """Return a range."""
        length = -(-max(length, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            index = next((i for i, (other, _) in enumerate(self._free) if other > offset), len(self._free))
            self._free.insert(index, (offset, length))
            if index + 1 < len(self._free) and offset + length == self._free[index + 1][0]:
                self._free[index : index + 2] = [(offset, length + self._free[index + 1][1])]
            if index and sum(self._free[index - 1]) == self._free[index][0]:
                before, this = self._free[index - 1], self._free[index]
                self._free[index - 1 : index + 1] = [(before[0], before[1] + this[1])]

    @property
    def free_bytes(self) -> int:
        """How much is free, in all."""
        with self._lock:
            return sum(length for _, length in self._free)
