"""Scaled dot product attention: batch, heads and query rows may be cut; key rows and head dims may not.

With grouped heads there are two readings: queries and keys are cut alike, or queries are cut to single heads while
keys and values are whole (fewer KV heads than devices), and every device picks the KV heads of its queries.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import LocalContext, OpCall, as_is, cuts_of, localizer, never_empty
from dtorch.sharding.rules.registry import Call, replicated, rule

aten = torch.ops.aten


@rule("scaled_dot_product_attention")
def attention(
    call: Call,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Mapping | tuple[Mapping, ...]:
    """Q (..., head, s, d), k (..., kv head, t, d), v (..., kv head, t, e), mask (..., head, s, t)."""
    if dropout_p > 0:
        return replicated(call)
    rows = "!s" if is_causal else "s"
    rank = max(len(t.shape) for t in (q, k, v))
    batch = [f"b{i}" for i in range(rank - 2)]
    if not (enable_gqa and rank > 2 and q.shape[-3] != k.shape[-3]):
        return _attention(call, rank, batch, batch, rows, {})
    kv_heads = k.shape[-3]
    grouped = {"h": kv_heads, "g": q.shape[-3] // kv_heads}
    return (
        _attention(call, rank, [*batch[:-1], ("h", "g")], [*batch[:-1], "h"], rows, grouped),
        _attention(call, rank, [*batch[:-1], "heads"], [*batch[:-1], "!h"], rows, {}),
    )


def _attention(call: Call, rank: int, queries: list, keys: list, rows: str, sizes: dict[str, int]) -> Mapping:
    written: list[list[Any]] = [[*queries, rows, "!d"], [*keys, "!t", "!d"], [*keys, "!t", "!e"]]
    if len(call.tensors) == 4:
        written.append([*queries, rows, "!t"])
    inputs = [dims[rank - len(tensor.shape) :] for dims, tensor in zip(written, call.tensors)]
    return call.build(inputs, [[*queries, rows, "!e"]], sizes=sizes, linear=((2,),))


@localizer("scaled_dot_product_attention")
def local_attention(ctx: LocalContext, call: OpCall) -> Any:
    """Pick the KV heads of this device's queries where queries are cut to heads and keys are whole."""
    q, k, v, *rest = call.args
    q_meta, k_meta = call.meta_args[:2]
    rank = len(q_meta.shape)
    if not call.kwargs.get("enable_gqa") or rank < 3 or q_meta.shape[-3] == k_meta.shape[-3]:
        return as_is(ctx, call)
    dim, heads, kv_heads = rank - 3, q_meta.shape[-3], k_meta.shape[-3]
    spec = ctx.input_spec(0)
    cuts = cuts_of(spec, dim)
    if not cuts or cuts_of(ctx.input_spec(1), dim) or all(placed.outer % kv_heads == 0 for placed in cuts):
        return as_is(ctx, call)
    index = held_units(ctx, heads, dim, spec, q_meta.device)
    index = ctx.call(aten.floor_divide.default, index, heads // kv_heads)
    k, v = (ctx.call(aten.index_select.default, x, dim, index) for x in (k, v))
    options = {name: value for name, value in call.kwargs.items() if name != "enable_gqa"}
    return ctx.call(call.op, q, k, v, *rest, **options)


def held_units(ctx: LocalContext, size: int, dim: int, spec: Any, device: Any) -> Any:
    """Indices, in the uncut dimension, of the elements of it that are held here; one interval cuts it."""
    (placed,) = cuts_of(spec, dim)
    begin = ctx.begin(size, dim, spec)
    held = ctx.integer("floordiv", ctx.local_size(size, dim, spec), placed.outer * placed.unit)
    parts = ctx.call(aten.arange.start, begin, ctx.integer("add", begin, held), device=device)
    if placed.unit > 1:
        inner = ctx.call(aten.arange.default, placed.unit, device=device)
        parts = ctx.call(aten.unsqueeze.default, ctx.call(aten.mul.Tensor, parts, placed.unit), 1)
        parts = ctx.call(aten.reshape.default, ctx.call(aten.add.Tensor, parts, inner), [-1])
    if placed.outer > 1:
        step = size // placed.outer
        starts = ctx.call(aten.arange.start_step, 0, size, step, device=device)
        starts = ctx.call(aten.unsqueeze.default, starts, 1)
        parts = ctx.call(aten.reshape.default, ctx.call(aten.add.Tensor, starts, parts), [-1])
    return parts


_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
never_empty(*_KERNELS)


@rule(*_KERNELS)
def fused_attention(call: Call, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Mapping | None:
    """The kernels behind it, for graphs that were taken below it: only batch and heads, when they agree."""
    if q.shape[:2] != k.shape[:2] or any(is_bias.shape[0] != q.shape[0] for is_bias in call.tensors[3:]):
        return None
    written = [["b", "h", f"!{name}0", f"!{name}1"] for name in "qkv"]
    written += [["b", "h", "!m0", "!m1"]] * (len(call.tensors) - 3)
    outputs = [["b", "h", *(f"!o{k}_{d}" for d in range(2, len(t.shape)))] for k, t in enumerate(call.outputs[:2])]
    outputs += [[f"!r{k}_{d}" for d in range(len(t.shape))] for k, t in enumerate(call.outputs[2:])]
    return call.build(written, outputs)
