"""The few operations of DTorch's own that stand in graphs beside ATen overloads.

They are plain functions, so a graph prints and compares them by name. In a *global* graph only `redistribute`
appears; the rest belong to *local* graphs, where the mesh coordinate is known only at run time: their integer
results are expressions of it. The runtime gives them their meaning (`dtorch.runtime.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.ir.layout import Spec


def redistribute(value: torch.Tensor, source: Spec, target: Spec) -> torch.Tensor:
    """Global level: the same logical values, placed as `target` instead of `source` (each a mesh-wide Spec)."""
    return value


def local_size(size: int, cuts: tuple[tuple[int, int, int], ...]) -> int:
    """Local level: elements of a dimension of `size` that this device holds; `cuts` are `(outer, unit, mesh axis)`."""
    raise RuntimeError("local_size has a value on a device only")


def local_begin(size: int, cuts: tuple[tuple[int, int, int], ...]) -> int:
    """Local level: index of this device's first unit within the one interval that `cuts` cut (same `outer`, `unit`)."""
    raise RuntimeError("local_begin has a value on a device only")


INTEGER_FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "min": min,
    "max": max,
}


def integer(function: str, *operands: int) -> int:
    """Local level: arithmetic on such integers; `function` is "add", "sub", "mul", "floordiv", "min" or "max"."""
    raise RuntimeError("integer has a value on a device only")


def keep_first(value: torch.Tensor, axis: int) -> torch.Tensor:
    """Local level, Whole → Pending(sum) exactly: coordinate 0 of mesh axis `axis` keeps the value, others zeros."""
    raise RuntimeError("keep_first has a value on a device only")


def slice_scatter_in_place(
    value: torch.Tensor, source: torch.Tensor, dim: int, start: int | None, end: int | None, step: int
) -> torch.Tensor:
    """Scheduled level: `aten.slice_scatter` into the value's own bytes; the result is the value itself."""
    torch.ops.aten.slice.Tensor(value, dim, start, end, step).copy_(source)
    return value


LOCAL_INTEGERS: tuple[Any, ...] = (local_size, local_begin, integer)
