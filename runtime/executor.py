"""One device's part of a plan as one straight-line Python function, and what happens when an instruction fails.

In: a plan, a coordinate, the worker's groups. Out: `DevicePlan`, whose `run` takes and gives local tensors. After an
exception the rest of the plan is gone through one instruction at a time: what needs the failed value is `Failed` too,
everything else is computed, and communication goes on with zeros, so that no other device waits in vain.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dtorch.ir.layout import local_shape
from dtorch.ir.plan import Instruction, Plan, Ref, resolve
from dtorch.runtime.comms import Comms, Group, Started, end
from dtorch.runtime.kernels import kernel
from dtorch.torch_private import plain_execution

COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Failed:
    """In place of a value that could not be computed. `error` is the exception, `instruction` where it was raised."""

    __slots__ = ("error", "instruction", "step")

    def __init__(self, error: BaseException, instruction: int | None, step: int) -> None:
        self.error, self.instruction, self.step = error, instruction, step


class DevicePlan:
    """A plan at one coordinate."""

    def __init__(self, plan: Plan, device_ids: Sequence[int], own: int, comms: Comms) -> None:
        self.plan, self.comms = plan, comms
        self.events: list[tuple[str, str, str, int, int]] | None = None  # kernel, stream, line, began, ended (ns)
        self.device = comms.device
        position = list(device_ids).index(own)
        self.coordinate = _coordinate(position, plan.mesh_shape)
        self.groups: dict[str, Group] = {}
        for axis in axes_used(plan):
            members = members_along(plan.mesh_shape, device_ids, self.coordinate, plan.axis_names.index(axis))
            self.groups[axis] = comms.group(axis, members)
        self.source, self._names, self._lines = self._write()
        namespace = dict(self._names)
        exec(compile(self.source, "<dtorch plan>", "exec"), namespace)  # our own text, made of a checked plan
        self._function: Callable[..., Any] = namespace["run"]

    # --- the fast way ---------------------------------------------------------------------------------------------

    def run(self, inputs: list[Any], step: int = 0) -> list[Any]:
        """Run once on local tensors. A result is a tensor, or `Failed`."""
        with plain_execution():
            if not any(type(item) is Failed for item in inputs):
                try:
                    return list(self._function(inputs) if self.events is None else self._measured(inputs))
                except Exception as error:
                    position, values = self._where(error)
                    if position is None:
                        raise
                    error.__traceback__ = None  # its frames would keep the values alive
                    if out_of_memory(error):
                        _make_room(self.device)
                        return self._go_on(values, position, step)
                    values[self.plan.instructions[position].result] = Failed(error, position, step)
                    return self._go_on(values, position + 1, step)
            values = {item.register: given for item, given in zip(self.plan.inputs, inputs)}
            return self._go_on(values, 0, step)

    def at(self, frame: Any) -> int | None:
        """The instruction that a frame of this plan's function is at; None for other frames."""
        return self._lines.get(frame.f_lineno) if frame.f_code is self._function.__code__ else None

    def _measured(self, inputs: list[Any]) -> list[Any]:
        """Run one instruction at a time and note when each began and ended; on CUDA each is waited for."""
        values = {item.register: given for item, given in zip(self.plan.inputs, inputs)}
        wait = torch.cuda.synchronize if self.device.type == "cuda" else None
        for instruction in self.plan.instructions:
            function, _ = self._bind(instruction)
            given = [self._value(item, values) for item in self._arguments(instruction)]
            named = {key: self._value(item, values) for key, item in instruction.kwargs}
            began = time.perf_counter_ns()
            with torch.cuda.nvtx.range(instruction.kernel) if wait is not None else nullcontext():
                values[instruction.result] = function(*given, **named)
            if wait is not None:
                wait()
            line = self.plan.lines[instruction.line]
            assert self.events is not None
            self.events.append((instruction.kernel, instruction.stream, line, began, time.perf_counter_ns()))
            for register in instruction.frees:
                values.pop(register, None)
        return [values[item.register] for item in self.plan.outputs]

    def _where(self, error: Exception) -> tuple[int | None, dict[int, Any]]:
        """The instruction that raised, and the registers as they were."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self._function.__code__:
                values = {int(k[1:]): v for k, v in trace.tb_frame.f_locals.items() if k[0] == "v" and k[1:].isdigit()}
                return self._lines.get(trace.tb_lineno), values
            trace = trace.tb_next
        return None, {}

    def _write(self) -> tuple[str, dict[str, Any], dict[int, int]]:
        names: dict[str, Any] = {"end": end}
        kernels: dict[str, str] = {}
        constants: dict[Any, str] = {}

        def constant(item: Any) -> str:
            key = (type(item).__name__, repr(item))
            if key not in constants:
                constants[key] = f"k{len(constants)}"
                names[constants[key]] = item
            return constants[key]

        def argument(item: Any) -> str:
            if isinstance(item, Ref):
                return f"v{item.register}"
            if isinstance(item, tuple):
                return "(" + "".join(argument(part) + ", " for part in item) + ")"
            if isinstance(item, list):
                return "[" + ", ".join(argument(part) for part in item) + "]"
            item = resolve(item, self.plan.mesh_shape, self.coordinate)
            return repr(item) if item is None or type(item) in (bool, int, str) else constant(item)

        lines = ["def run(inputs):"]
        if self.plan.inputs:
            lines.append("    [" + ", ".join(f"v{item.register}" for item in self.plan.inputs) + "] = inputs")
        at: dict[int, int] = {}
        for position, instruction in enumerate(self.plan.instructions):
            function, grouped = self._bind(instruction)
            key = f"{instruction.kernel} {instruction.args[-1]}" if grouped else instruction.kernel
            name = kernels.setdefault(key, f"f{len(kernels)}")
            names[name] = function
            args = [argument(item) for item in self._arguments(instruction)]
            args += [f"{key}={argument(value)}" for key, value in instruction.kwargs]
            lines.append(f"    v{instruction.result} = {name}({', '.join(args)})")
            at[len(lines)] = position
            if instruction.frees:
                lines.append("    del " + ", ".join(f"v{register}" for register in instruction.frees))
        lines.append("    return [" + ", ".join(f"v{item.register}" for item in self.plan.outputs) + "]")
        return "\n".join(lines) + "\n", names, at

    def _bind(self, instruction: Instruction) -> tuple[Callable[..., Any], bool]:
        """The function of an instruction, and whether it belongs to one group."""
        name = communicates(instruction)
        if name == "wait_tensor":
            return end, False
        if name is not None:
            return getattr(self.groups[instruction.args[-1]], COLLECTIVES[name]), True
        return kernel(instruction.kernel), False

    def _arguments(self, instruction: Instruction) -> tuple[Any, ...]:
        """What a kernel is called with; a collective takes its operand and, if it reduces, the operation."""
        if instruction.kernel == "dtorch.keep_first":
            source, axis = instruction.args
            return source, self.coordinate[axis]
        name = communicates(instruction)
        if name in COLLECTIVES:
            return instruction.args[:2] if name in ("all_reduce", "reduce_scatter_tensor") else instruction.args[:1]
        return instruction.args

    # --- after a failure ------------------------------------------------------------------------------------------

    def _go_on(self, values: dict[int, Any], start: int, step: int) -> list[Any]:
        shapes: dict[int, Any] | None = None
        for position in range(start, len(self.plan.instructions)):
            instruction = self.plan.instructions[position]
            function, grouped = self._bind(instruction)
            arguments = self._arguments(instruction)
            failed = _failed_in((arguments, tuple(value for _, value in instruction.kwargs)), values)
            if grouped and failed is not None:
                shapes = shapes if shapes is not None else self._shapes()
                like = shapes[arguments[0].register]
                zeros = torch.zeros(like.shape, dtype=like.dtype, device=self.device)
                started = function(zeros, *arguments[1:])
                values[instruction.result] = _Doomed(started, failed)
                continue
            if failed is not None:
                values[instruction.result] = failed
                continue
            try:
                given = [self._value(item, values) for item in arguments]
                if function is end and type(given[0]) is _Doomed:
                    values[instruction.result] = given[0].end()
                    continue
                named = {key: self._value(item, values) for key, item in instruction.kwargs}
                values[instruction.result] = function(*given, **named)
            except Exception as error:
                values[instruction.result] = Failed(error.with_traceback(None), position, step)
            for register in instruction.frees:
                values.pop(register, None)
        return [values[item.register] for item in self.plan.outputs]

    def _value(self, item: Any, values: dict[int, Any]) -> Any:
        if isinstance(item, Ref):
            return values[item.register]
        if isinstance(item, (tuple, list)):
            return type(item)(self._value(part, values) for part in item)
        return resolve(item, self.plan.mesh_shape, self.coordinate)

    def _shapes(self) -> dict[int, Any]:
        """Every register as a tensor without data: the plan run on the meta device at this coordinate."""
        found: dict[int, Any] = {}
        for item in self.plan.inputs:
            shape = local_shape(item.shape, item.spec, self.plan.mesh_shape, self.coordinate)
            found[item.register] = torch.empty(shape, dtype=item.dtype, device="meta")
        for instruction in self.plan.instructions:
            if communicates(instruction) is not None:
                found[instruction.result] = self._meta_of(instruction, found[instruction.args[0].register])
                continue
            given = [self._value(item, found) for item in self._arguments(instruction)]
            named = {key: self._value(item, found) for key, item in instruction.kwargs}
            given = [torch.device("meta") if isinstance(item, torch.device) else item for item in given]
            if "device" in named:
                named["device"] = torch.device("meta")
            found[instruction.result] = kernel(instruction.kernel)(*given, **named)
        return found

    def _meta_of(self, instruction: Instruction, source: torch.Tensor) -> torch.Tensor:
        name = communicates(instruction)
        if name in ("wait_tensor", "all_reduce", "all_to_all_single"):
            return source
        size = self.groups[instruction.args[-1]].size
        first = source.shape[0] * size if name == "all_gather_into_tensor" else source.shape[0] // size
        return source.new_empty((first, *source.shape[1:]))


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left; on CPU torch has no class for it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


def _make_room(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Doomed:
    """A collective that had to be taken part in, though its result is of no use."""

    def __init__(self, started: Started, failed: Failed) -> None:
        self.started, self.failed = started, failed

    def end(self) -> Failed:
        try:
            self.started.end()
        except Exception:  # the first failure is the one to tell
            pass
        return self.failed


def _failed_in(item: Any, values: dict[int, Any]) -> Failed | None:
    if isinstance(item, Ref):
        found = values[item.register]
        return found if type(found) is Failed else None
    if isinstance(item, (tuple, list)):
        for part in item:
            found = _failed_in(part, values)
            if found is not None:
                return found
    return None


def communicates(instruction: Instruction) -> str | None:
    """The collective that an instruction starts, "wait_tensor", or None for everything else."""
    return instruction.kernel.split(".")[1] if instruction.kernel.startswith("_c10d_functional.") else None


def axes_used(plan: Plan) -> list[str]:
    """Names of the axes that a plan communicates along, by first use."""
    names: dict[str, None] = {}
    for instruction in plan.instructions:
        if communicates(instruction) in COLLECTIVES:
            names.setdefault(instruction.args[-1])
    return list(names)


def members_along(
    mesh_shape: Sequence[int], device_ids: Sequence[int], coordinate: Sequence[int], axis: int
) -> list[int]:
    """Device ids along an axis through a coordinate."""
    found = []
    for index in range(mesh_shape[axis]):
        at = [*coordinate[:axis], index, *coordinate[axis + 1 :]]
        position = 0
        for size, here in zip(mesh_shape, at):
            position = position * size + here
        found.append(device_ids[position])
    return found


def _coordinate(position: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(mesh_shape):
        found.append(position % size)
        position //= size
    return tuple(reversed(found))
