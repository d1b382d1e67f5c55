"""Convolutions, pooling and resampling: batch and channels are free, spatial dims are whole."""

from __future__ import annotations

from typing import Any

from dtorch.ir.layout import WHOLE
from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import LocalContext, OpCall, as_is, cuts_of, localizer, never_empty, op_names
from dtorch.sharding.rules.registry import Call, free_dims, rule

_LINEAR = ((0, 2), (1, 2))


def _convolve(call: Call, x: Any, weight: Any, groups: int, transposed: bool) -> Mapping:
    """Factors of x (n, (g i), ...), weight ((g o), i, ...) or transposed ((g i), o, ...), bias (g o)."""
    kernel = [f"!k{i}" for i in range(len(weight.shape) - 2)]
    before, after = [f"!s{i}" for i in range(len(kernel))], [f"!t{i}" for i in range(len(kernel))]
    batch = ["n"] if len(x.shape) == len(weight.shape) else []
    inner = weight.shape[0] // groups if transposed else weight.shape[1]
    outer = weight.shape[1] if transposed else weight.shape[0] // groups
    sizes = {"g": groups, "i": inner, "o": outer}
    weights = [("g", "i"), "o", *kernel] if transposed else [("g", "o"), "i", *kernel]
    return call.build(
        [[*batch, ("g", "i"), *before], weights, *([[("g", "o")]] * (len(call.tensors) - 2))],
        [[*batch, ("g", "o"), *after]],
        sizes=sizes,
        linear=_LINEAR if len(call.tensors) == 3 else ((0,), (1,)),
        additive=(2,) if len(call.tensors) == 3 else (),
    )


_CONVOLUTIONS = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
)  # fmt: skip
never_empty(*_CONVOLUTIONS)


def _groups(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, int, bool]:
    """The number of groups, the position of that argument, and whether the convolution is transposed."""
    position = 8 if name == "convolution" else 6
    groups = args[position] if len(args) > position else options.get("groups", 1)
    return groups, position, bool(args[6]) if name == "convolution" else "transpose" in name


@rule(*_CONVOLUTIONS)
def convolution(call: Call, *args: Any, **options: Any) -> Mapping:
    """All forms of a convolution."""
    groups, _, transposed = _groups(call.name, args, options)
    return _convolve(call, args[0], args[1], groups, transposed)


@localizer(*_CONVOLUTIONS)
def local_convolution(ctx: LocalContext, call: OpCall) -> Any:
    """As many groups as are held here: the input channels are (group, channel in it)."""
    name = op_names(call.op)[1].partition("::")[2]
    groups, position, _ = _groups(name, call.args, call.kwargs)
    x, weight = call.meta_args[:2]
    dim = 1 if len(x.shape) == len(weight.shape) else 0
    spec = ctx.input_spec(0)
    over_groups = [placed for placed in cuts_of(spec, dim) if placed.outer < groups]
    if groups == 1 or not over_groups:
        return as_is(ctx, call)
    # a cut inside the groups on another axis does not change their number: only the cuts over groups count
    only = tuple(placed if placed in over_groups else WHOLE for placed in spec)
    local = ctx.integer("floordiv", ctx.local_size(x.shape[dim], dim, only), x.shape[dim] // groups)
    args = list(call.args)
    if len(args) > position:
        args[position] = local
        return ctx.call(call.op, *args, **call.kwargs)
    return ctx.call(call.op, *args, **{**call.kwargs, "groups": local})


_RESAMPLING = (
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "max_pool1d_with_indices", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
never_empty(*_RESAMPLING)


@rule(*_RESAMPLING)
def resample(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping:
    """Every channel of every sample is on its own; averages and interpolations are linear."""
    name = call.name
    spatial = 1 if "1d" in name else 3 if "3d" in name else 2
    lead = free_dims(len(x.shape) - spatial)
    outputs = [[*lead, *(f"!o{i}" for i in range(spatial))]] * len(call.outputs)
    return call.build(
        [[*lead, *(f"!i{i}" for i in range(spatial))]], outputs, linear=() if "max_pool" in name else ((0,),)
    )


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(call: Call, x: Any, factor: int) -> Mapping:
    """(..., (c r q), h, w) to (..., c, (h r), (w q)), and back: rows and columns may be cut."""
    sizes = {"!r": factor, "!q": factor}
    small, large = (x, call.outputs[0]) if call.name == "pixel_shuffle" else (call.outputs[0], x)
    sizes |= {"c": large.shape[-3], "h": small.shape[-2], "w": small.shape[-1]}
    lead = free_dims(len(x.shape) - 3)
    packed, spread = [*lead, ("c", "!r", "!q"), "h", "w"], [*lead, "c", ("h", "!r"), ("w", "!q")]
    pair = (packed, spread) if call.name == "pixel_shuffle" else (spread, packed)
    return call.build([pair[0]], [pair[1]], sizes=sizes, linear=((0,),))


never_empty("pixel_unshuffle", "pixel_shuffle")
