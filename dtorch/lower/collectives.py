"""One hop of a redistribution as local operations: padding, the functional collective and its wait, unpadding.

In: a local node, the value's logical shape and a `Hop`. Out: the local node placed as the hop says. Stored
tensors may be uneven (torch.chunk sizes); only what is sent is padded, to the largest piece of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from dtorch.ir import ops
from dtorch.ir.layout import WHOLE, Placed, Spec, Split
from dtorch.lower.context import Integer, LocalBuilder
from dtorch.sharding.redistribute import Hop
from dtorch.torch_private import fake_tensor, functional_collectives

aten = torch.ops.aten


@dataclass(frozen=True)
class Region:
    """A dimension around the interval that a hop cuts, as (outer, parts, inner) elements on this device.

    `parts`: units this device would hold without the hop's axis; `mine`: with it. `piece`: the largest `mine`.
    """

    dim: int
    outer: Integer
    parts: Integer
    mine: Integer
    piece: Integer
    inner: Integer
    begin: Integer


def lower_hop(builder: LocalBuilder, value: Node, shape: tuple[int, ...], hop: Hop) -> Node:
    """Emit one hop; `shape` is the logical shape of the value."""
    return _LOWERINGS[hop.kind](builder, value, shape, hop)


def _region(builder: LocalBuilder, shape: tuple[int, ...], axis: int, split: Split, spec: Spec) -> Region:
    """Measure the interval of `split` where `spec` places the other axes (and `split` itself on `axis`)."""
    size = shape[split.dim]
    parts = size // (split.outer * split.unit)
    outer_spec: list[Placed] = []
    inner_spec: list[Placed] = []
    same: list[Placed] = []
    for other_axis, placed in enumerate(spec):
        outer_spec.append(WHOLE)
        inner_spec.append(WHOLE)
        same.append(WHOLE)
        if other_axis == axis or type(placed) is not Split or placed.dim != split.dim:
            continue
        if (placed.outer, placed.unit) == (split.outer, split.unit):
            same[-1] = Split(0)
        elif placed.unit >= split.unit * parts:
            outer_spec[-1] = Split(0, placed.outer, placed.unit // (split.unit * parts))
        else:
            inner_spec[-1] = Split(0, placed.outer // (split.outer * parts), placed.unit)
    without, mine = tuple(same), (*same[:axis], Split(0), *same[axis + 1 :])
    count = builder.mesh_shape[axis]
    left = builder.size(parts, 0, without)
    piece = builder.integer("floordiv", builder.integer("add", left, count - 1), count)
    begin = builder.begin(parts, 0, mine)
    if any(type(p) is Split for p in without):
        begin = builder.integer("sub", begin, builder.begin(parts, 0, without))
    return Region(
        split.dim,
        builder.size(split.outer, 0, tuple(outer_spec)),
        left,
        builder.size(parts, 0, mine),
        piece,
        builder.size(split.unit, 0, tuple(inner_spec)),
        begin,
    )


def _times(builder: LocalBuilder, *factors: Integer) -> Integer:
    result: Integer = 1
    for factor in factors:
        result = builder.integer("mul", result, factor)
    return result


def _open(builder: LocalBuilder, value: Node, shape: list[Integer], region: Region, held: Integer) -> tuple[Node, int]:
    """Make the cut interval lead its dimension: split off `outer` where there is one. Gives the dim to work on."""
    if region.outer == 1:
        return value, region.dim
    new = [*shape[: region.dim], region.outer, _times(builder, held, region.inner), *shape[region.dim + 1 :]]
    return builder.emit(aten.reshape.default, value, new), region.dim + 1


def _close(builder: LocalBuilder, value: Node, shape: list[Integer], region: Region, held: Integer) -> Node:
    if region.outer == 1:
        return value
    merged = _times(builder, region.outer, held, region.inner)
    return builder.emit(aten.reshape.default, value, [*shape[: region.dim], merged, *shape[region.dim + 1 :]])


def _pad(builder: LocalBuilder, value: Node, dim: int, have: Integer, want: Integer) -> Node:
    missing = builder.integer("sub", want, have)
    if missing == 0:
        return value
    behind = value.meta["val"].dim() - 1 - dim
    return builder.emit(aten.constant_pad_nd.default, value, [0, 0] * behind + [0, missing])


def _trim(builder: LocalBuilder, value: Node, dim: int, have: Integer, want: Integer) -> Node:
    if have is want or (isinstance(have, int) and have == want):
        return value
    return builder.emit(aten.slice.Tensor, value, dim, 0, want)


def _lead(builder: LocalBuilder, value: Node, shape: list[Integer], dim: int, count: int, piece: Integer) -> Node:
    """(…, count · piece, …) at `dim` → (count · …, piece, …): the chunks for each device one after another."""
    if dim == 0:
        return value
    split = builder.emit(aten.reshape.default, value, [*shape[:dim], count, piece, *shape[dim + 1 :]])
    rank = len(shape) + 1
    moved = builder.emit(aten.permute.default, split, [dim, *[d for d in range(rank) if d != dim]])
    first = _times(builder, count, shape[0])
    return builder.emit(aten.reshape.default, moved, [first, *shape[1:dim], piece, *shape[dim + 1 :]])


def _unlead(builder: LocalBuilder, value: Node, shape: list[Integer], dim: int, count: int) -> Node:
    """(count · …, piece, …) → (…, count · piece, …) at `dim`; `shape` is one device's contribution."""
    if dim == 0:
        return value
    split = builder.emit(aten.reshape.default, value, [count, *shape])
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
    moved = builder.emit(aten.permute.default, split, order)
    merged = _times(builder, count, shape[dim])
    return builder.emit(aten.reshape.default, moved, [*shape[:dim], merged, *shape[dim + 1 :]])


