"""A mesh of real workers as a `Runtime`: values are ids, a step is one message to each worker, nothing waits.

In: host tensors and plans. Out: handles of values on the workers. A handle that nobody holds is freed on the workers
with the next message, or when the mesh is idle.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtorch.errors import DeviceError, UnsupportedError
from dtorch.ir.layout import Spec, Whole, local_shape
from dtorch.ir.plan import PYTHON, Plan
from dtorch.runtime.base import LoadedPlan, Runtime
from dtorch.runtime.cluster import Cluster
from dtorch.runtime.parts import Coordinate, coordinates, cut, join, varying_axes, whole_shape
from dtorch.runtime.protocol import Kind, as_buffer, as_bytes, describe, pack_run
from dtorch.torch_private import registering_module

LOSS_S = 0.5  # after communication failed: how long until the loss of its other end is noticed
STEPS_KEPT = 1024  # how many steps may wait for a lost worker
STEP_INLINE_BYTES = 1 << 14  # host inputs of a step up to here travel within its message


class Handle:
    """A value on the workers of one mesh, made by command `number`."""

    __slots__ = ("id", "number", "runtime", "shape", "dtype", "spec", "rebuild", "line", "__weakref__")

    def __init__(self, runtime: ClusterRuntime, number: int, shape: tuple[int, ...], dtype: Any, spec: Spec) -> None:
        self.id = next(runtime.cluster.ids)
        self.runtime, self.number = runtime, number
        self.shape, self.dtype, self.spec = shape, dtype, spec
        self.line: str | None = None  # of the user's code that made it
        self.rebuild: Callable[[Coordinate], torch.Tensor] | None = None  # reads a part again after a loss
        runtime.handles[self.id] = self

    def __del__(self) -> None:
        self.runtime.dead.append(self.id)

    @property
    def nbytes(self) -> int:
        """Bytes on all devices together."""
        runtime = self.runtime
        count = 0
        for coordinate in coordinates(range(len(runtime.mesh_shape)), runtime.mesh_shape):
            part = 1
            for size in local_shape(self.shape, self.spec, runtime.mesh_shape, coordinate):
                part *= size
            count += part
        return count * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"Handle({self.id}, {self.shape}, {self.dtype})"


class Lent:
    """Host parts that travel within the message of the one step they are for."""

    __slots__ = ("parts",)

    def __init__(self, parts: dict[int, torch.Tensor]) -> None:
        self.parts = parts  # by device


class Mark:
    """A point in the order of commands, to wait for."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class ClusterRuntime(Runtime):
    """The mesh of `mesh_shape` over the workers of some devices, row-major."""

    def __init__(self, cluster: Cluster, mesh_shape: tuple[int, ...], device_ids: tuple[int, ...]) -> None:
        self.cluster, self.mesh_shape, self.device_ids = cluster, tuple(mesh_shape), tuple(device_ids)
        self.device = torch.device("cpu")  # of what is placed and gathered
        self.dead: deque[int] = deque()
        self.last = 0  # number of the newest step
        self.handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        self._plans: weakref.WeakValueDictionary[str, ClusterPlan] = weakref.WeakValueDictionary()
        self._unloaded: deque[int] = deque()
        cluster.lines.add(self)
        cluster.start(self.device_ids)

    # --- Runtime --------------------------------------------------------------------------------------------------

    def load(self, plan: Plan) -> ClusterPlan:
        """Send a plan to the workers, unless they have it."""
        digest = plan.digest
        found = self._plans.get(digest)
        if found is None:
            found = self._plans[digest] = ClusterPlan(self, plan)
        return found

    def place(self, tensor: torch.Tensor, spec: Spec, copy: bool = True) -> Handle:
        """Send each device its part; `copy` is without meaning, the bytes are the workers' own."""
        self.cluster.check()
        handle = Handle(self, 0, tuple(tensor.shape), tensor.dtype, spec)
        handle.number = self.cluster.ferry.put(handle.id, self._parts(tensor, spec))
        return handle

    def place_parts(self, spec: Spec, read: Callable[[Coordinate], torch.Tensor]) -> Handle:
        """Read each distinct part once and send it."""
        self.cluster.check()
        axes = varying_axes(spec, self.mesh_shape)
        handle: Handle | None = None
        shapes: dict[Coordinate, tuple[int, ...]] = {}
        for own in coordinates(axes, self.mesh_shape):
            part = read(own)
            shapes[own] = tuple(part.shape)
            if handle is None:
                handle = Handle(self, 0, (), part.dtype, spec)
                handle.rebuild = read
            handle.number = self.cluster.ferry.put(handle.id, {self.holders(own, axes): part})
        assert handle is not None
        handle.shape = whole_shape(shapes, spec)
        return handle

    def lend(self, tensor: torch.Tensor, spec: Spec) -> Any:
        """See Runtime: a small tensor goes with the step's message."""
        if tensor.numel() * tensor.element_size() > STEP_INLINE_BYTES:
            return self.place(tensor, spec)
        parts = self._parts(tensor, spec)
        return Lent({device: part for devices, part in parts.items() for device in devices})

    def gather(self, data: Any, shape: tuple[int, ...], dtype: torch.dtype, spec: Spec) -> torch.Tensor:
        """Fetch the distinct parts and put them together. Raises what computing the value raised."""
        if isinstance(data, torch.Tensor):
            return data
        axes = varying_axes(spec, self.mesh_shape)
        wanted = []
        for own in coordinates(axes, self.mesh_shape):
            device = self._live(self.holders(own, axes))
            wanted.append((device, data.id, dtype, local_shape(shape, spec, self.mesh_shape, own)))
        self.refuse_lost(data)
        self.cluster.check()
        try:
            parts = self.cluster.ferry.get(wanted)
        except Exception:
            self.refuse_lost(data)  # what the worker told of the failing step says more
            raise
        self._settle(data, wanted)
        return join(parts, shape, dtype, spec, self.mesh_shape)

    def part(self, data: Any, spec: Spec, coordinate: Coordinate) -> torch.Tensor:
        """The part at one coordinate."""
        device = self.device_ids[self._position(coordinate)]
        shape = local_shape(data.shape, spec, self.mesh_shape, coordinate)
        (part,) = self.cluster.ferry.get([(device, data.id, data.dtype, shape)])
        self._settle(data, [(device,)])
        return part

    def close(self) -> None:
        """Values are freed with their handles; workers belong to the cluster."""

    # --- waiting --------------------------------------------------------------------------------------------------

    def is_done(self, data: Any) -> bool:
        """Whether the value is there, or never will be."""
        cluster = self.cluster
        return cluster.failure is not None or cluster.closed or cluster.is_done(self.device_ids, data.number)

    def wait(self, data: Any, timeout_s: float | None = None) -> bool:
        """Wait for the value, without fetching it; errors come at the fetch."""
        try:
            return self.cluster.wait(self.device_ids, data.number, timeout_s)
        except DeviceError:
            return True

    def when_done(self, data: Any, callback: Callable[[], None]) -> None:
        """Call back when the value is there or never will be."""
        self.cluster.when_done(self.device_ids, data.number, callback)

    def storages(self, data: Any) -> list[tuple[Any, int]]:
        """See Runtime: each value by itself, though views share memory on the workers."""
        return [((id(self), data.id), data.nbytes)]

    def mark(self) -> Any:
        """A handle of nothing, made by the last command so far."""
        return Mark(self.last)

    def drain(self) -> None:
        """Wait until the workers have done all commands so far."""
        self.cluster.wait(self.device_ids, self.last)

    # --- within ---------------------------------------------------------------------------------------------------

    def refuse_lost(self, data: Handle) -> None:
        """Raise what made a value fail, if it did."""
        error = self.cluster.failed.get(data.id)
        if error is not None:
            if isinstance(error, DeviceError):  # it may be the consequence of a loss that is noticed next
                self.cluster.await_failure(LOSS_S)
                self.cluster.check()
            raise error

    def _settle(self, data: Handle, wanted: list[Any]) -> None:
        """Workers that were not asked may have failed at the value."""
        if len(wanted) < len(self.device_ids):
            self.cluster.wait(self.device_ids, data.number)
        self.refuse_lost(data)

    def _live(self, devices: Sequence[int]) -> int:
        for device in devices:
            if self.cluster.workers[device].state != "dead":
                return device
        return devices[0]

    def _parts(self, tensor: torch.Tensor, spec: Spec) -> dict[tuple[int, ...], torch.Tensor]:
        axes = varying_axes(spec, self.mesh_shape)
        source, grad = tensor.detach(), tensor.requires_grad
        found = {}
        for own in coordinates(axes, self.mesh_shape):
            part = cut(source, spec, self.mesh_shape, own)
            if axes and not part.is_contiguous():
                part = part.contiguous()
            found[self.holders(own, axes)] = part.detach().requires_grad_() if grad else part
        return found

    def holders(self, own: Coordinate, axes: Sequence[int]) -> tuple[int, ...]:
        """The devices whose coordinates agree with `own` on the axes."""
        everywhere = coordinates(range(len(self.mesh_shape)), self.mesh_shape)
        return tuple(
            device for device, at in zip(self.device_ids, everywhere) if all(at[axis] == own[axis] for axis in axes)
        )

    def _position(self, coordinate: Coordinate) -> int:
        position = 0
        for size, at in zip(self.mesh_shape, coordinate):
            position = position * size + at
        return position

    def take_dead(self) -> list[int]:
        """Ids of values that nobody holds any more, to be freed by the next message."""
        taken = []
        while self.dead:
            value = self.dead.popleft()
            self.cluster.failed.pop(value, None)
            taken.append(value)
        return taken

    def free_dead(self) -> None:
        """Free what is dead now."""
        taken = self.take_dead()
        if taken:
            self.cluster.send(self.device_ids, Kind.FREE, taken)
        while self._unloaded:
            self.cluster.send(self.device_ids, Kind.UNLOAD, (self._unloaded.popleft(),))

    def unload(self, number: int) -> None:
        """Let the workers forget a plan, when they are idle."""
        self._unloaded.append(number)


