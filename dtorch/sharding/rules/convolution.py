"""Convolutions, pooling and resampling: batch and channels are free, spatial dims are whole."""

from __future__ import annotations

from typing import Any

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import LocalContext, OpCall, as_is, cuts_of, localizer
from dtorch.sharding.rules.registry import Call, rule

_LINEAR = ((0, 2), (1, 2))


def _convolve(call: Call, x: Any, weight: Any, groups: int, transposed: bool) -> Mapping:
    """X (n, (g i), ...), weight ((g o), i, ...) or transposed ((g i), o, ...), bias (g o)."""
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


_GROUPS = {"convolution": 8, "conv_transpose1d": 6, "conv_transpose2d": 6, "conv_transpose3d": 6}


def _argument(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(call: Call, x: Any, weight: Any, bias: Any = None, *rest: Any, **options: Any) -> Mapping:
    """All forms of a convolution."""
    args = (x, weight, bias, *rest)
    groups = _argument(call, args, options, _GROUPS.get(call.name, 6), "groups", 1)
    transposed = "transpose" in call.name or (
        call.name == "convolution" and _argument(call, args, options, 6, "transposed", False)
    )
    return _convolve(call, x, weight, groups, transposed)


@localizer("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def local_convolution(ctx: LocalContext, call: OpCall) -> Any:
    """As many groups as are held here."""
    name = call.op.name().partition("::")[2].partition(".")[0]
    position = _GROUPS.get(name, 6)
    groups = _argument(call, call.args, call.kwargs, position, "groups", 1)
    x, weight = call.meta_args[:2]
    dim = 1 if len(x.shape) == len(weight.shape) else 0
    spec = ctx.input_spec(0)
    if groups == 1 or not any(placed.outer < groups for placed in cuts_of(spec, dim)):
        return as_is(ctx, call)
    weight_spec = ctx.input_spec(1)
    transposed = "transpose" in name or (name == "convolution" and call.args[6])
    # the weight's first dim is (g o), or (g i) when transposed: what is left of it beside g tells the local groups
    per_group = weight.shape[0] // groups
    inside = [placed for placed in weight_spec if _cuts_inside(placed, groups)]
    size = x.shape[dim] if not transposed else weight.shape[0]
    outer_spec = tuple(placed for placed in spec)
    per_group = size // groups
    if inside and transposed:
        return as_is(ctx, call)
    local = ctx.integer("floordiv", ctx.local_size(size, dim, outer_spec), per_group)
    args = list(call.args)
    if len(args) > position:
        args[position] = local
        return ctx.call(call.op, *args, **call.kwargs)
    return ctx.call(call.op, *args, **{**call.kwargs, "groups": local})


def _cuts_inside(placed: Any, groups: int) -> bool:
    return getattr(placed, "dim", None) == 0 and placed.outer >= groups


@rule(
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_linear1d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "im2col",
    "col2im",
)  # fmt: skip
def resample(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Every channel of every sample is on its own; averages and interpolations are linear."""
    name = call.name
    if name in ("im2col", "col2im"):
        return None
    spatial = 1 if "1d" in name else 3 if "3d" in name else 2
    lead = [f"d{i}" for i in range(len(x.shape) - spatial)]
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
    lead = [f"d{i}" for i in range(len(x.shape) - 3)]
    packed, spread = [*lead, ("c", "!r", "!q"), "h", "w"], [*lead, "c", ("h", "!r"), ("w", "!q")]
    pair = (packed, spread) if call.name == "pixel_shuffle" else (spread, packed)
    return call.build([pair[0]], [pair[1]], sizes=sizes, linear=((0,),))
