"""Dims taken apart, joined, repeated, padded and shifted: `(k p) -> p, p` and back; a cut of `p` cuts all pieces alike.

All of them are linear, but for padding with other values than zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import LocalContext, OpCall, as_is, cuts_of, localizer, never_empty
from dtorch.sharding.rules.registry import Call, free_dims, replicated, rule
from dtorch.sharding.rules.views import Groups

aten = torch.ops.aten
never_empty("pad")


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
    dims = free_dims(len(x.shape))
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
    dims = free_dims(len(x.shape))
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
    dims = free_dims(rank)
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
    dims = free_dims(len(tensors[0].shape))
    dim %= len(dims) + 1
    return call.build([dims] * len(tensors), [[*dims[:dim], "!k", *dims[dim:]]], linear=(range(len(tensors)),))


@rule("repeat", "tile")
def repeat(call: Call, x: Any, repeats: Any) -> Mapping | None:
    """Every dim becomes (repeat dim); the dim may be cut."""
    rank = max(len(repeats), len(x.shape))
    counts = [1] * (rank - len(repeats)) + list(repeats)
    shape = [1] * (rank - len(x.shape)) + list(x.shape)
    dims = free_dims(rank)
    sizes = {f"!r{i}": count for i, count in enumerate(counts)} | dict(zip(dims, shape))
    outputs = [(f"!r{i}", dims[i]) for i in range(rank)]
    return call.build([dims[rank - len(x.shape) :]], [outputs], sizes=sizes, linear=((0,),))


@rule("repeat_interleave.self_int")
def repeat_interleave(call: Call, x: Any, repeats: int, dim: Any = None, **options: Any) -> Mapping | None:
    """A dim becomes (dim repeat)."""
    if dim is None:
        return None
    dims = free_dims(len(x.shape))
    dim %= len(dims)
    after = list(dims)
    after[dim] = (dims[dim], "!r")
    return call.build([dims], [after], sizes={"!r": repeats, dims[dim]: x.shape[dim]}, linear=((0,),))


@localizer("repeat_interleave.self_int")
def local_repeat_interleave(ctx: LocalContext, call: OpCall) -> Any:
    """Without the global output size."""
    options = {name: value for name, value in call.kwargs.items() if name != "output_size"}
    return ctx.call(call.op, *call.args, **options)


@rule(
    "flip", "fliplr", "flipud", "roll", "rot90", "tril", "triu", "constant_pad_nd", "pad", "reflection_pad1d",
    "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
)  # fmt: skip
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


@rule("diff")
def diff(call: Call, x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Mapping:
    """Differences of neighbours: the dim is blocked, also of what is put before and after it."""
    dims = free_dims(len(x.shape))
    dim %= len(dims)
    return call.build(
        [[*dims[:dim], f"!i{k}", *dims[dim + 1 :]] for k in range(len(call.tensors))],
        [[*dims[:dim], "!o", *dims[dim + 1 :]]],
        linear=(range(len(call.tensors)),) if x.dtype != torch.bool else (),
    )
