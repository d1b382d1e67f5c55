"""Cutting a host tensor into the parts that devices hold, and putting parts together again.

In: a tensor or its parts, a spec, a mesh shape. Out: parts by coordinate, over the axes along which they differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from dtorch.ir.layout import PENDING, Pending, Spec, Split, Whole, put_local, take_local
from dtorch.runtime.kernels import reduce_parts

Coordinate = tuple[int, ...]


def varying_axes(spec: Spec, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes along which a value placed as `spec` may differ between coordinates."""
    return tuple(axis for axis, placed in enumerate(spec) if type(placed) is not Whole and mesh_shape[axis] > 1)


def coordinates(axes: Sequence[int], mesh_shape: Sequence[int]) -> list[Coordinate]:
    """All coordinates over some axes, zero on the others, row-major."""
    return list(itertools.product(*[range(size) if axis in axes else (0,) for axis, size in enumerate(mesh_shape)]))


def cut(tensor: torch.Tensor, spec: Spec, mesh_shape: tuple[int, ...], coordinate: Coordinate) -> torch.Tensor:
    """The part of a full tensor at a coordinate; of a pending one, coordinate 0 has it all. May share its bytes."""
    part = take_local(tensor, spec, mesh_shape, coordinate)
    if any(placed == PENDING and coordinate[axis] for axis, placed in enumerate(spec)):  # avg, max, min: equal parts
        return torch.zeros_like(part)
    return part


def join(
    parts: Sequence[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, spec: Spec, mesh_shape: tuple[int, ...]
) -> torch.Tensor:
    """The full tensor of parts over the varying axes, row-major. A single part is returned as it is."""
    axes = varying_axes(spec, mesh_shape)
    if not axes:
        return parts[0].detach()
    cuts = tuple(placed if type(placed) is Split else Whole() for placed in spec)
    pending = [placed for axis, placed in enumerate(spec) if type(placed) is Pending and axis in axes]
    first = spec[axes[0]]
    if len(axes) == 1 and type(first) is Split and first.outer == 1:
        return torch.cat([part.detach() for part in parts], first.dim)
    full = torch.empty(shape, dtype=dtype, device=parts[0].device)
    by_cut: dict[Coordinate, list[torch.Tensor]] = {}
    for coordinate, part in zip(coordinates(axes, mesh_shape), parts, strict=True):
        key = tuple(at if type(placed) is Split else 0 for at, placed in zip(coordinate, spec))
        by_cut.setdefault(key, []).append(part.detach())
    for coordinate, own in by_cut.items():
        whole = own[0] if not pending else reduce_parts(own, pending[0].op)
        put_local(full, whole, cuts, mesh_shape, coordinate)
    return full


def whole_shape(shapes: Mapping[Coordinate, tuple[int, ...]], spec: Spec) -> tuple[int, ...]:
    """The full shape of parts over the varying axes: along each dim, the sizes of the parts that cut it, added up."""
    found = []
    for dim in range(len(next(iter(shapes.values())))):
        cutting = {axis for axis, placed in enumerate(spec) if type(placed) is Split and placed.dim == dim}
        own = [shape for at, shape in shapes.items() if not any(c and a not in cutting for a, c in enumerate(at))]
        found.append(sum(shape[dim] for shape in own))
    return tuple(found)
