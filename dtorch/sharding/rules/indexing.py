"""Gathers and scatters: the dim that is indexed stays whole, index dims and all others are free.

An embedding may be cut along its vocabulary: each device looks up what it holds and leaves zeros for the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import LocalContext, OpCall, as_is, cuts_of, localizer, may_be_empty
from dtorch.sharding.rules.registry import Call, free_dims, replicated, rule

aten = torch.ops.aten


@rule("embedding")
def embedding(call: Call, weight: Any, index: Any, *rest: Any, **options: Any) -> Mapping:
    """Weight (v, e), index (...): v may be cut."""
    return call.notate("v e, ... -> ... e", weight, index, linear=((0,),))


@localizer("embedding")
def local_embedding(ctx: LocalContext, call: OpCall) -> Any:
    """Where the vocabulary is cut: look up the rows held here, zero the others."""
    weight, index = call.args[:2]
    spec, size = ctx.input_spec(0), call.meta_args[0].shape[0]
    cuts = cuts_of(spec, 0)
    if not cuts:
        return as_is(ctx, call)
    (placed,) = cuts
    begin = ctx.begin(size, 0, spec)
    held = ctx.integer("floordiv", ctx.local_size(size, 0, spec), placed.outer * placed.unit)
    part = index if placed.unit == 1 else ctx.call(aten.floor_divide.default, index, placed.unit)
    if placed.outer > 1:
        part = ctx.call(aten.remainder.Scalar, part, size // (placed.outer * placed.unit))
    part = ctx.call(aten.sub.Tensor, part, begin)
    absent = ctx.call(aten.bitwise_or.Tensor, ctx.call(aten.lt.Scalar, part, 0), ctx.call(aten.ge.Scalar, part, held))
    row = part
    if placed.unit > 1:
        inner = ctx.call(aten.remainder.Scalar, index, placed.unit)
        row = ctx.call(aten.add.Tensor, ctx.call(aten.mul.Tensor, part, placed.unit), inner)
    if placed.outer > 1:
        outer = ctx.call(aten.floor_divide.default, index, size // placed.outer)
        outer = ctx.call(aten.mul.Tensor, outer, ctx.integer("mul", held, placed.unit))
        row = ctx.call(aten.add.Tensor, row, outer)
    row = ctx.call(aten.masked_fill.Scalar, row, absent, 0)
    wrong = ctx.call(aten.bitwise_or.Tensor, ctx.call(aten.lt.Scalar, index, 0), ctx.call(aten.ge.Scalar, index, size))
    row = ctx.call(aten.masked_fill.Scalar, row, wrong, size + 1)  # fails as on one device, not silently
    if may_be_empty(size, 0, spec, ctx.mesh_shape):  # index 0 must exist
        weight = ctx.call(aten.constant_pad_nd.default, weight, [0, 0, 0, 1])
    found = ctx.call(aten.embedding.default, weight, row)
    return ctx.call(aten.masked_fill.Scalar, found, ctx.call(aten.unsqueeze.default, absent, -1), 0)


@rule("index_select")
def index_select(call: Call, x: Any, dim: int, index: Any) -> Mapping:
    """One dim of x is replaced by the index's."""
    before = free_dims(len(x.shape))
    after = list(before)
    if before:
        before[dim], after[dim] = "!v", "i"
    return call.build([before, ["i"] * len(index.shape)], [after], linear=((0,),))


@rule("index_copy", "index_add", "index_fill", "index_reduce")
def index_write(call: Call, x: Any, dim: int, index: Any, source: Any = None, *rest: Any, **options: Any) -> Mapping:
    """Writes along one dim, which is blocked; added rows may be cut among devices."""
    names = free_dims(len(x.shape))
    dim %= max(len(names), 1)
    whole = [*names[:dim], "!v", *names[dim + 1 :]] if names else []
    if call.name == "index_add":
        rows = [*names[:dim], "i", *names[dim + 1 :]]
        index_dims = ["i"] * len(index.shape)
        rows = rows if len(source.shape) == len(names) else index_dims
        return call.build([whole, index_dims, rows], [whole], linear=((0, 2),), additive=(0,))
    written = [[*names[:dim], "!i", *names[dim + 1 :]]] if len(call.tensors) == 3 else []
    if written and len(source.shape) != len(names):
        written = [["!i"] * len(source.shape)]
    return call.build(
        [whole, ["!i"] * len(index.shape), *written], [whole], linear=((0, 2),) if call.name == "index_copy" else ()
    )


@rule("gather", "take_along_dim")
def gather(call: Call, x: Any, dim: int, index: Any = None, **options: Any) -> Mapping | None:
    """Index and result alike; dims of another size in x are blocked."""
    if call.name == "take_along_dim" or not x.shape:
        return None
    dim %= len(x.shape)
    shared = [i != dim and x.shape[i] == index.shape[i] for i in range(len(x.shape))]
    before = [f"d{i}" if shared[i] else f"!v{i}" for i in range(len(shared))]
    after = [f"d{i}" if shared[i] or i == dim else f"!d{i}" for i in range(len(shared))]
    return call.build([before, after], [after], linear=((0,),))


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(call: Call, x: Any, dim: int, index: Any, *rest: Any, **options: Any) -> Mapping:
    """Writes along one dim; added rows may be cut among devices."""
    rank = len(x.shape)
    others = call.tensors[1:]
    names = free_dims(rank)
    for i in range(rank):
        if any(t.shape[i] != x.shape[i] for t in others):
            names[i] = f"!d{i}"
    add = call.name == "scatter_add"
    whole, row = list(names), list(names)
    if rank:
        whole[dim], row[dim] = "!v", "i" if add and index.shape == others[-1].shape else "!i"
    written = [row if i == 0 or t.shape == index.shape else [f"!s{d}" if n[0] == "!" else n for d, n in enumerate(row)]
               for i, t in enumerate(others)]  # fmt: skip
    plain = call.name == "scatter" and len(others) == 2 and "reduce" not in options and len(rest) < 2
    names_out = [n if n == "!v" or n[0] != "!" else f"!x{d}" for d, n in enumerate(whole)]
    return call.build(
        [names_out, *written],
        [names_out],
        linear=((0, 2),) if plain or add else (),
        additive=(0,) if add else (),
    )


