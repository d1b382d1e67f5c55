"""Devices simulated in the process: all coordinates of a mesh run one plan in lockstep, instruction by instruction.

In: plans and host tensors. Out: results. Nothing is started and nothing can deadlock; a mesh of hundreds of
devices is fine. A value that is equal along a mesh axis is kept and computed once for the whole axis: `data` is
one tensor where it varies along no axis, else a list over the coordinates of the axes along which it varies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.ir.layout import Spec
from dtorch.ir.plan import Plan
from dtorch.runtime.base import LoadedPlan, Runtime
from dtorch.runtime.lockstep import compile_lockstep
from dtorch.runtime.parts import coordinates, cut, join, varying_axes
from dtorch.torch_private import plain_execution


class SimulatedPlan(LoadedPlan):
    """A plan compiled to one Python function for all coordinates."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.function, self.source, self._lines = compile_lockstep(plan)

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run all coordinates once. An exception of a kernel is raised as itself, with the user's line added."""
        try:
            with plain_execution(track_views=any(map(_requires_grad, inputs))):
                return self.function(*inputs)
        except Exception as error:
            self._add_line(error)
            raise

    def _add_line(self, error: Exception) -> None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self.function.__code__ and trace.tb_lineno in self._lines:
                instruction = self.plan.instructions[self._lines[trace.tb_lineno]]
                where = self.plan.lines[instruction.line] or "a line that is not known"
                axes = ", ".join(f"{n}={s}" for n, s in zip(self.plan.axis_names, self.plan.mesh_shape))
                message = f"{error}\n  in {instruction.kernel} on mesh({axes}), from {where}"
                if len(error.args) <= 1:
                    error.args = (message,)
                return
            trace = trace.tb_next


def _requires_grad(data: Any) -> bool:
    """Whether a value does; None stands for one that could not be computed and is not needed."""
    return any(map(_requires_grad, data)) if type(data) is list else data is not None and data.requires_grad


class SimulatedRuntime(Runtime):
    """A mesh of `mesh_shape` devices, all of them this process's `device`."""

    def __init__(self, mesh_shape: tuple[int, ...], device: torch.device | None = None) -> None:
        self.mesh_shape = tuple(mesh_shape)
        self.device = device or torch.device("cpu")

    def load(self, plan: Plan) -> SimulatedPlan:
        """Compile a plan for this mesh."""
        return SimulatedPlan(plan)

    def place(self, tensor: torch.Tensor, spec: Spec, copy: bool = True) -> Any:
        """Cut a full host tensor; parts have memory of their own when `copy`."""
        grad = tensor.requires_grad
        source = tensor.detach()
        if source.device != self.device:
            source, copy = source.to(self.device), False
        axes = varying_axes(spec, self.mesh_shape)
        if not axes:
            whole = source.clone() if copy else source
            return whole.requires_grad_() if grad and whole is not tensor else whole
        parts = []
        for coordinate in coordinates(axes, self.mesh_shape):
            part = cut(source, spec, self.mesh_shape, coordinate)
            if copy or not part.is_contiguous():
                part = part.clone(memory_format=torch.contiguous_format)
            parts.append(part.requires_grad_() if grad else part)
        return parts

    def place_parts(self, spec: Spec, read: Callable[[tuple[int, ...]], torch.Tensor]) -> Any:
        """Read each distinct part."""
        axes = varying_axes(spec, self.mesh_shape)
        parts = [self._brought(read(coordinate)) for coordinate in coordinates(axes, self.mesh_shape)]
        return parts if axes else parts[0]

    def _brought(self, part: torch.Tensor) -> torch.Tensor:
        if part.device == self.device:
            return part
        return part.detach().to(self.device).requires_grad_(part.requires_grad)

    def gather(self, data: Any, shape: tuple[int, ...], dtype: torch.dtype, spec: Spec) -> torch.Tensor:
        """Put parts together; a value that is whole everywhere is returned as it is."""
        return join(data if isinstance(data, list) else [data], shape, dtype, spec, self.mesh_shape)

    def part(self, data: Any, spec: Spec, coordinate: tuple[int, ...]) -> torch.Tensor:
        """The part of one coordinate."""
        axes = varying_axes(spec, self.mesh_shape)
        if not axes:
            return data.detach().clone()
        own = tuple(at if axis in axes else 0 for axis, at in enumerate(coordinate))
        return data[coordinates(axes, self.mesh_shape).index(own)].detach().clone()

    def close(self) -> None:
        """Nothing outlives its references."""

