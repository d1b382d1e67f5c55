"""Tensors made from nothing: constant ones are made in parts, counted ones whole, random ones always whole.

Tensors like another one take its dims; those with a shape of their own read nothing but its type.
"""

from __future__ import annotations

from typing import Any

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import LocalContext, OpCall, localizer
from dtorch.sharding.rules.registry import Call, free_dims, replicated, rule

_CONSTANT = ("full", "zeros", "ones", "empty", "new_full", "new_zeros", "new_ones", "new_empty")


@rule(*_CONSTANT)
def constant(call: Call, *args: Any, **options: Any) -> Mapping:
    """Every dim of the result is free; an input lends its type only."""
    outputs = free_dims(len(call.outputs[0].shape))
    inputs = [[f"!i{i}" for i in range(len(t.shape))] for t in call.tensors]
    return call.build(inputs, [outputs], ignored=range(len(inputs)))


@localizer(*_CONSTANT)
def local_constant(ctx: LocalContext, call: OpCall) -> Any:
    """The local shape in place of the global one."""
    shape = ctx.local_shape(call.outputs[0].shape, ctx.output_spec())
    args = list(call.args)
    args[1 if call.op.name().startswith("aten::new_") else 0] = shape
    return ctx.call(call.op, *args, **call.kwargs)


@rule("full_like", "zeros_like", "ones_like", "empty_like")
def like(call: Call, x: Any, *rest: Any, **options: Any) -> Mapping:
    """The dims of x."""
    names = free_dims(len(x.shape))
    return call.build([names], [names])


@rule("scalar_tensor", "arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "range", "hann_window")
def counted(call: Call, *args: Any, **options: Any) -> Mapping:
    """Whole."""
    return replicated(call)


@rule(
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial",
    "normal", "normal_functional", "uniform", "exponential", "poisson",
)  # fmt: skip
def random(call: Call, *args: Any, **options: Any) -> Mapping:
    """Whole: every device draws the single device's numbers."""
    return replicated(call)


@rule("_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_size", "sym_numel")
def check(call: Call, *args: Any, **options: Any) -> Mapping:
    """No tensor results."""
    return replicated(call)
