"""Host tensors on their way to workers and back: small ones within messages, large ones in pieces.

In: tensors by the devices that get them, or ids of values to fetch. Out: commands, and tensors put together again.
Pieces for workers of this machine go through the arena, those for other hosts as frames; both wait while too much is
under way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dtorch.runtime.memory import Arena, Slots
from dtorch.runtime.protocol import Kind, as_buffer, as_bytes, blank, describe, shaped
from dtorch.runtime.remote_errors import rebuilt

if TYPE_CHECKING:
    from dtorch.runtime.cluster import Cluster

INLINE_BYTES = 1 << 16  # tensors up to here travel within messages
PIECE_BYTES = 16 << 20  # larger ones in pieces of this size
WINDOW = 4  # pieces that one fetch has under way

Wanted = tuple[int, int, torch.dtype, tuple[int, ...]]  # device, value id, dtype, local shape


class _Piece(NamedTuple):
    """A piece that was asked for. `offset` in the arena, or -1."""

    request: int
    at: int
    length: int
    offset: int


class _Lent(NamedTuple):
    """A piece that is with workers until they have done a command. `offset` in the arena, or -1."""

    number: int
    devices: tuple[int, ...]
    offset: int
    length: int


class Ferry:
    """What moves bytes for a cluster."""

    def __init__(self, cluster: Cluster, size: int) -> None:
        self._cluster, self._size = cluster, size
        self.arena = Arena(size)
        self.slots = Slots(size)
        self._lent: deque[_Lent] = deque()
        self._far_bytes = 0  # on their way to other hosts, in this process's memory
        self._lock = threading.Lock()

    # --- to workers -----------------------------------------------------------------------------------------------

    def put(self, value: int, parts: dict[tuple[int, ...], torch.Tensor]) -> int:
        """Send tensors by the devices that get them, under one id; the number of the last command."""
        number = 0
        for devices, tensor in parts.items():
            meta, dense = describe(tensor)
            data = as_bytes(dense.cpu())
            size = data.numel()
            if size <= INLINE_BYTES:
                number = self._cluster.send(devices, Kind.PUT, (value,), meta, (as_buffer(data),))
                continue
            for at in range(0, size, PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES]
                number = self._put_piece(value, devices, at, piece, meta if at == 0 else None)
        return number

    def _put_piece(self, value: int, devices: Sequence[int], at: int, piece: torch.Tensor, meta: Any) -> int:
        cluster, length, number = self._cluster, piece.numel(), 0
        route = cluster.lanes.route(devices)
        if route.near:
            offset = self.slots.take(length, self._wait)
            self.arena.view(offset, length).copy_(piece)
            number = cluster.send(route.near, Kind.PUT_PIECE, (value, at, offset, length), meta)
            self._lent.append(_Lent(number, route.near, offset, length))
        if route.far:
            while self._far_bytes and self._far_bytes + length > self._size:
                self._wait()
            with self._lock:
                self._far_bytes += length
            number = cluster.send(route.far, Kind.PUT_PIECE, (value, at, -1, length), meta, (as_buffer(piece),))
            self._lent.append(_Lent(number, route.far, -1, length))
        return number

    def _wait(self) -> None:
        self._cluster.check()
        self.reclaim()
        with self._cluster.changed:
            self._cluster.changed.wait(0.005)

    def reclaim(self) -> None:
        """Take back what workers are done with, oldest first."""
        done = []
        with self._lock:
            while self._lent and self._cluster.is_done(self._lent[0].devices, self._lent[0].number):
                piece = self._lent.popleft()
                if piece.offset < 0:
                    self._far_bytes -= piece.length
                else:
                    done.append(piece)
        for piece in done:
            self.slots.give(piece.offset, piece.length)

    # --- from workers ---------------------------------------------------------------------------------------------

    def get(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """Values from devices. Raises what computing one of them raised."""
        if all(_nbytes(each) <= INLINE_BYTES for each in wanted):  # all at once: one round trip
            asked = [self._ask(each, 0, _nbytes(each)) for each in wanted]
            return [self._receive([piece], []) for piece in asked]
        return [self._fetch(each) for each in wanted]

    def _fetch(self, wanted: Wanted) -> torch.Tensor:
        size = _nbytes(wanted)
        starts = deque(range(0, max(size, 1), PIECE_BYTES))
        asked = [self._ask(wanted, at, min(PIECE_BYTES, size - at)) for at in _taken(starts, WINDOW)]
        return self._receive(asked, starts, wanted)

    def _receive(self, asked: list[_Piece], starts: Any, wanted: Wanted | None = None) -> torch.Tensor:
        """Put pieces together as they come, and ask for one more for each."""
        dense: torch.Tensor | None = None
        meta: Any = None
        error: BaseException | None = None
        waiting = deque(asked)
        while waiting:
            request, at, length, offset = waiting.popleft()
            message = self._cluster.reply(request)
            if "meta" not in message.data:
                error = rebuilt(message.data, message.sender, "")
            else:
                if dense is None:
                    meta = message.data["meta"]
                    dense = blank(meta)
                if length:
                    whole = offset >= 0 and not message.blobs
                    source = self.arena.view(offset, length) if whole else _tensor_of(message.blobs[0])
                    as_bytes(dense)[at : at + length].copy_(source)
            if offset >= 0:
                self.slots.give(offset, length)
            if starts and error is None and wanted is not None:
                start = starts.popleft()
                waiting.append(self._ask(wanted, start, min(PIECE_BYTES, _nbytes(wanted) - start)))
        if error is not None:
            raise error
        assert dense is not None
        return shaped(dense, [*meta[:3], False])

    def _ask(self, wanted: Wanted, at: int, length: int) -> _Piece:
        device, value = wanted[:2]
        shared = length > INLINE_BYTES and bool(self._cluster.lanes.route((device,)).near)
        offset = self.slots.take(length, self._wait) if shared else -1
        request = self._cluster.request()
        self._cluster.send((device,), Kind.GET, (value, request, at, length, offset))
        return _Piece(request, at, length, offset)

    # --- life -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """After a loss, when no worker has anything under way: every slot is free."""
        with self._lock:
            self._lent.clear()
            self._far_bytes = 0
            self.slots = Slots(self._size)

    def close(self) -> None:
        """Unmap the arena."""
        self.arena.close()


def _nbytes(wanted: Wanted) -> int:
    size = wanted[2].itemsize
    for each in wanted[3]:
        size *= each
    return size


def _taken(starts: deque[int], count: int) -> list[int]:
    return [starts.popleft() for _ in range(min(count, len(starts)))]


def _tensor_of(blob: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)
