"""Views and rearrangements: dims are split, merged, moved, repeated and joined; the factors say which cut survives.

All of them are linear. A device makes its result with `reshape` to the local shape of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import torch

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import LocalContext, OpCall, as_is, cuts_of, localizer, never_empty
from dtorch.sharding.rules.registry import Call, replicated, rule

aten = torch.ops.aten
Groups = list[Any]


def names(rank: int) -> list[Any]:
    """One factor for each dim."""
    return [f"d{i}" for i in range(rank)]


@lru_cache(maxsize=4096)
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
        common = a if a == b else gcd(a, b)
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


@rule(
    "view.default", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "squeeze", "unsqueeze",
    "view_as", "reshape_as", "_reshape_alias", "ravel", "squeeze_copy", "view_copy.default", "unsqueeze_copy",
    "atleast_1d", "atleast_2d", "atleast_3d",
)  # fmt: skip
def reshape(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Any change of shape that keeps the order of the elements."""
    before, after, sizes = regroup(tuple(x.shape), tuple(call.outputs[0].shape))
    inputs = [before]
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
    dims = names(len(x.shape))
    if x.dtype.itemsize == dtype.itemsize:
        return call.build([dims], [dims])
    return call.build([[*dims[:-1], "!i"]], [[*dims[:-1], "!o"]])


