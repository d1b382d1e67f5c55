"""Views and rearrangements: dims are split, merged, moved, expanded and sliced; the factors say which cut survives.

All of them are linear. A device makes its result with `reshape` to the local shape of its part.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

import torch

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import LocalContext, OpCall, localizer
from dtorch.sharding.rules.registry import Call, free_dims, replicated, rule

aten = torch.ops.aten
Groups = list[Any]


def common_factor(a: int, b: int) -> int:
    """The greatest common divisor; of symbolic sizes only what divides as a whole."""
    if type(a) is int and type(b) is int:
        return gcd(a, b)
    return a if a == b else b if a % b == 0 else a if b % a == 0 else 1


def regroup(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[tuple, tuple, dict[str, int]]:
    """Factors of a reshape: `(2, 10) -> (20)` is `a b -> (a b)`; what both sides cannot share is blocked.

    Walks both shapes from the left, taking the common factor of what is left of the two current dims.
    """
    before: list[list[str]] = [[] for _ in source]
    after: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    total = 1
    for size in source:
        total *= size

    def add(side: list[list[str]], dim: int, size: int, name: str) -> None:
        if size != 1:
            sizes[name] = size
            side[dim].append(name)

    if total == 0:
        for side, shape, mark in ((before, source, "i"), (after, target, "o")):
            for dim, size in enumerate(shape):
                add(side, dim, size, f"!{mark}{dim}")
        return tuple(map(tuple, before)), tuple(map(tuple, after)), sizes
    i = j = shared = 0
    a, b = (source[0] if source else 1), (target[0] if target else 1)
    while i < len(source) and j < len(target):
        common = common_factor(a, b)
        if common > 1:
            name = f"f{shared}"
            shared += 1
            add(before, i, common, name)
            add(after, j, common, name)
            a, b = a // common, b // common
        if a > 1 and b > 1:  # no further factor is shared until the products meet again
            left, right = a, b
            add(before, i, a, f"!i{i}")
            add(after, j, b, f"!o{j}")
            while left != right:
                if left < right:
                    i += 1
                    left *= source[i]
                    add(before, i, source[i], f"!i{i}")
                else:
                    j += 1
                    right *= target[j]
                    add(after, j, target[j], f"!o{j}")
            a = b = 1
        if a == 1:
            i += 1
            a = source[i] if i < len(source) else 1
        if b == 1:
            j += 1
            b = target[j] if j < len(target) else 1
    return tuple(map(tuple, before)), tuple(map(tuple, after)), sizes


_regroup_cached = lru_cache(maxsize=4096)(regroup)


@rule(
    "view.default", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "squeeze", "unsqueeze",
    "view_as", "reshape_as", "_reshape_alias", "ravel", "squeeze_copy", "view_copy.default", "unsqueeze_copy",
    "atleast_1d", "atleast_2d", "atleast_3d",
)  # fmt: skip
def reshape(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Any change of shape that keeps the order of the elements."""
    source, target = tuple(x.shape), tuple(call.outputs[0].shape)
    plain = all(type(size) is int for size in source + target)
    before, after, sizes = (_regroup_cached if plain else regroup)(source, target)
    inputs: list[Any] = [before]
    if len(call.tensors) == 2:  # view_as: the other tensor lends its shape only
        inputs.append([f"!like{i}" for i in range(len(call.tensors[1].shape))])
    return call.build(inputs, [after], sizes=sizes, linear=((0,),), ignored=range(1, len(inputs)))


@localizer(
    "view.default", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "squeeze", "unsqueeze",
    "view_as", "reshape_as", "_reshape_alias", "ravel", "squeeze_copy", "view_copy.default", "unsqueeze_copy",
    "atleast_1d", "atleast_2d", "atleast_3d",
)  # fmt: skip
def local_reshape(ctx: LocalContext, call: OpCall) -> Any:
    """Reshape to the local shape."""
    return ctx.call(aten.reshape.default, call.args[0], ctx.local_shape(call.outputs[0].shape, ctx.output_spec()))


@rule("view.dtype")
def view_dtype(call: Call, x: Any, dtype: torch.dtype) -> Mapping | None:
    """Bits read as another type: the last dim may change its size."""
    dims = free_dims(len(x.shape))
    if x.dtype.itemsize == dtype.itemsize:
        return call.build([dims], [dims])
    return call.build([[*dims[:-1], "!i"]], [[*dims[:-1], "!o"]])


