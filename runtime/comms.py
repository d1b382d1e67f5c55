"""Communication of one worker: process groups made when a plan first needs them, and collectives over them.

In: the mesh of a plan and its axes. Out: functions that start a collective on a local tensor and functions that end
it. NCCL on CUDA; Gloo on CPU, where reductions are made here from gathered parts in the order of the mesh, so that the
bits are those of simulated devices. Groups are named by their axis and members, and a new generation of all of them is
made after a worker was lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from dtorch.errors import DeviceError
from dtorch.runtime.kernels import reduce_parts
from dtorch.runtime.protocol import as_bytes
from dtorch.torch_private import (
    make_group,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)

MEET_S = 60.0  # how long members of a new group wait for each other
SLICE = timedelta(milliseconds=200)  # how often a wait looks whether it should be given up


class Started:
    """A collective under way; `end` waits for it and gives its result."""

    __slots__ = ("work", "result", "finish", "group", "keep")

    def __init__(self, group: Group, work: Any, result: torch.Tensor, finish: Any = None, keep: Any = None) -> None:
        self.group, self.work, self.result, self.finish, self.keep = group, work, result, finish, keep

    def end(self) -> torch.Tensor:
        """The result. Raises DeviceError if a member is gone or communication was given up."""
        if self.work is not None:
            self.group.wait(self.work)
        result = self.result if self.finish is None else self.finish(self.result)
        self.keep = None
        return result


def end(started: Started) -> torch.Tensor:
    """`started.end()`, for generated code."""
    return started.end()


class Group:
    """The devices along one axis at this worker's coordinate."""

    def __init__(self, name: str, axis: str, handle: Any, size: int, device: torch.device, comms: Comms) -> None:
        self.name, self.axis, self.handle, self.size, self.device, self.comms = name, axis, handle, size, device, comms

    def wait(self, work: Any) -> None:
        """End a collective. On CUDA only the stream waits, the host goes on."""
        try:
            if self.device.type == "cuda":
                work.wait()
                return
            while True:
                try:
                    work.wait(SLICE)
                    return
                except RuntimeError:
                    if work.is_completed():
                        raise
                    if self.comms.given_up.is_set():
                        raise DeviceError(f"communication on axis {self.axis!r} was given up") from None
        except RuntimeError as error:
            if isinstance(error, DeviceError):
                raise
            raise DeviceError(f"communication on axis {self.axis!r} failed: {str(error).splitlines()[0]}") from error

    # --- the four collectives; `source` is equal in shape on all members -------------------------------------------

    def all_gather(self, source: torch.Tensor, *_: Any) -> Started:
        """Concatenate along dim 0."""
        source = source.contiguous()
        shape = (self.size * source.shape[0], *source.shape[1:]) if source.dim() else (self.size,)
        return self._gather(source, source.new_empty(shape), None)

    def all_reduce(self, source: torch.Tensor, op: str, *_: Any) -> Started:
        """Reduce with `op`."""
        source = source.contiguous()
        if self.device.type == "cuda" and self.size > 1:
            result = source.clone()
            return Started(self, start_all_reduce(self.handle, result, op), result)
        parts = source.new_empty((self.size, *source.shape))
        return self._gather(source, parts, lambda all_parts: reduce_parts(all_parts.unbind(0), op))

    def reduce_scatter(self, source: torch.Tensor, op: str, *_: Any) -> Started:
        """Reduce with `op`, keep this member's chunk of dim 0."""
        source = source.contiguous()
        if self.device.type == "cuda" and self.size > 1:
            result = source.new_empty((source.shape[0] // self.size, *source.shape[1:]))
            return Started(self, start_reduce_scatter(self.handle, result, source, op), result, keep=source)
        return self._exchange(source, lambda parts: reduce_parts(parts.chunk(self.size, 0), op))

    def all_to_all(self, source: torch.Tensor, *_: Any) -> Started:
        """Chunk i of dim 0 goes to member i."""
        return self._exchange(source.contiguous(), None)

    def _gather(self, source: torch.Tensor, result: torch.Tensor, finish: Any) -> Started:
        if self.size == 1 or not source.numel():
            result.view(-1)[:] = source.reshape(-1)
            return Started(self, None, result, finish)
        flat, into = source.reshape(-1), result.view(-1)
        if self.device.type == "cpu":  # only moved: as bytes, any dtype will do
            flat, into = as_bytes(source), as_bytes(result)
        return Started(self, start_all_gather(self.handle, into, flat), result, finish, flat)

    def _exchange(self, source: torch.Tensor, finish: Any) -> Started:
        if self.size == 1 or not source.numel():
            return Started(self, None, source, finish if source.numel() else None)
        result = torch.empty_like(source, memory_format=torch.contiguous_format)
        flat, into = source.reshape(-1), result.view(-1)
        if self.device.type == "cpu":
            flat, into = as_bytes(source), as_bytes(result)
        return Started(self, start_all_to_all(self.handle, into, flat), result, finish, flat)


class Comms:
    """All groups of one worker."""

    def __init__(self, device: torch.device, own: int, connect: Callable[[], Any], limit_s: float) -> None:
        """`own`: this worker's device id; `connect` gives the store where members meet; `limit_s`: of a collective."""
        self.device, self.own, self._connect, self.limit_s = device, own, connect, limit_s
        self.given_up = threading.Event()
        self.generation = 0
        self._store: Any = None
        self._groups: dict[str, Group] = {}
        self._left: list[Any] = []  # handles that may hang when they are destroyed: they end with the process

    @property
    def store(self) -> Any:
        """The store of all workers."""
        if self._store is None:
            self._store = self._connect()
        return self._store

    def group(self, axis: str, members: Sequence[int]) -> Group:
        """The group of these devices, made now if it is new: then all members must be here too."""
        import torch.distributed as dist

        name = f"{self.generation}/{axis}/{','.join(map(str, members))}"
        found = self._groups.get(name)
        if found is None:
            handle = None
            if len(members) > 1:
                backend = "nccl" if self.device.type == "cuda" else "gloo"
                store = dist.PrefixStore(name, self.store)
                try:
                    handle = make_group(backend, store, list(members).index(self.own), len(members), self.limit_s)
                except RuntimeError as error:
                    raise DeviceError(f"the devices of axis {axis!r} cannot reach each other: {error}") from error
            found = self._groups[name] = Group(name, axis, handle, len(members), self.device, self)
        return found

    def compare(self, key: str, value: str, first: bool, limit_s: float = MEET_S) -> None:
        """Check through the store that all devices have the same value. Raises DeviceError if not, or too late."""
        key = f"{self.generation}/{key}"
        if first:
            self.store.set(key, value)
            return
        deadline = time.monotonic() + limit_s
        while not self.store.check([key]):
            if time.monotonic() > deadline or self.given_up.is_set():
                raise DeviceError(f"the first device of the plan told no order of communication within {limit_s:.0f} s")
            time.sleep(0.001)
        theirs = self.store.get(key).decode()
        if theirs != value:
            raise DeviceError(
                f"this device would communicate in another order than the first one ({value} and {theirs}): nothing "
                "was run. This is a bug of DTorch or a mix of versions; report it with a dump of the plan."
            )

    def give_up(self) -> None:
        """End whatever communication is under way with an error; called from another thread."""
        self.given_up.set()
        for group in list(self._groups.values()):
            if group.handle is not None and self.device.type == "cuda":
                group.handle.abort()

    def restart(self, generation: int) -> None:
        """Forget all groups; new ones are made at need."""
        if generation == self.generation:
            return
        self._left.extend(group.handle for group in self._groups.values() if group.handle is not None)
        self._groups.clear()
        self.generation = generation
        self.given_up.clear()