@rule("slice_scatter", "select_scatter")
def write_part(call: Call, x: Any, source: Any, dim: int = 0, *rest: Any, **options: Any) -> Mapping:
    """Writes a slice of one dim, which is blocked."""
    names = free_dims(len(x.shape))
    dim %= len(names)
    whole = [*names[:dim], "!v", *names[dim + 1 :]]
    part = [*names[:dim], *(["!i"] if call.name == "slice_scatter" else []), *names[dim + 1 :]]
    return call.build([whole, part], [whole], linear=((0, 1),))


def _indexed(x: Any, indices: Any) -> tuple[list[str], list[int], list[Any], bool] | None:
    """Factors of x, the indexed dims, the index tensors, and whether their dims stay where they were."""
    rank = len(x.shape)
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices):
        return None
    touched = [i for i, t in enumerate(indices) if t is not None]
    dims = [f"!v{i}" if i in touched else f"d{i}" for i in range(rank)]
    adjacent = touched == list(range(touched[0], touched[-1] + 1)) if touched else True
    return dims, touched, [indices[i] for i in touched], adjacent


def _spread(dims: list[str], touched: list[int], rows: list[str], adjacent: bool) -> list[str]:
    """Dims of `x[indices]`: the broadcast index dims stand at the first indexed dim, or in front if scattered."""
    kept = [name for i, name in enumerate(dims) if i not in touched]
    position = touched[0] if adjacent else 0
    return kept[:position] + rows + kept[position:]


@rule("index", "_unsafe_index")
def index(call: Call, x: Any, indices: Any) -> Mapping:
    """Integer indices: their dims are free. Masks give sizes that depend on data: whole."""
    found = _indexed(x, indices)
    if found is None or not found[1]:
        return replicated(call)
    dims, touched, tensors, adjacent = found
    rank = max(len(t.shape) for t in tensors)
    rows = [f"i{i}" for i in range(rank)]
    return call.build(
        [dims, *(rows[rank - len(t.shape) :] for t in tensors)],
        [_spread(dims, touched, rows, adjacent)],
        linear=((0,),),
    )


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(call: Call, x: Any, indices: Any, values: Any, accumulate: bool = False, *rest: Any) -> Mapping:
    """Writes at integer indices, or where a mask of x's leading dims says so."""
    found = _indexed(x, indices)
    if found is None:
        return _mask_put(call, x, indices, values)
    dims, touched, tensors, adjacent = found
    if not touched:
        return replicated(call)
    rank = max(len(t.shape) for t in tensors)
    rows = [f"{'' if accumulate else '!'}i{i}" for i in range(rank)]
    written = _spread(dims, touched, rows, adjacent)
    value_dims = written[len(written) - len(values.shape) :]
    return call.build(
        [dims, *(rows[rank - len(t.shape) :] for t in tensors), value_dims],
        [dims],
        linear=((0, len(call.tensors) - 1),),
        additive=(0,),
    )


def _mask_put(call: Call, x: Any, indices: Any, values: Any) -> Mapping:
    """`x[mask] = scalar` is elementwise; anything else with a mask is whole."""
    mask = indices[0]
    if len(indices) != 1 or mask is None or len(values.shape) or mask.dtype != torch.bool:
        return replicated(call)
    names = free_dims(len(x.shape))
    return call.build([names, names[: len(mask.shape)], []], [names])


@rule("one_hot")
def one_hot(call: Call, x: Any, classes: int = -1) -> Mapping:
    """The class dim is new and blocked; without a given number of classes all is whole."""
    if classes < 0:
        return replicated(call)
    names = free_dims(len(x.shape))
    return call.build([names], [[*names, "!classes"]])


@rule("searchsorted")
def searchsorted(call: Call, edges: Any, x: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Values are free where the edges are one row."""
    if len(edges.shape) != 1 or not is_plain(x):
        return None
    names = free_dims(len(x.shape))
    return call.build([["!edges"], names], [names]) if len(call.tensors) == 2 else None


@rule("bucketize")
def bucketize(call: Call, x: Any, edges: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Values are free."""
    if not is_plain(x):
        return None
    names = free_dims(len(x.shape))
    return call.build([names, ["!edges"]], [names])


def is_plain(x: Any) -> bool:
    """Whether an argument is a tensor, not a number."""
    return hasattr(x, "shape")


@rule("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "nonzero_static", "item")
def of_data(call: Call, *args: Any, **options: Any) -> Mapping:
    """Sizes depend on data: whole."""
    return replicated(call)


@rule("masked_scatter", "take", "put")
def flat(call: Call, *args: Any, **options: Any) -> Mapping:
    """Indexed in flattened order: whole."""
    return replicated(call)