@rule("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT", "mH", "adjoint")
def permute(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Dims change places."""
    dims = free_dims(len(x.shape))
    moved = list(dims)
    name = call.name
    if name == "permute":
        moved = [dims[i] for i in rest[0]]
    elif name in ("transpose", "swapaxes", "swapdims"):
        if dims:
            moved[rest[0]], moved[rest[1]] = dims[rest[1]], dims[rest[0]]
    elif name in ("movedim", "moveaxis"):
        source, target = ([d] if isinstance(d, int) else list(d) for d in rest)
        source, target = [d % len(dims) for d in source], [d % len(dims) for d in target]
        others = iter(i for i in range(len(dims)) if i not in source)
        moved = [dims[source[target.index(i)] if i in target else next(others)] for i in range(len(dims))]
    elif name in ("t", "numpy_T"):
        moved = dims[::-1]
    else:
        moved[-1], moved[-2] = dims[-2], dims[-1]
    return call.build([dims], [moved], linear=((0,),))


@rule("expand", "expand_as", "broadcast_to", "expand_copy")
def expand(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping:
    """Dims that are new or grow stand in the result only: each device makes its part of them."""
    shape = call.outputs[0].shape
    dims = free_dims(len(shape))
    inputs = [dims[len(shape) - len(t.shape) :] for t in call.tensors[:1]]
    inputs += [[f"!like{i}" for i in range(len(t.shape))] for t in call.tensors[1:]]
    return call.build(inputs, [dims], linear=((0,),), ignored=range(1, len(inputs)))


@localizer("expand", "expand_as", "broadcast_to", "expand_copy")
def local_expand(ctx: LocalContext, call: OpCall) -> Any:
    """Expand to the local shape."""
    return ctx.call(aten.expand.default, call.args[0], ctx.local_shape(call.outputs[0].shape, ctx.output_spec()))


@rule("broadcast_tensors")
def broadcast_tensors(call: Call, tensors: Any) -> Mapping | None:
    """Each to the common shape."""
    dims = free_dims(len(call.outputs[0].shape))
    return call.build([dims[len(dims) - len(t.shape) :] for t in tensors], [dims] * len(call.outputs))


def is_full_range(size: int, start: Any, end: Any, step: int) -> bool:
    """Whether a slice keeps all of a dim."""
    return step == 1 and (start is None or start == 0) and (end is None or end >= size)


@rule("slice", "narrow", "slice_copy")
def slice_(call: Call, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Mapping:
    """A full range is the identity, else the dim is blocked."""
    before, after = free_dims(len(x.shape)), free_dims(len(x.shape))
    dim %= len(before)
    if x.shape[dim] != call.outputs[0].shape[dim]:
        before[dim], after[dim] = "!i", "!o"
    elif call.name == "narrow" or not is_full_range(x.shape[dim], start, end, step):
        before[dim] = after[dim] = "!same"
    return call.build([before], [after], linear=((0,),))


@rule("select", "select_copy")
def select(call: Call, x: Any, dim: int, index: Any) -> Mapping:
    """The dim is blocked."""
    dims = free_dims(len(x.shape))
    dim %= len(dims)
    return call.build([[*dims[:dim], "!i", *dims[dim + 1 :]]], [dims[:dim] + dims[dim + 1 :]], linear=((0,),))


@rule("diagonal", "diag_embed", "diag", "trace", "unfold", "as_strided")
def strided(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping:
    """Rare views: `diagonal` and `unfold` keep the other dims; the rest are whole."""
    dims = free_dims(len(x.shape))
    if call.name == "diagonal":
        first = options.get("dim1", rest[1] if len(rest) > 1 else 0) % len(dims)
        second = options.get("dim2", rest[2] if len(rest) > 2 else 1) % len(dims)
        rest_dims = [d for i, d in enumerate(dims) if i not in (first, second)]
        dims[first], dims[second] = "!i", "!j"
        return call.build([dims], [[*rest_dims, "!o"]], linear=((0,),))
    if call.name == "unfold":
        dim = rest[0] % len(dims)
        after = [*dims[:dim], "!o", *dims[dim + 1 :], "!w"]
        dims[dim] = "!i"
        return call.build([dims], [after], linear=((0,),))
    mapping = replicated(call)
    return Mapping(mapping.inputs, mapping.outputs, mapping.sizes, mapping.blocked, linear=(frozenset({0}),))
