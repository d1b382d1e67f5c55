"""Reductions, scans and orderings along dims.

A cut of a summed dim leaves partial sums, of a maximised one partial maxima; scans and orderings keep their dim whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import LocalContext, OpCall, as_is, cuts_of, localizer, may_be_empty
from dtorch.sharding.rules.registry import Call, free_dims, replicated, rule

aten = torch.ops.aten


def reduced_dims(rank: int, dims: Any) -> list[int]:
    """Dims as non-negative numbers; None and () mean all."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    return sorted(d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims))


def reduction(call: Call, x: Any, dims: Any, mark: str, **options: Any) -> Mapping:
    """The factors of a reduction: `dims` are gone (or of size one) in every result; `mark` "!" blocks them."""
    rank = len(x.shape)
    gone = reduced_dims(rank, dims)
    before = [f"{mark if i in gone else ''}d{i}" for i in range(rank)]
    outputs = []
    for result in call.outputs:
        kept: list[Any] = [None if i in gone else before[i] for i in range(rank)]
        outputs.append(kept if len(result.shape) == rank else [name for name in kept if name is not None])
    return call.build([before], outputs, **options)


def is_exact_sum(call: Call) -> bool:
    """Whether addends of the input give addends of the result."""
    return call.tensors[0].dtype != torch.bool


