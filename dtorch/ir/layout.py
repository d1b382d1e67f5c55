"""How one logical tensor lies on a mesh: a placement for each mesh axis, with units.

In: a logical shape and a `Spec` (one `Whole`, `Pending` or `Split` for each mesh axis, in mesh order).
Out: the local sizes and offsets of any device, as plain arithmetic; no tensors and no torch.distributed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any


@dataclass(frozen=True)
class Whole:
    """Every coordinate of the axis holds the same values (public name: Replicate)."""

    def __repr__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Pending:
    """The value is the reduction, over the axis, of what the coordinates hold (public name: Partial)."""

    op: str = "sum"

    def __repr__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


@dataclass(frozen=True)
class Split:
    """Dimension `dim` is cut over the axis, in whole units.

    The dimension's `size` elements are read as the product `outer * parts * unit`; `parts` is what is cut,
    with the sizes of `torch.chunk(parts, axis size)`. `outer=1, unit=1` is torch's own `Shard(dim)`.
    576 query rows of 9 heads are `Split(0, unit=64)`: 5 and 4 heads on two devices. The middle factor of a
    fused (3, heads, head_dim) projection is `Split(0, outer=3, unit=head_dim)`.
    """

    dim: int
    outer: int = 1
    unit: int = 1

    def __repr__(self) -> str:
        inner = "" if self.outer == 1 and self.unit == 1 else f",{self.outer}x_x{self.unit}"
        return f"S({self.dim}{inner})"


Placed = Whole | Pending | Split
Spec = tuple[Placed, ...]
WHOLE = Whole()
PENDING = Pending()


@cache
def chunk_bounds(parts: int, count: int, index: int) -> tuple[int, int]:
    """Begin and end of piece `index` of `torch.chunk(parts, count)`; pieces past the end are empty."""
    piece = -(-parts // count) if parts else 0
    return min(index * piece, parts), min((index + 1) * piece, parts)


def split_parts(size: int, split: Split) -> int:
    """How many units there are to hand out in a dimension of `size` elements."""
    return size // (split.outer * split.unit)


@lru_cache(maxsize=65536)
def local_bounds(size: int, cuts: tuple[tuple[int, int, int, int], ...]) -> tuple[tuple[int, int, int, int], ...]:
    """Resolve nested cuts of one dimension of `size` elements to `(outer, unit, begin, end)` per interval.

    `cuts` holds `(outer, unit, axis size, coordinate)` for each axis that cuts the dimension, in mesh order;
    cuts of one interval nest, as in torch: a later axis cuts what an earlier one left. `begin` and `end`
    count units within the uncut interval.
    """
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for outer, unit, count, index in cuts:
        begin, end = found.get((outer, unit), (0, size // (outer * unit)))
        low, high = chunk_bounds(end - begin, count, index)
        found[outer, unit] = begin + low, begin + high
    return tuple((outer, unit, *bounds) for (outer, unit), bounds in found.items())


def dim_cuts(spec: Spec, dim: int, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple:
    """The `cuts` argument of `local_bounds` for dimension `dim` at a mesh coordinate."""
    return tuple(
        (placed.outer, placed.unit, mesh_shape[axis], coordinate[axis])
        for axis, placed in enumerate(spec)
        if type(placed) is Split and placed.dim == dim
    )


def local_dim(size: int, dim: int, spec: Spec, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> int:
    """Local size of one dimension at a mesh coordinate."""
    local = size
    for outer, unit, begin, end in local_bounds(size, dim_cuts(spec, dim, mesh_shape, coordinate)):
        whole = size // (outer * unit)
        local = local // whole * (end - begin) if whole else 0
    return local


def local_shape(
    shape: tuple[int, ...], spec: Spec, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    """Local shape of a tensor of logical `shape` at a mesh coordinate."""
    if not any(type(placed) is Split for placed in spec):
        return tuple(shape)
    return tuple(local_dim(size, dim, spec, mesh_shape, coordinate) for dim, size in enumerate(shape))


def is_even(size: int, dim: int, spec: Spec, mesh_shape: tuple[int, ...]) -> bool:
    """Whether every coordinate has the same local size of this dimension."""
    parts: dict[tuple[int, int], int] = {}
    for axis, placed in enumerate(spec):
        if type(placed) is Split and placed.dim == dim:
            key = placed.outer, placed.unit
            left = parts.get(key, split_parts(size, placed))
            if left % mesh_shape[axis]:
                return False
            parts[key] = left // mesh_shape[axis]
    return True


def dim_pieces(size: int, bounds: tuple[tuple[int, int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """Read a dimension as nested factors, outermost first: `(factor size, begin, end)` of what is kept of each."""
    pieces, rest = [], size
    for outer, unit, begin, end in sorted(bounds, key=lambda bound: (-bound[1], bound[0])):
        parts = size // (outer * unit)
        gap = rest // (parts * unit) if parts else 1
        if gap > 1:
            pieces.append((gap, 0, gap))
        pieces.append((parts, begin, end))
        rest = unit
    if rest > 1 or not pieces:
        pieces.append((rest, 0, rest))
    return tuple(pieces)


def take_local(tensor: Any, spec: Spec, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Any:
    """The part of a full tensor that a device stores: a view where one contiguous cut a dimension allows it.

    `tensor` is anything with torch's `dim`, `shape`, `narrow` and `reshape`. Pending axes are not looked at.
    """
    for dim in range(tensor.dim()):
        size = tensor.shape[dim]
        bounds = local_bounds(size, dim_cuts(spec, dim, mesh_shape, coordinate))
        if not bounds:
            continue
        if len(bounds) == 1 and bounds[0][0] == 1:
            _, unit, begin, end = bounds[0]
            tensor = tensor.narrow(dim, begin * unit, (end - begin) * unit)
            continue
        pieces = dim_pieces(size, bounds)
        head, tail = tensor.shape[:dim], tensor.shape[dim + 1 :]
        view = tensor.reshape(*head, *(piece[0] for piece in pieces), *tail)
        for position, (_, begin, end) in enumerate(pieces):
            view = view.narrow(dim + position, begin, end - begin)
        local = 1
        for _, begin, end in pieces:
            local *= end - begin
        tensor = view.reshape(*head, local, *tail)
    return tensor


def put_local(full: Any, local: Any, spec: Spec, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
    """Write a device's part into a contiguous full tensor: the inverse of `take_local`, for assembling results."""
    view, source = full, local
    sizes: list[int] = []
    spans: list[tuple[int, int]] = []
    for dim, size in enumerate(full.shape):
        for factor, begin, end in dim_pieces(size, local_bounds(size, dim_cuts(spec, dim, mesh_shape, coordinate))):
            sizes.append(factor)
            spans.append((begin, end))
    view = full.view(sizes)
    for position, (begin, end) in enumerate(spans):
        view = view.narrow(position, begin, end - begin)
    view.copy_(source.reshape(view.shape))