def _collective(builder: LocalBuilder, name: str, value: Node, first: Integer, *arguments: object) -> Node:
    """Start a collective on `value` and wait for it; its result has `first` elements in dim 0 (at coordinate 0)."""
    meta = value.meta["val"]
    if meta.dim():
        count = first if isinstance(first, int) else first.meta["val"]
        sizes = (count, *meta.shape[1:])
    else:
        sizes = ()
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(1, sizes[i + 1])
    result = fake_tensor(tuple(sizes), tuple(strides), meta.dtype, meta.device)
    started = builder.emit_known(functional_collectives()[name], result, value, *arguments)
    return builder.emit_known(functional_collectives()["wait_tensor"], result, started)


def _all_gather(builder: LocalBuilder, value: Node, shape: tuple[int, ...], hop: Hop) -> Node:
    count = builder.mesh_shape[hop.axis]
    region = _region(builder, shape, hop.axis, hop.cut_before, hop.before)
    local = builder.shape(shape, hop.before)
    value, dim = _open(builder, value, local, region, region.mine)
    piece = _times(builder, region.piece, region.inner)
    value = _pad(builder, value, dim, _times(builder, region.mine, region.inner), piece)
    sent = _opened_shape(builder, local, region, region.piece)
    value = _collective(
        builder, "all_gather_into_tensor", value, _times(builder, count, sent[0]), count, builder.axis_names[hop.axis]
    )
    value = _unlead(builder, value, sent, dim, count)
    whole = _times(builder, region.parts, region.inner)
    value = _trim(builder, value, dim, _times(builder, count, region.piece, region.inner), whole)
    return _close(builder, value, local, region, region.parts)


def _opened_shape(builder: LocalBuilder, local: list[Integer], region: Region, held: Integer) -> list[Integer]:
    """Shape after `_open` when the interval holds `held` units."""
    own = _times(builder, held, region.inner)
    middle = [own] if region.outer == 1 else [region.outer, own]
    return [*local[: region.dim], *middle, *local[region.dim + 1 :]]


def _all_reduce(builder: LocalBuilder, value: Node, shape: tuple[int, ...], hop: Hop) -> Node:
    first = builder.shape(shape, hop.before)[0] if shape else 1
    return _collective(builder, "all_reduce", value, first, hop.reduction, builder.axis_names[hop.axis])


