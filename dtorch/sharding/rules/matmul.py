"""Products: a contracted factor that is cut leaves partial sums; a bias is added on one coordinate only."""

from __future__ import annotations

from typing import Any

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import never_empty
from dtorch.sharding.rules.registry import Call, rule

_EACH = ((0,), (1,))


@rule("linear")
def linear(call: Call, x: Any, weight: Any, bias: Any = None) -> Mapping:
    """Factors of x (..., i), weight (o, i) or (i), bias (o)."""
    text = "... i, o i, o? -> ... o" if len(weight.shape) == 2 else "... i, i, 1? -> ..."
    return call.notate(text, x, weight, bias, linear=((0, 2), (1, 2)), additive=(2,))


@rule("mm", "bmm", "matmul", "mv", "dot", "vdot", "inner", "outer", "ger", "kron")
def product(call: Call, x: Any, y: Any, *unused: Any, **options: Any) -> Mapping | None:
    """All the products of two tensors, told apart by rank."""
    ranks = len(x.shape), len(y.shape)
    if call.name in ("outer", "ger"):
        text = "m, n -> m n"
    elif call.name == "kron" or (call.name == "inner" and ranks != (1, 1)):
        return None
    elif ranks == (1, 1):
        text = "k, k -> "
    elif ranks[0] == 1:
        text = "k, ... k n -> ... n"
    elif ranks[1] == 1:
        text = "... m k, k -> ... m"
    else:
        text = "... m k, ... k n -> ... m n"
    same = x.dtype == call.outputs[0].dtype
    return call.notate(text, x, y, linear=_EACH if same else ())


@rule("addmm", "baddbmm", "addmv", "addr", "addbmm")
def added_product(call: Call, bias: Any, x: Any, y: Any, **options: Any) -> Mapping | None:
    """Bias + x @ y, the bias broadcast against the result."""
    text = {
        "addmm": (["m", "k"], ["k", "n"], ["m", "n"]),
        "baddbmm": (["b", "m", "k"], ["b", "k", "n"], ["b", "m", "n"]),
        "addmv": (["m", "k"], ["k"], ["m"]),
        "addr": (["m"], ["n"], ["m", "n"]),
        "addbmm": (["b", "m", "k"], ["b", "k", "n"], ["m", "n"]),
    }[call.name]
    result = text[2]
    added = result[len(result) - len(bias.shape) :]
    return call.build([added, text[0], text[1]], [result], linear=((0, 1), (0, 2)), additive=(0,))


@rule("bilinear")
def bilinear(call: Call, x: Any, y: Any, weight: Any, bias: Any = None) -> Mapping:
    """Factors of x (..., i), y (..., j), weight (o, i, j), bias (o)."""
    return call.notate(
        "... i, ... j, o i j, o? -> ... o", x, y, weight, bias, linear=((0, 3), (1, 3), (2, 3)), additive=(3,)
    )


never_empty("bilinear")


@rule("einsum")
def einsum(call: Call, equation: str, tensors: Any, **options: Any) -> Mapping | None:
    """The equation is the rule; a letter used twice in one operand (a diagonal) stays whole."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if "..." in equation or len(operands) != len(call.tensors):
        return None
    if not arrow:
        right = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    twice = {letter for operand in operands for letter in operand if operand.count(letter) > 1}
    return call.build(operands, [right], blocked=twice, linear=[(position,) for position in range(len(operands))])


@rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped(call: Call, x: Any, y: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Mapping | None:
    """Matrices of unequal heights against one each: rows are grouped by `offs`, so neither rows nor groups are cut.

    The kernel wants rows of whole 16 bytes, so factors are cut in units of as many elements; transformers' own
    op for other types does not.
    """
    if bias is not None:
        return None
    first, second, result = {
        (2, 3): ("!m k", "!g k n", "!m n"),
        (3, 2): ("g m k", "k !n", "m !n"),
        (2, 2): ("m !k", "!k n", "!g m n"),
        (3, 3): ("g m k", "g k n", "g m n"),
    }[len(x.shape), len(y.shape)]
    unit = max(1, 16 // x.dtype.itemsize) if call.name == "_grouped_mm" else 1
    sizes = {"!u": unit}

    def dims(text: str, tensor: Any) -> list[Any]:
        written: list[Any] = text.split()
        for dim, size in enumerate(tensor.shape):
            if written[dim] in ("m", "k", "n"):
                name = written[dim] if size % unit == 0 else f"!{written[dim]}"
                sizes[name] = size // unit if size % unit == 0 else size
                written[dim] = (name, "!u") if size % unit == 0 else name
        return written

    inputs = [dims(first, x), dims(second, y), *([["!offs"]] * (len(call.tensors) - 2))]
    return call.build(inputs, [dims(result, call.outputs[0])], sizes=sizes, linear=_EACH)


@rule("_scaled_mm", "_scaled_grouped_mm", "_int_mm")
def quantised(call: Call, x: Any, y: Any, *rest: Any, **options: Any) -> Mapping | None:
    """Integer products are exact; scaled ones have scales whose layout we do not read."""
    return call.notate("m k, k n -> m n") if call.name == "_int_mm" else None
