"""Elementwise ops: dims are aligned to the right and broadcast, and every one of them may be cut.

Every op that torch tags as pointwise comes here without being listed; the list holds those without the tag.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.sharding.factors import Mapping
from dtorch.sharding.rules.registry import Call, free_dims, replicated, rule

_IN_EACH = {"mul", "multiply"}
_IN_FIRST = {"div", "divide", "true_divide"}
_JOINTLY = {"add", "sub", "subtract", "rsub"}
_IDENTITY = {
    "alias", "clone", "contiguous", "detach", "lift", "lift_fresh", "lift_fresh_copy", "neg", "negative", "positive",
    "dropout", "feature_dropout", "alpha_dropout", "real", "imag", "pin_memory", "identity",
}  # fmt: skip
_CASTS = {"to", "_to_copy", "type_as", "_autocast_to_full_precision", "_autocast_to_reduced_precision"}


def keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast of addends gives addends of the cast sum, without more rounding than the addends have."""
    if source == target:
        return source != torch.bool
    if source.is_floating_point and target.is_floating_point:
        return target.itemsize > source.itemsize
    integers = not (source.is_floating_point or target.is_floating_point or source.is_complex or target.is_complex)
    return integers and torch.bool not in (source, target) and target.itemsize > source.itemsize


def linear_sets(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The sets of inputs in which an elementwise op is linear."""
    name, tensors = call.name, call.tensors
    if call.outputs[0].dtype == torch.bool or not tensors:
        return ()
    if name in _IDENTITY or name in _CASTS:
        return ((0,),) if len(tensors) == 1 and keeps_sums(tensors[0].dtype, call.outputs[0].dtype) else ()
    if name in _IN_EACH | _IN_FIRST and _spoils_zeros(name, args):
        return ()
    if name in _IN_EACH:
        return tuple((position,) for position in range(len(tensors)))
    if name in _IN_FIRST:
        return ((0,),) if kwargs.get("rounding_mode") is None and tensors[0] is args[0] else ()
    if name in _JOINTLY:
        return ((0, 1),) if len(tensors) == 2 else ()
    if name == "zero":
        return ((0,),)
    if name == "copy":  # the first lends its shape and dtype
        return ((0, 1), (1,)) if len(tensors) == 2 and keeps_sums(tensors[1].dtype, tensors[0].dtype) else ()
    if name == "where":
        return ((1, 2),) if len(tensors) == 3 else ()
    if name == "masked_fill":
        return ((0,),) if len(tensors) == 2 and args[2] == 0 else ()
    return ()


def _spoils_zeros(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a number makes more than zeros of zeros, which most devices hold of a sum that is not formed yet."""
    numbers = [number for number in args if isinstance(number, (int, float, complex))]
    if name in _IN_FIRST:
        return any(number == 0 for number in numbers[-1:])
    return any(number * 0 != 0 for number in numbers)


@rule(
    "add", "alias", "clone", "contiguous", "detach", "lift", "lift_fresh", "lift_fresh_copy", "to", "_to_copy",
    "type_as", "where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", "masked_fill", "floor_divide",
    "rsub", "true_divide", "divide", "multiply", "subtract", "negative", "positive", "__and__", "__or__", "__xor__",
    "__lshift__", "__rshift__", "gelu", "silu", "relu", "relu6", "mish", "hardswish", "hardsigmoid", "hardtanh",
    "leaky_relu", "elu", "selu", "celu", "softplus", "log_sigmoid", "tanhshrink", "prelu_kernel",
    "square", "clip", "clamp", "isfinite", "isinf", "isnan", "isposinf", "isneginf", "logical_not", "lerp", "addcmul",
    "addcdiv", "pow", "float_power", "nan_to_num", "_autocast_to_full_precision", "_autocast_to_reduced_precision",
    "fill", "expit", "erf", "sigmoid", "isreal", "fix", "absolute", "arctan2", "greater", "less",
    "greater_equal", "less_equal", "not_equal", "ldexp", "complex", "polar", "threshold", "rrelu_eval",
    "softshrink", "hardshrink", "real", "imag", "result_type", "conj", "_conj", "resolve_conj", "resolve_neg", "xlogy",
    "zero", "isclose", "copy",
)  # fmt: skip
def pointwise(call: Call, *args: Any, **kwargs: Any) -> Mapping:
    """Every dim is free; size one against a larger size is whole."""
    if torch.Tag.nondeterministic_seeded in call.op.tags:
        return replicated(call)
    return elementwise(call, args, kwargs)


def elementwise(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping:
    """The mapping of an elementwise op."""
    rank = len(call.outputs[0].shape)
    names = free_dims(rank)
    return call.build(
        [names[rank - len(t.shape) :] for t in call.tensors],
        [names] * len(call.outputs),
        linear=linear_sets(call, args, kwargs),
    )


@rule("dropout", "feature_dropout", "alpha_dropout", "native_dropout")
def dropout(call: Call, x: Any, p: float = 0.5, train: bool | None = False) -> Mapping:
    """The identity when not training; random numbers are those of the whole tensor, so it is whole otherwise."""
    return replicated(call) if train and p > 0 else elementwise(call, (x,), {})


@rule("glu")
def glu(call: Call, x: Any, dim: int = -1) -> Mapping:
    """Halves of one dim: its inner part may be cut, as in both halves alike."""
    names = free_dims(len(x.shape))
    whole = list(names)
    dim %= len(names)
    whole[dim] = ("!two", names[dim])
    return call.build([whole], [names], sizes={"!two": 2, names[dim]: x.shape[dim] // 2})


@rule("prelu", "_prelu_kernel")
def prelu(call: Call, x: Any, weight: Any) -> Mapping:
    """One slope for each channel (dim 1), or a single one."""
    names = free_dims(len(x.shape))
    slopes = names[len(names) - len(weight.shape) :] if len(weight.shape) > 1 else names[1:2] or [None]
    return call.build([names, slopes if len(weight.shape) else []], [names])


@rule("view_as_real")
def view_as_real(call: Call, x: Any) -> Mapping:
    """A new last dim of two, which is whole."""
    names = free_dims(len(x.shape))
    return call.build([names], [[*names, "!parts"]], linear=((0,),))
