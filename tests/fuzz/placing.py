"""Placements for tests: which a tensor can have, which combinations of several tensors are tried, and placing them.

In: tensors and a mesh. Out: lists with the placements of each tensor; distributed tensors. A tensor placed as
Partial has parts that differ on every device, and none of which is zero, so that a rule that is wrong for sums shows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from math import prod
from typing import Any

import torch

import dtorch
from dtorch import Partial, Replicate, Shard

Plan = list[list[Any]]  # for each tensor its placements, one for each mesh axis
FULL = int(os.environ.get("ALL_PLACEMENTS", "128"))  # more combinations than this are covered by pairs
FACTORS = {1: (1,), 2: (2, -1), 3: (4, -2, -1)}  # the parts of a sum; added in order they are powers of two, so exact


def choices(tensor: torch.Tensor) -> list[Any]:
    """What one mesh axis can do with a tensor."""
    found = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]
    return found if tensor.dtype is torch.bool else [*found, Partial()]


def plans_of(tensors: Sequence[torch.Tensor], mesh: Any) -> list[Plan]:
    """Every combination of placements of the tensors; where they are too many, some that hold all pairs.

    A pair is what any two tensors do with any two axes, or one tensor with both: so every placement of each tensor is
    there. On meshes of one axis sums are joined by the other reductions, of one tensor at a time.
    """
    axes = mesh.ndim
    free = [choices(tensor) for tensor in tensors for _ in range(axes)]
    rows = list(product(*free)) if prod(map(len, free)) <= FULL else pairs(free)
    plans: list[Plan] = [[list(row[i * axes : (i + 1) * axes]) for i in range(len(tensors))] for row in rows]
    kinds = {2: ("avg", "max", "min"), 3: ("max", "min")} if axes == 1 else {}
    for i, tensor in enumerate(tensors):
        if tensor.dtype.is_floating_point:
            before, after = [[Replicate()]] * i, [[Replicate()]] * (len(tensors) - i - 1)
            plans += [[*before, [Partial(kind)], *after] for kind in kinds.get(mesh.size(), ())]
    return plans


def pairs(free: Sequence[Sequence[Any]]) -> list[Any]:
    """Rows with one of each list's items, such that any two items of different lists meet in one row at least."""
    order = sorted(range(len(free)), key=lambda i: -len(free[i]))
    sizes = [len(free[i]) for i in order]
    open_pairs = {
        (a, i, b, j) for a, b in combinations(range(len(sizes)), 2) for i in range(sizes[a]) for j in range(sizes[b])
    }
    rows = []
    while open_pairs:
        a, i, b, j = min(open_pairs)
        row: dict[int, int] = {a: i, b: j}
        for c in range(len(sizes)):
            if c not in row:
                row[c] = max(range(sizes[c]), key=lambda k: _news(open_pairs, {**row, c: k}, c))
        open_pairs -= {(x, row[x], y, row[y]) for x, y in combinations(range(len(sizes)), 2)}
        found: list[Any] = [None] * len(sizes)
        for position, k in row.items():
            found[order[position]] = free[order[position]][k]
        rows.append(found)
    return rows


def _news(open_pairs: set, row: dict[int, int], new: int) -> int:
    return sum(
        (min(other, new), row[min(other, new)], max(other, new), row[max(other, new)]) in open_pairs
        for other in row
        if other != new
    )


def place(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """The tensor on a mesh. Axes with a sum, a maximum or a minimum get a dim of parts first, which is then reduced."""
    value, dims = tensor.clone(), []
    for axis, placed in enumerate(placements):
        if isinstance(placed, Partial) and placed.reduce_op != "avg":
            value = torch.stack(_parts(value, mesh.shape[axis], placed.reduce_op))
            dims.insert(0, axis)
    cut = [Shard(p.dim + len(dims)) if isinstance(p, Shard) else p for p in placements]
    for dim, axis in enumerate(dims):
        cut[axis] = Shard(dim)
    found = dtorch.distribute_tensor(value, mesh, cut)
    for axis in dims:
        kind = placements[axis].reduce_op
        found = found.sum(0, dtype=tensor.dtype) if kind == "sum" else found.amax(0) if kind == "max" else found.amin(0)
    # A dim of size 1 that is cut is as good as another one to the reduction.
    return found if found.placements == list(placements) else found.redistribute(placements=list(placements))


def _parts(value: torch.Tensor, count: int, kind: str) -> list[torch.Tensor]:
    if kind == "sum":
        return [value * factor for factor in FACTORS[count]]
    step = 1 if kind == "max" else -1
    return [value - step * i for i in range(count)][::-1]
