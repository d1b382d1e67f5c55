"""Normalisations: the dims they look along stay whole, all others are free; group counts follow the cut."""

from __future__ import annotations

from typing import Any

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import LocalContext, OpCall, localizer, never_empty
from dtorch.sharding.rules.registry import Call, free_dims, rule


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax", "softmin")
def softmax(call: Call, x: Any, dim: int, *rest: Any, **options: Any) -> Mapping:
    """One dim is blocked."""
    names = free_dims(len(x.shape))
    return call.build([names], [names], blocked=[names[dim]] if names else ())


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm", "fused_rms_norm")
def layer_norm(call: Call, x: Any, shape: Any, *rest: Any, **options: Any) -> Mapping:
    """The last `len(shape)` dims are blocked; statistics, where they are results, have the other dims."""
    rank, normed = len(x.shape), len(shape)
    names = [f"{'d' if i < rank - normed else '!n'}{i}" for i in range(rank)]
    return call.build([names] + [names[rank - normed :]] * (len(call.tensors) - 1), [names] * len(call.outputs))


@rule("group_norm")
def group_norm(call: Call, x: Any, groups: int, *rest: Any, **options: Any) -> Mapping:
    """In x (n, (group channel), ...) groups may be cut, what is in a group may not."""
    sizes = {"g": groups, "!c": x.shape[1] // groups if groups else 0}
    channel = ("g", "!c")
    spatial = [f"!s{i}" for i in range(len(x.shape) - 2)]
    weights = [[channel]] * (len(call.tensors) - 1)
    return call.build([["n", channel, *spatial], *weights], [["n", channel, *spatial]], sizes=sizes)


@localizer("group_norm")
def local_group_norm(ctx: LocalContext, call: OpCall) -> Any:
    """As many groups as are held here."""
    x, groups, *rest = call.args
    per_group = call.meta_args[0].shape[1] // groups
    channels = ctx.local_size(call.meta_args[0].shape[1], 1, ctx.input_spec(0))
    return ctx.call(call.op, x, ctx.integer("floordiv", channels, per_group), *rest, **call.kwargs)


@rule("native_group_norm")
def native_group_norm(
    call: Call, x: Any, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float
) -> Mapping:
    """As group_norm, with the statistics (n, group) as results."""
    sizes = {"g": groups, "!c": c // groups}
    channel = ("g", "!c")
    spatial = [f"!s{i}" for i in range(len(x.shape) - 2)]
    weights = [[channel]] * (len(call.tensors) - 1)
    names = ["n", channel, *spatial]
    return call.build([names, *weights], [names, ["n", "g"], ["n", "g"]], sizes=sizes)


@localizer("native_group_norm")
def local_native_group_norm(ctx: LocalContext, call: OpCall) -> Any:
    """Batch, channels and groups as held here."""
    x, weight, bias, n, c, hw, groups, eps = call.args
    spec, per_group = ctx.input_spec(0), c // groups
    channels = ctx.local_size(c, 1, spec)
    batch = ctx.local_size(n, 0, spec)
    return ctx.call(call.op, x, weight, bias, batch, channels, hw, ctx.integer("floordiv", channels, per_group), eps)


_TRAINING_ARGUMENT = {
    "batch_norm": 5, "native_batch_norm": 5, "_native_batch_norm_legit_functional": 5, "instance_norm": 5,
}  # fmt: skip


@rule(
    "batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update",
    "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional", "instance_norm",
)  # fmt: skip
def batch_norm(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Elementwise in x (n, c, ...) and weights (c) with running statistics, else only channels are free."""
    position = _TRAINING_ARGUMENT.get(call.name)
    arguments = (x, *rest)
    fixed = position is None if position is None else not arguments[position]
    if call.name == "_native_batch_norm_legit":
        fixed = False
    if call.name == "instance_norm":
        names = ["n", "c"] + [f"!s{i}" for i in range(len(x.shape) - 2)]
    else:
        mark = "" if fixed else "!"
        names = [f"{mark}n", "c"] + [f"{mark}s{i}" for i in range(len(x.shape) - 2)]
    statistics = [["c"] if t.shape[0] == x.shape[1] else ["!none"] for t in call.outputs[1:]]
    return call.build([names] + [["c"]] * (len(call.tensors) - 1), [names, *statistics])


@rule("normalize", "l1_normalize", "local_response_norm")
def along_channels(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping:
    """Neighbours along dim 1 are looked at."""
    names = ["n", "!c"] + free_dims(len(x.shape) - 2)
    return call.build([names], [names])


never_empty(
    "group_norm", "native_group_norm", "batch_norm", "native_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_batch_norm_no_update",
    "instance_norm",
)  # fmt: skip
