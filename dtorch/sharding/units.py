"""Which units a dimension falls into: heads of a projection, parts of a fused QKV, groups of a GQA.

In: a Problem. Out: `Value.units` and `Step.units`, strides at which some reader or writer splits a dimension.
A view of 576 as (9, 64) marks the stride 64 of that dimension, and the mark travels through every op's factors
(so to the weight that made it) until nothing changes. Strides of one dimension form a divisor chain.
"""

from __future__ import annotations

from dtorch.sharding.factors import Dims, Mapping
from dtorch.sharding.problem import Problem, Step

_ROUNDS = 6


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
        step.units = tuple(sorted((factor, tuple(sorted(marks))) for factor, marks in strides.items() if marks))


def _visit(problem: Problem, step: Step) -> bool:
    values = problem.values
    tensors = (*step.inputs, *step.outputs)
    if not step.template.splits_dims and not any(any(values[index].units) for index in tensors):
        return False
    changed = False
    for mapping in step.template.mappings:
        strides = _factor_strides(problem, step, mapping)
        for index, dims in zip(tensors, (*mapping.inputs, *mapping.outputs)):
            units = values[index].units
            for dim, factors in enumerate(dims):
                marks = _dim_marks(factors, mapping, strides, values[index].shape[dim])
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
                for stride in units[dim]:
                    if inner < stride < inner * size and stride % inner == 0 and size % (stride // inner) == 0:
                        found.setdefault(factor, set()).add(stride // inner)
                inner *= size
    return found


def _dim_marks(factors: tuple[str, ...], mapping: Mapping, strides: dict[str, set[int]], size: int) -> list[int]:
    marks: list[int] = []
    inner = 1
    for factor in reversed(factors):
        if inner > 1:
            marks.append(inner)
        marks.extend(inner * stride for stride in strides.get(factor, ()))
        inner *= mapping.sizes[factor]
    return marks


def _chain(present: tuple[int, ...], marks: list[int], size: int) -> tuple[int, ...]:
    """Add strides that keep the divisor chain; one that does not fit is left out (its view gathers instead)."""
    if not marks:
        return present
    chain = list(present)
    for mark in marks:
        if 1 < mark < size and size % mark == 0 and mark not in chain:
            if all(mark % stride == 0 or stride % mark == 0 for stride in chain):
                chain.append(mark)
    return tuple(sorted(chain)) if len(chain) != len(present) else present
