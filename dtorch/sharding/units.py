"""Which units a dimension falls into: heads of a projection, groups of a GQA, parts of a fused QKV.

In: a Problem. Out: `Value.units` and `Step.units`, strides at which some reader or writer splits a dimension.
A view of 576 as (9, 64) marks the stride 64 of that dimension: a cut keeps such units whole. A split into three
equal parts of 768 marks -768: a cut goes through every part alike. Marks travel through every op's factors (so to
the weight that made the value) until nothing changes. Strides of one dimension form a divisor chain.
"""

from __future__ import annotations

import torch

from dtorch.sharding.factors import Dims, Mapping
from dtorch.sharding.problem import Problem, Step

_ROUNDS = 6
_aten = torch.ops.aten
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)
_NOT_UNITS = (_aten.slice.Tensor, _aten.cat.default)  # halves of a head (rotary) are no units


def mark_units(problem: Problem) -> None:
    """Fill in `units`, going back and forth over the steps until no dimension gains a stride."""
    steps = [step for step in problem.steps if step.template.mappings]
    for number in range(_ROUNDS):
        changed = False
        for step in reversed(steps) if number % 2 == 0 else steps:
            changed = _visit(problem, step) or changed
        if not changed and number:
            break
    for step in steps:
        strides = _factor_strides(problem, step, step.template.mappings[0])
        found = ((factor, tuple(sorted(marks, key=abs))) for factor, marks in strides.items() if marks)
        step.units = tuple(sorted(found))


def _visit(problem: Problem, step: Step) -> bool:
    values = problem.values
    tensors = (*step.inputs, *step.outputs)
    if not step.template.splits_dims and not any(any(values[index].units) for index in tensors):
        return False
    changed = False
    op = step.template.op
    own = 0 if op in _NOT_UNITS else -1 if op in _SPLITS else 1
    for mapping in step.template.mappings:
        strides = _factor_strides(problem, step, mapping)
        for index, dims in zip(tensors, (*mapping.inputs, *mapping.outputs)):
            units = values[index].units
            for dim, factors in enumerate(dims):
                marks = _dim_marks(factors, mapping, strides, own)
                merged = _chain(units[dim], marks, values[index].shape[dim])
                if merged != units[dim]:
                    units[dim] = merged
                    changed = True
    return changed


def _factor_strides(problem: Problem, step: Step, mapping: Mapping) -> dict[str, set[int]]:
    """For each factor the strides marked inside it by any tensor that has it."""
    found: dict[str, set[int]] = {}
    tensors: list[tuple[int, Dims]] = list(zip((*step.inputs, *step.outputs), (*mapping.inputs, *mapping.outputs)))
    for index, dims in tensors:
        units = problem.values[index].units
        for dim, factors in enumerate(dims):
            if not units[dim]:
                continue
            inner = 1
            for factor in reversed(factors):
                size = mapping.sizes[factor]
                for mark in units[dim]:
                    stride = abs(mark)
                    if inner < stride < inner * size and stride % inner == 0 and size % (stride // inner) == 0:
                        found.setdefault(factor, set()).add(stride // inner if mark > 0 else -(stride // inner))
                inner *= size
    return found


def _dim_marks(factors: tuple[str, ...], mapping: Mapping, strides: dict[str, set[int]], own: int) -> list[int]:
    """Marks of one dimension: those inside its factors, and those between them with the sign `own` (0: none)."""
    marks: list[int] = []
    inner = 1
    for factor in reversed(factors):
        if inner > 1 and own:
            marks.append(inner * own)
        marks.extend(inner * stride for stride in strides.get(factor, ()))
        inner *= mapping.sizes[factor]
    return marks


def _chain(present: tuple[int, ...], marks: list[int], size: int) -> tuple[int, ...]:
    """Add marks that keep the divisor chain; one that does not fit is left out (its view gathers instead).

    A stride that is marked both ways counts as one of equal parts.
    """
    if not marks:
        return present
    chain = {abs(mark): mark for mark in present}
    for mark in marks:
        stride = abs(mark)
        if not 1 < stride < size or size % stride:
            continue
        if stride in chain:
            chain[stride] = min(chain[stride], mark)
        elif all(stride % other == 0 or other % stride == 0 for other in chain):
            chain[stride] = mark
    merged = tuple(chain[stride] for stride in sorted(chain))
    return merged if merged != present else present