class ClusterPlan(LoadedPlan):
    """A plan that the workers have."""

    def __init__(self, runtime: ClusterRuntime, plan: Plan) -> None:
        self.runtime, self.plan = runtime, plan
        self.number = 0
        lines = {i.result: plan.lines[i.line] for i in plan.instructions}
        self._lines = [lines.get(item.register) for item in plan.outputs]
        self._generation = -1
        self._send()

    def _send(self) -> None:
        runtime, cluster = self.runtime, self.runtime.cluster
        if not self.number:
            self.number = next(cluster.ids)
            weakref.finalize(self, runtime.unload, self.number)
        generation = cluster.generation
        modules = modules_of(self.plan)
        if not cluster.may_send():
            return  # sent when the cluster is mended
        if modules:
            cluster.send(runtime.device_ids, Kind.MODULES, data=modules)
        ints = (self.number, generation, *runtime.device_ids)
        cluster.send(runtime.device_ids, Kind.LOAD, ints, blobs=(self.plan.to_json().encode(),))
        self._generation = generation

    def run(self, inputs: Sequence[Any]) -> list[Handle]:
        """Send one step. Gives handles at once; what goes wrong is raised where one is fetched.

        After the loss of a worker steps are kept, to be sent once the cluster is mended.
        """
        runtime, cluster = self.runtime, self.runtime.cluster
        if cluster.closed or len(cluster.steps) > STEPS_KEPT:
            cluster.check()
        if self._generation != cluster.generation:
            self._send()
        if cluster.failed:
            for item in inputs:
                if type(item) is Handle:
                    runtime.refuse_lost(item)
        whole = (Whole(),) * len(runtime.mesh_shape)
        given = [runtime.lend(item, whole) if isinstance(item, torch.Tensor) else item for item in inputs]
        outputs = [Handle(runtime, 0, item.shape, item.dtype, item.spec) for item in self.plan.outputs]
        self._launch(given, outputs)
        if cluster.may_send():
            cluster.hold_back(runtime.device_ids, runtime.last)
        return outputs

    def send_again(self, step: Step, outputs: list[Any]) -> None:
        """Run a step once more after workers were lost; outputs that nobody holds any more are made and freed."""
        runtime, cluster = self.runtime, self.runtime.cluster
        if self._generation != cluster.generation:
            self._send()
        made = [
            Handle(runtime, 0, i.shape, i.dtype, i.spec) if o is None else o for i, o in zip(self.plan.outputs, outputs)
        ]
        self._launch(step.inputs, made)

    def _launch(self, given: list[Any], outputs: list[Handle]) -> None:
        runtime, cluster = self.runtime, self.runtime.cluster
        lent = [item for item in given if type(item) is Lent]
        arguments, index = [], -1
        for item in given:
            if type(item) is Lent:
                arguments.append(index)
                index -= 1
            else:
                arguments.append(item.id)
        with cluster.board.sending:
            packed = pack_run(self.number, arguments, [output.id for output in outputs], runtime.take_dead())
            number = runtime.last = cluster.board.reserve()
            for output, line in zip(outputs, self._lines):
                output.number, output.line = number, line
            step = Step(self, number, runtime.device_ids, given, [weakref.ref(each) for each in outputs])
            cluster.steps.append(step)
            if cluster.may_send():
                try:
                    self._send_step(number, packed, lent)
                    step.sent = True
                except DeviceError:  # a worker is lost: whoever reads the results hears of it
                    if cluster.failure is None:
                        raise

    def _send_step(self, number: int, packed: Any, lent: list[Lent]) -> None:
        alike: dict[tuple[int, ...], list[int]] = {}  # devices that get the same parts, and so the same message
        for device in self.runtime.device_ids if lent else ():
            alike.setdefault(tuple(id(item.parts[device]) for item in lent), []).append(device)
        for devices in alike.values() if lent else (self.runtime.device_ids,):
            keep, metas, blobs = [], [], []
            for item in lent:
                meta, dense = describe(item.parts[devices[0]])
                data = as_bytes(dense.cpu())
                keep.append(data)
                metas.append(meta)
                blobs.append(as_buffer(data))
            self.runtime.cluster.deliver(devices, number, Kind.RUN, packed, metas or None, blobs)


def modules_of(plan: Plan) -> list[str]:
    """Modules that a worker imports before it has all kernels of a plan.

    Raises UnsupportedError for what is defined in the script itself, which workers never run.
    """
    found: dict[str, str] = {}
    for kernel in {instruction.kernel for instruction in plan.instructions}:
        if kernel.startswith(PYTHON):
            found[kernel.removeprefix(PYTHON).partition(":")[0]] = kernel
        elif kernel.count(".") == 2 and kernel.split(".")[0] not in ("aten", "prims", "_c10d_functional"):
            module = registering_module("::".join(kernel.split(".")[:2]))
            if module is not None:
                found[module] = kernel
    if "__main__" in found:
        raise UnsupportedError(
            f"{found['__main__']} is defined in the script that runs, and workers do not run it again: move it into a "
            "module of its own and import that."
        )
    return sorted(found)


@dataclass(eq=False)
class Step:
    """A run that was sent: kept until all workers have done it, so that it can be sent again after a loss."""

    plan: ClusterPlan
    number: int
    devices: tuple[int, ...]
    inputs: list[Any]
    outputs: list[weakref.ref[Handle]]
    sent: bool = False