def _reduce_scatter(builder: LocalBuilder, value: Node, shape: tuple[int, ...], hop: Hop) -> Node:
    count = builder.mesh_shape[hop.axis]
    region = _region(builder, shape, hop.axis, hop.cut_after, hop.after)
    local = builder.shape(shape, hop.before)
    value, dim = _open(builder, value, local, region, region.parts)
    padded = _times(builder, count, region.piece, region.inner)
    value = _pad(builder, value, dim, _times(builder, region.parts, region.inner), padded)
    piece = _times(builder, region.piece, region.inner)
    sent = _opened_shape(builder, local, region, region.piece)
    value = _lead(builder, value, sent, dim, count, piece)
    value = _collective(
        builder, "reduce_scatter_tensor", value, sent[0], hop.reduction, count, builder.axis_names[hop.axis]
    )
    value = _trim(builder, value, dim, piece, _times(builder, region.mine, region.inner))
    return _close(builder, value, local, region, region.mine)


def _slice(builder: LocalBuilder, value: Node, shape: tuple[int, ...], hop: Hop) -> Node:
    region = _region(builder, shape, hop.axis, hop.cut_after, hop.after)
    local = builder.shape(shape, hop.before)
    value, dim = _open(builder, value, local, region, region.parts)
    start = _times(builder, region.begin, region.inner)
    end = builder.integer("add", start, _times(builder, region.mine, region.inner))
    value = builder.emit(aten.slice.Tensor, value, dim, start, end)
    return _close(builder, value, local, region, region.mine)


def _all_to_all(builder: LocalBuilder, value: Node, shape: tuple[int, ...], hop: Hop) -> Node:
    """Cut along another dim: every device sends each other one its chunk of the new dim."""
    count = builder.mesh_shape[hop.axis]
    gathered = _region(builder, shape, hop.axis, hop.cut_before, hop.before)
    scattered = _region(builder, shape, hop.axis, hop.cut_after, hop.after)
    local = builder.shape(shape, hop.before)
    # Work on (…, outer, parts · inner, …) for both dims; the later dim is opened first so positions stay valid.
    first, second = sorted((gathered, scattered), key=lambda region: -region.dim)
    sizes = list(local)
    dims: dict[int, int] = {}
    for region in (first, second):
        held = region.mine if region is gathered else region.parts
        opened = _opened_shape(builder, sizes, region, held)
        value, _ = _open(builder, value, sizes, region, held)
        shift = len(opened) - len(sizes)
        dims = {key: dim + shift for key, dim in dims.items()}
        dims[id(region)] = region.dim + shift
        sizes = opened
    from_dim, to_dim = dims[id(gathered)], dims[id(scattered)]
    piece = _times(builder, gathered.piece, gathered.inner)
    value = _pad(builder, value, from_dim, sizes[from_dim], piece)
    sizes[from_dim] = piece
    chunk = _times(builder, scattered.piece, scattered.inner)
    value = _pad(builder, value, to_dim, sizes[to_dim], _times(builder, count, chunk))
    sizes[to_dim] = chunk
    value = _lead(builder, value, sizes, to_dim, count, chunk)
    total = _times(builder, count, sizes[0])
    equal = [sizes[0]] * count
    value = _collective(builder, "all_to_all_single", value, total, equal, equal, builder.axis_names[hop.axis])
    value = _unlead(builder, value, sizes, from_dim, count)
    whole = _times(builder, gathered.parts, gathered.inner)
    value = _trim(builder, value, from_dim, _times(builder, count, piece), whole)
    mine = _times(builder, scattered.mine, scattered.inner)
    value = _trim(builder, value, to_dim, chunk, mine)
    if gathered.outer == 1 and scattered.outer == 1:
        return value
    return builder.emit(aten.reshape.default, value, builder.shape(shape, hop.after))


def _keep_first(builder: LocalBuilder, value: Node, shape: tuple[int, ...], hop: Hop) -> Node:
    return builder.emit_known(ops.keep_first, value.meta["val"], value, hop.axis)


_LOWERINGS = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "keep_first": _keep_first,
}
