"""Generate the one Python function that runs a plan for all coordinates of a mesh at once.

In: a plan. Out: a function of the inputs' data, straight-line and with explicit deletes. A register that varies
along no axis is a tensor and its instruction one call; one that varies is a list over the coordinates of its
axes (row-major, in mesh order) and its instruction one comprehension. An instruction that writes in place into a
register which several of its coordinates share writes into a copy for each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from dtorch.ir.plan import Instruction, Plan, Ref, evaluate, expression_axes, is_expression
from dtorch.runtime.kernels import all_gather, all_to_all, kernel, reduce_parts, reduce_scatter
from dtorch.runtime.parts import varying_axes

Axes = tuple[int, ...]


def compile_lockstep(plan: Plan) -> tuple[Callable[..., Any], str, dict[int, int]]:
    """The function of a plan, its source, and the position of the instruction behind each source line."""
    writer = _Writer(plan)
    source = writer.write()
    namespace = dict(writer.constants)
    exec(compile(source, "<dtorch plan>", "exec"), namespace)  # noqa: S102
    return namespace["run"], source, writer.lines


class _Writer:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.shape = plan.mesh_shape
        self.axes: dict[int, Axes] = {}
        self.constants: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._kernels: dict[str, str] = {}
        self.lines: dict[int, int] = {}
        self._donated = {item.register for item in plan.inputs}  # inputs, and what is written into their bytes

    def write(self) -> str:
        plan, lines = self.plan, []
        for item in plan.inputs:
            self.axes[item.register] = varying_axes(item.spec, self.shape)
        for position, instruction in enumerate(plan.instructions):
            lines.append("    " + self._instruction(instruction))
            self.lines[len(lines) + 1] = position
            if instruction.frees:
                lines.append("    del " + ", ".join(f"v{register}" for register in instruction.frees))
        results = ", ".join(self._result(item.register, varying_axes(item.spec, self.shape)) for item in plan.outputs)
        parameters = ", ".join(f"v{item.register}" for item in plan.inputs)
        body = "\n".join(lines)
        return f"def run({parameters}):\n{body}\n    return ({results}{',' if plan.outputs else ''})\n"

    # --- instructions ---------------------------------------------------------------------------------------------

    def _instruction(self, instruction: Instruction) -> str:
        if instruction.kernel.startswith("_c10d_functional."):
            return self._collective(instruction)
        if instruction.kernel == "dtorch.keep_first":
            return self._keep_first(instruction)
        items = [*instruction.args, *(value for _, value in instruction.kwargs)]
        axes = tuple(sorted(set().union(*[self._axes_of(item) for item in items]))) if items else ()
        self.axes[instruction.result] = axes
        streams: dict[str, str] = {}  # iterable → loop variable
        args = [self._argument(item, axes, streams) for item in instruction.args]
        args += [f"{key}={self._argument(value, axes, streams)}" for key, value in instruction.kwargs]
        if _writes_in_place(instruction.kernel):
            written = instruction.args[0].register
            if written in self._donated:
                self._donated.add(instruction.result)
            elif self.axes[written] != axes:
                args[0] = f"{self._kernel('aten.clone.default')}({args[0]})"
        call = f"{self._kernel(instruction.kernel)}({', '.join(args)})"
        return f"v{instruction.result} = {self._loop(call, streams)}" if axes else f"v{instruction.result} = {call}"

    @staticmethod
    def _loop(call: str, streams: dict[str, str]) -> str:
        if len(streams) == 1:
            ((iterable, variable),) = streams.items()
            return f"[{call} for {variable} in {iterable}]"
        return f"[{call} for {', '.join(streams.values())} in zip({', '.join(streams)})]"

    def _axes_of(self, item: Any) -> set[int]:
        if isinstance(item, Ref):
            return set(self.axes[item.register])
        if is_expression(item):
            return {axis for axis in expression_axes(item) if self.shape[axis] > 1}
        if isinstance(item, (tuple, list)):
            return set().union(*[self._axes_of(part) for part in item]) if item else set()
        return set()

    def _argument(self, item: Any, axes: Axes, streams: dict[str, str]) -> str:
        if isinstance(item, Ref):
            own = self.axes[item.register]
            if not own:
                return f"v{item.register}"
            return streams.setdefault(self._spread(item.register, own, axes), f"a{len(streams)}")
        if is_expression(item):
            if not self._axes_of(item):
                return repr(evaluate(item, self.shape, (0,) * len(self.shape)))
            values = tuple(evaluate(item, self.shape, coordinate) for coordinate in self._coordinates(axes))
            return streams.setdefault(self._constant(values), f"a{len(streams)}")
        if isinstance(item, tuple):
            return "(" + "".join(self._argument(part, axes, streams) + ", " for part in item) + ")"
        if isinstance(item, list):
            return "[" + ", ".join(self._argument(part, axes, streams) for part in item) + "]"
        if item is None or type(item) in (bool, int, str):
            return repr(item)
        return self._constant(item)

    def _spread(self, register: int, own: Axes, axes: Axes) -> str:
        """A register's list, repeated where `axes` has coordinates that the register does not vary along."""
        if own == axes:
            return f"v{register}"
        index = self._constant(tuple(self._position(coordinate, own) for coordinate in self._coordinates(axes)))
        return f"[v{register}[i] for i in {index}]"

    def _result(self, register: int, wanted: Axes) -> str:
        """A result over exactly the axes that its spec says it varies along."""
        own = self.axes[register]
        if own == wanted:
            return f"v{register}"
        if not wanted:
            return f"v{register}[0]"
        if not own:
            return f"[v{register}] * {len(self._coordinates(wanted))}"
        index = self._constant(tuple(self._position(coordinate, own) for coordinate in self._coordinates(wanted)))
        return f"[v{register}[i] for i in {index}]"

    def _keep_first(self, instruction: Instruction) -> str:
        source, axis = instruction.args
        own = self.axes[source.register]
        axes = tuple(sorted({*own, axis})) if self.shape[axis] > 1 else own
        self.axes[instruction.result] = axes
        if not axes:
            return f"v{instruction.result} = v{source.register}"
        keep = self._kernel(instruction.kernel)
        index = self._constant(tuple(coordinate[axis] for coordinate in self._coordinates(axes)))
        if not own:
            return f"v{instruction.result} = [{keep}(v{source.register}, i) for i in {index}]"
        parts = self._spread(source.register, own, axes)
        return f"v{instruction.result} = [{keep}(a, i) for a, i in zip({parts}, {index})]"

    # --- collectives ----------------------------------------------------------------------------------------------

    def _collective(self, instruction: Instruction) -> str:
        name = instruction.kernel.split(".")[1]
        result, source = instruction.result, instruction.args[0].register
        own = self.axes[source]
        if name == "wait_tensor":
            self.axes[result] = own
            return f"v{result} = v{source}"
        axis = self.plan.axis_names.index(instruction.args[-1])
        spread = tuple(sorted({*own, axis}))
        left = tuple(a for a in spread if a != axis)
        parts = f"v{source}" if own == spread else self._spread_any(source, own, spread)
        groups = [
            tuple(
                self._position(self._with(coordinate, axis, k), spread) for k in range(self.shape[axis])
            )
            for coordinate in self._coordinates(left)
        ]
        if name in ("all_reduce", "all_gather_into_tensor"):
            self.axes[result] = left
            combine = self._function(reduce_parts if name == "all_reduce" else all_gather)
            extra = f", {instruction.args[1]!r}" if name == "all_reduce" else ""
            if not left:
                return f"v{result} = {combine}({parts}{extra})"
            index = self._constant(tuple(groups))
            return f"parts = {parts}; v{result} = [{combine}([parts[i] for i in g]{extra}) for g in {index}]; del parts"
        self.axes[result] = spread
        combine = self._function(reduce_scatter if name == "reduce_scatter_tensor" else all_to_all)
        extra = f", {instruction.args[1]!r}" if name == "reduce_scatter_tensor" else ""
        index = self._constant(tuple(groups))
        deal = self._function(_deal)
        return f"v{result} = {deal}({parts}, {index}, {combine}{extra})"

    def _spread_any(self, register: int, own: Axes, axes: Axes) -> str:
        if not own:
            return f"[v{register}] * {len(self._coordinates(axes))}"
        return self._spread(register, own, axes)

    # --- names ----------------------------------------------------------------------------------------------------

    def _kernel(self, name: str) -> str:
        if name not in self._kernels:
            self._kernels[name] = f"f{len(self._kernels)}"
            self.constants[self._kernels[name]] = kernel(name)
        return self._kernels[name]

    def _function(self, function: Callable[..., Any]) -> str:
        self.constants[function.__name__] = function
        return function.__name__

    def _constant(self, item: Any) -> str:
        key = (type(item).__name__, repr(item))
        if key not in self._names:
            self._names[key] = f"k{len(self._names)}"
            self.constants[self._names[key]] = item
        return self._names[key]

    # --- coordinates ----------------------------------------------------------------------------------------------

    def _coordinates(self, axes: Axes) -> list[tuple[int, ...]]:
        ranges = [range(size) if axis in axes else (0,) for axis, size in enumerate(self.shape)]
        return list(itertools.product(*ranges))

    def _position(self, coordinate: tuple[int, ...], axes: Axes) -> int:
        index = 0
        for axis in axes:
            index = index * self.shape[axis] + coordinate[axis]
        return index

    @staticmethod
    def _with(coordinate: tuple[int, ...], axis: int, index: int) -> tuple[int, ...]:
        return (*coordinate[:axis], index, *coordinate[axis + 1 :])


def _writes_in_place(kernel_name: str) -> bool:
    """Whether a kernel writes into its first argument: torch's names end in an underscore then."""
    if kernel_name == "dtorch.slice_scatter_in_place":
        return True
    name = kernel_name.split(".")[1] if kernel_name.startswith("aten.") else ""
    return name.endswith("_") and not name.endswith("__")


def _deal(parts: list[Any], groups: tuple[tuple[int, ...], ...], combine: Callable[..., Any], *extra: Any) -> list[Any]:
    """Run a collective that gives each member its own result, for every group."""
    results: list[Any] = [None] * len(parts)
    for group in groups:
        for member, result in zip(group, combine([parts[i] for i in group], *extra)):
            results[member] = result
    return results
