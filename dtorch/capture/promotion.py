"""Results of integers that are floats by torch's default dtype: the dtype of the call, whoever runs the plan, and when.

In: an expansion, and the metadata of the tensors it is for. Out: the same with conversions before the operators whose
result would follow the default dtype of the moment (`ints / 2`, `ints * 0.5`, `sqrt(ints)`), so that none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.steps import Expansion, Ref, Step, collect_refs, fill, ref
from dtorch.capture.symbol import TensorMeta, tensor_meta

aten = torch.ops.aten
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def dtypes_pinned(expansion: Expansion, metas: Sequence[TensorMeta]) -> Expansion:
    """The expansion without results that depend on the default dtype under which it runs."""
    inputs = [meta.dtype for meta in metas] + [constant.dtype for constant in expansion.constants]
    if all(_is_inexact(dtype) for dtype in inputs) and not any(_is_exact(step.val) for step in expansion.steps):
        return expansion
    values: list[Any] = [*metas, *expansion.constants]
    moved: list[Ref] = [ref(i) for i in range(len(values))]
    steps: list[Step] = []

    def add(step: Step) -> Ref:
        steps.append(step)
        return ref(len(inputs) + len(steps) - 1)

    for step in expansion.steps:
        places, target, args = list(moved), step.target, step.args
        for index in _promoted(step, values):
            meta = _converted(values[index], step.val)
            places[index] = add(Step(aten._to_copy.default, (moved[index],), {"dtype": meta.dtype}, meta.val()))
        if target is aten.where.Scalar:  # of a condition and two numbers
            meta = tensor_meta((), (), step.val.dtype, step.val.device)
            number = add(
                Step(aten.full.default, ([], args[1]), {"dtype": meta.dtype, "device": meta.device}, meta.val())
            )
            target, args = aten.where.ScalarOther, (args[0], number, args[2])
            places += [number] * (number.index + 1 - len(places))
        moved.append(add(Step(target, fill(args, places), fill(step.kwargs, places), step.val)))
        values.append(step.val)
    if len(steps) == len(expansion.steps):
        return expansion
    return Expansion(tuple(steps), fill(expansion.outputs, moved), expansion.constants, expansion.random)


def _promoted(step: Step, values: list[Any]) -> list[int]:
    """The tensors that a step makes numbers of the default dtype of; none, where its dtype comes from elsewhere."""
    if not isinstance(step.val, torch.Tensor) or _is_exact(step.val):
        return []
    if not isinstance(step.target, torch_private.OpOverload):
        return []
    if any(isinstance(item, torch.dtype) for item in (*step.args, *step.kwargs.values())):
        return []
    found: set[int] = set()
    collect_refs((step.args, step.kwargs), found)
    if not all(_is_exact(values[index]) for index in found):
        return []
    if step.target.overloadpacket is aten.where:
        found.discard(step.args[0].index)  # the condition
    return sorted(found)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_exact(value: Any) -> bool:
    return isinstance(value, (TensorMeta, torch.Tensor)) and not _is_inexact(value.dtype)


def _converted(value: Any, result: torch.Tensor) -> TensorMeta:
    """A copy of whole numbers as floats of a result's kind; it keeps the order of the dims in memory."""
    shape, given = tuple(value.shape), value.stride if isinstance(value, TensorMeta) else value.stride()
    with torch_private.without_function_modes():
        strides = torch.empty_like(torch.empty_strided(shape, given, device="meta")).stride()
    return tensor_meta(shape, strides, _REAL.get(result.dtype, result.dtype), result.device)