@rule("sum", "nansum", "count_nonzero")
def sum_(call: Call, x: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Mapping:
    """Partial sums."""
    return reduction(call, x, dim, "", linear=((0,),) if call.name == "sum" and is_exact_sum(call) else ())


@rule("mean")
def mean(call: Call, x: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Mapping:
    """Partial sums, divided by the global count (which is right for uneven pieces too)."""
    return reduction(call, x, dim, "", linear=((0,),))


@localizer("mean")
def local_mean(ctx: LocalContext, call: OpCall) -> Any:
    """The local sum over the global count, where a dim of the mean is cut."""
    x, dims, keepdim = call.meta_args[0], *_dim_keepdim(call)
    gone = reduced_dims(len(x.shape), dims)
    spec = ctx.input_spec(0)
    if not any(cuts_of(spec, d) for d in gone):
        return as_is(ctx, call)
    target = call.outputs[0].dtype
    wide = torch.float32 if target in (torch.bfloat16, torch.float16) else target
    total = ctx.call(aten.sum.dim_IntList, call.args[0], gone, keepdim, dtype=wide)
    result = ctx.call(aten.div.Tensor, total, math.prod(x.shape[d] for d in gone))
    return result if wide == target else ctx.call(aten.to.dtype, result, target)


def _dim_keepdim(call: OpCall) -> tuple[Any, bool]:
    """The `dim` and `keepdim` arguments of a reduction."""
    rest = call.args[1:]
    dims = rest[0] if rest else call.kwargs.get("dim")
    return dims, rest[1] if len(rest) > 1 else call.kwargs.get("keepdim", False)


@rule("amax", "amin", "max.default", "min.default", "max", "min")
def extreme(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Mapping | None:
    """Partial maxima or minima; with indices as a second result, or for booleans, the dim is blocked."""
    if len(call.tensors) == 2:  # max(x, y) is elementwise
        names = free_dims(len(call.outputs[0].shape))
        return call.build([names[len(names) - len(t.shape) :] for t in call.tensors], [names])
    if len(call.outputs) > 1 or x.dtype == torch.bool:
        return reduction(call, x, dim, "!")
    kind = "max" if "max" in call.name else "min"
    return reduction(call, x, dim, "", reduce={f"d{i}": kind for i in range(len(x.shape))})


@localizer("amax", "amin", "max.default", "min.default")
def local_extreme(ctx: LocalContext, call: OpCall) -> Any:
    """A device that holds nothing of a dim reduces one element that never wins."""
    x = call.meta_args[0]
    gone = reduced_dims(len(x.shape), _dim_keepdim(call)[0])
    spec = ctx.input_spec(0)
    empty = [d for d in gone if cuts_of(spec, d) and may_be_empty(x.shape[d], d, spec, ctx.mesh_shape)]
    if not empty:
        return as_is(ctx, call)
    limits = torch.finfo(x.dtype) if x.dtype.is_floating_point else torch.iinfo(x.dtype)
    never = (math.inf if x.dtype.is_floating_point else limits.max) * 1
    if "max" in call.op.name():
        never = -math.inf if x.dtype.is_floating_point else limits.min
    pads = [0] * (2 * len(x.shape))
    for d in empty:
        pads[2 * (len(x.shape) - 1 - d) + 1] = 1
    padded = ctx.call(aten.constant_pad_nd.default, call.args[0], pads, never)
    return ctx.call(call.op, padded, *call.args[1:], **call.kwargs)


@rule("any", "all", "prod", "argmax", "argmin", "logsumexp", "median", "nanmedian", "nanmean")
def whole_dim(call: Call, x: Any, dim: Any = None, *rest: Any, **options: Any) -> Mapping:
    """The dim is blocked: its reduction has no partial form that a collective adds up."""
    return reduction(call, x, dim, "!")


@rule("mode")
def mode(call: Call, x: Any, dim: int = -1, keepdim: bool = False) -> Mapping:
    """The dim is blocked; left out, it is the last one."""
    return reduction(call, x, dim, "!")


@rule("aminmax")
def aminmax(call: Call, x: Any, *, dim: Any = None, keepdim: bool = False) -> Mapping:
    """The dim is blocked."""
    return reduction(call, x, dim, "!")


@rule("var", "std", "var_mean", "std_mean")
def variance(call: Call, x: Any, dim: Any = None, *rest: Any, **options: Any) -> Mapping:
    """The dim is blocked. The oldest overloads have a flag where the others have dims."""
    return reduction(call, x, None if isinstance(dim, bool) else dim, "!")


@rule("linalg_vector_norm", "norm")
def vector_norm(call: Call, x: Any, order: Any = 2, dim: Any = None, *rest: Any, **options: Any) -> Mapping:
    """The dims are blocked."""
    return reduction(call, x, dim, "!")


@rule("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "renorm")
def scan(call: Call, x: Any, dim: int, *rest: Any, **options: Any) -> Mapping | None:
    """The dim is blocked."""
    if call.name == "renorm":
        return None
    return along(call, x, dim, linear=((0,),) if call.name == "cumsum" and is_exact_sum(call) else ())


def along(call: Call, x: Any, dim: int, **options: Any) -> Mapping:
    """Results have the dims of x, but for one, which is blocked."""
    names = free_dims(len(x.shape))
    before, after = list(names), list(names)
    if names:
        before[dim], after[dim] = "!i", "!o"
    return call.build([before], [after] * len(call.outputs), **options)


@rule("sort", "argsort", "msort")
def sort(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping:
    """The dim is blocked."""
    dim = next((value for value in rest if isinstance(value, int) and not isinstance(value, bool)), None)
    return along(call, x, options.get("dim", 0 if call.name == "msort" else -1) if dim is None else dim)


@rule("topk")
def topk(call: Call, x: Any, k: int, dim: int = -1, *rest: Any, **options: Any) -> Mapping:
    """The dim is blocked."""
    return along(call, x, dim)


@rule("kthvalue")
def kthvalue(call: Call, x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Mapping:
    """The dim is blocked."""
    return reduction(call, x, dim, "!")


@rule("histc", "bincount")
def histogram(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Counts add up, where the bins do not depend on the values."""
    limits = [*rest[1:3], *((0, 0)[len(rest[1:3]) :])]
    low, high = options.get("min", limits[0]), options.get("max", limits[1])
    if call.name == "bincount" or (low == 0 and high == 0):
        return replicated(call)
    names = free_dims(len(x.shape))
    return call.build([names], [["!bins"]])


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
def loss(call: Call, x: Any, y: Any, reduction_kind: int = 1, *rest: Any, **options: Any) -> Mapping:
    """Elementwise without a reduction; sums are partial; means are blocked."""
    kind = options.get("reduction", reduction_kind)
    mark = "!" if kind == 1 else ""
    names = [f"{mark}d{i}" for i in range(max(len(x.shape), len(y.shape)))]
    return call.build([names[len(names) - len(t.shape) :] for t in call.tensors], [names if kind == 0 else []])