@rule("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT", "mH", "adjoint")
def permute(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Dims change places."""
    dims = names(len(x.shape))
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
    dims = names(len(shape))
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
    dims = names(len(call.outputs[0].shape))
    return call.build(
        [dims[len(dims) - len(t.shape) :] for t in tensors],
        [dims] * len(call.outputs),
        blocked=[d for i, d in enumerate(dims) if any(i < len(dims) - len(t.shape) or t.shape[i - len(dims)] == 1
                                                      for t in tensors)],
    )  # fmt: skip


def is_full_range(size: int, start: Any, end: Any, step: int) -> bool:
    """Whether a slice keeps all of a dim."""
    return step == 1 and (start is None or start == 0) and (end is None or end >= size)


@rule("slice", "narrow", "slice_copy")
def slice_(call: Call, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Mapping:
    """A full range is the identity, else the dim is blocked."""
    before, after = names(len(x.shape)), names(len(x.shape))
    dim %= len(before)
    if x.shape[dim] != call.outputs[0].shape[dim]:
        before[dim], after[dim] = "!i", "!o"
    elif call.name == "narrow" or not is_full_range(x.shape[dim], start, end, step):
        before[dim] = after[dim] = "!same"
    return call.build([before], [after], linear=((0,),))


@rule("select", "select_copy")
def select(call: Call, x: Any, dim: int, index: Any) -> Mapping:
    """The dim is blocked."""
    dims = names(len(x.shape))
    dim %= len(dims)
    return call.build([[*dims[:dim], "!i", *dims[dim + 1 :]]], [dims[:dim] + dims[dim + 1 :]], linear=((0,),))


@rule("diagonal", "diag_embed", "diag", "trace", "unfold", "as_strided")
def strided(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping:
    """Rare views: `diagonal` and `unfold` keep the other dims; the rest are whole."""
    dims: list[Any] = names(len(x.shape))
    if call.name == "diagonal":
        first, second = [*rest[1:3], *((0, 1)[len(rest[1:3]) :])]
        first, second = options.get("dim1", first) % len(dims), options.get("dim2", second) % len(dims)
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


def parts_of(pieces: Sequence[int], mark: str) -> tuple[Groups, dict[str, int]]:
    """Pieces of one dim as multiples of their common divisor: the factor `mark`, cut in every piece alike."""
    common = 0
    for piece in pieces:
        common = gcd(common, piece)
    if common <= 1:
        return [f"!{mark}{i}" for i in range(len(pieces))], {}
    sizes = {mark: common, "!parts": sum(pieces) // common}
    groups: Groups = []
    for piece in pieces:
        sizes[f"!x{piece // common}"] = piece // common
        groups.append((f"!x{piece // common}", mark))
    return groups, sizes


@rule("split", "split_with_sizes", "chunk", "tensor_split", "split_copy", "split_with_sizes_copy", "unsafe_split",
      "unsafe_chunk", "unsafe_split_with_sizes")  # fmt: skip
def split(call: Call, x: Any, pieces: Any, dim: int = 0) -> Mapping:
    """Every piece is a multiple of a common part `p`: `(k p) -> p, p, ..`; cutting `p` cuts all pieces alike."""
    dims = names(len(x.shape))
    dim %= len(dims)
    groups, sizes = parts_of([t.shape[dim] for t in call.outputs], "p")
    source = ("!parts", "p") if sizes else "!i"
    return call.build(
        [[*dims[:dim], source, *dims[dim + 1 :]]],
        [[*dims[:dim], group, *dims[dim + 1 :]] for group in groups],
        sizes=sizes,
        linear=((0,),),
    )


@localizer("split", "split_with_sizes", "chunk", "tensor_split", "split_copy", "split_with_sizes_copy",
           "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")  # fmt: skip
def local_split(ctx: LocalContext, call: OpCall) -> Any:
    """Split into the local sizes where the dim is cut."""
    dim = (call.args[2] if len(call.args) > 2 else call.kwargs.get("dim", 0)) % len(call.meta_args[0].shape)
    if not cuts_of(ctx.input_spec(0), dim):
        return as_is(ctx, call)
    sizes = [ctx.local_size(t.shape[dim], dim, ctx.output_spec(k)) for k, t in enumerate(call.outputs)]
    return ctx.call(aten.split_with_sizes.default, call.args[0], sizes, dim)


@rule("unbind", "unbind_copy")
def unbind(call: Call, x: Any, dim: int = 0) -> Mapping:
    """The dim is blocked."""
    dims = names(len(x.shape))
    dim %= len(dims)
    rest = dims[:dim] + dims[dim + 1 :]
    return call.build([[*dims[:dim], "!i", *dims[dim + 1 :]]], [rest] * len(call.outputs), linear=((0,),))


@rule("cat", "concat", "concatenate", "hstack", "vstack", "dstack", "column_stack")
def cat(call: Call, tensors: Any, dim: int = 0) -> Mapping | None:
    """The inverse of a split: `p, p -> (k p)`."""
    tensors = call.tensors
    rank = len(call.outputs[0].shape)
    if call.name not in ("cat", "concat", "concatenate") or any(len(t.shape) != rank for t in tensors):
        return replicated(call)  # torch.cat lets a legacy (0,) tensor stand beside tensors of any rank
    dims = names(rank)
    dim %= rank
    groups, sizes = parts_of([t.shape[dim] for t in tensors], "p")
    same = {t.dtype for t in tensors} == {call.outputs[0].dtype}
    return call.build(
        [[*dims[:dim], group, *dims[dim + 1 :]] for group in groups],
        [[*dims[:dim], ("!parts", "p") if sizes else "!o", *dims[dim + 1 :]]],
        sizes=sizes,
        linear=(range(len(tensors)),) if same else (),
    )


@rule("stack")
def stack(call: Call, tensors: Any, dim: int = 0) -> Mapping:
    """The new dim is blocked."""
    dims = names(len(tensors[0].shape))
    dim %= len(dims) + 1
    return call.build([dims] * len(tensors), [[*dims[:dim], "!k", *dims[dim:]]], linear=(range(len(tensors)),))


@rule("repeat", "tile")
def repeat(call: Call, x: Any, repeats: Any) -> Mapping | None:
    """Every dim becomes (repeat dim); the dim may be cut."""
    rank = max(len(repeats), len(x.shape))
    counts = [1] * (rank - len(repeats)) + list(repeats)
    shape = [1] * (rank - len(x.shape)) + list(x.shape)
    dims = names(rank)
    sizes = {f"!r{i}": count for i, count in enumerate(counts)} | dict(zip(dims, shape))
    outputs = [(f"!r{i}", dims[i]) for i in range(rank)]
    return call.build([dims[rank - len(x.shape) :]], [outputs], sizes=sizes, linear=((0,),))


@rule("repeat_interleave.self_int")
def repeat_interleave(call: Call, x: Any, repeats: int, dim: Any = None, **options: Any) -> Mapping | None:
    """A dim becomes (dim repeat)."""
    if dim is None:
        return None
    dims: Groups = names(len(x.shape))
    dim %= len(dims)
    after = list(dims)
    after[dim] = (dims[dim], "!r")
    return call.build([dims], [after], sizes={"!r": repeats, dims[dim]: x.shape[dim]}, linear=((0,),))


@localizer("repeat_interleave.self_int")
def local_repeat_interleave(ctx: LocalContext, call: OpCall) -> Any:
    """Without the global output size."""
    options = {name: value for name, value in call.kwargs.items() if name != "output_size"}
    return ctx.call(call.op, *call.args, **options)


@rule("flip", "fliplr", "flipud", "roll", "rot90", "tril", "triu", "constant_pad_nd", "pad", "reflection_pad1d",
      "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "reflection_pad3d")  # fmt: skip
def moved_within(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Elements move within some dims, or these grow: they are blocked."""
    rank, name = len(x.shape), call.name
    value: Any = 0
    if name == "flip":
        touched = {d % rank for d in rest[0]}
    elif name == "roll":
        shifted = rest[1] if len(rest) > 1 else options.get("dims", ())
        touched = {d % rank for d in ([shifted] if isinstance(shifted, int) else shifted)} or set(range(rank))
    elif name in ("tril", "triu"):
        touched = {rank - 2, rank - 1}
    elif "pad" in name:
        pads = rest[0]
        touched = {rank - 1 - i // 2 for i in range(len(pads)) if pads[i] != 0}
        if name == "pad":
            value = (rest[2] if len(rest) > 2 else options.get("value")) or 0
        elif name == "constant_pad_nd":
            value = rest[1] if len(rest) > 1 else options.get("value", 0)
    else:
        touched = set(range(rank))
    before = [f"!i{i}" if i in touched else f"d{i}" for i in range(rank)]
    after = [f"!o{i}" if i in touched else f"d{i}" for i in range(len(call.outputs[0].shape))]
    return call.build([before], [after], linear=((0,),) if value == 0 else ())


never_empty("pad")
