"""From one placement to another: the sequence of single-axis steps, each one collective or one local operation.

In: two Specs of one value. Out: `Hop`s in order. Cuts of one interval by several axes nest (a later axis cuts
what an earlier one left), so inner cuts are undone before outer ones change, and made again after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtorch.errors import ShardingError
from dtorch.ir.layout import WHOLE, Pending, Placed, Spec, Split, Whole

Kind = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "keep_first"]


@dataclass(frozen=True)
class Hop:
    """One step on one mesh axis: `before` and `after` are the whole Specs around it."""

    kind: Kind
    axis: int
    before: Spec
    after: Spec

    @property
    def cut_before(self) -> Split:
        """The cut on the axis that the step undoes."""
        placed = self.before[self.axis]
        assert type(placed) is Split, f"{self.kind} starts from a cut, not from {placed}"
        return placed

    @property
    def cut_after(self) -> Split:
        """The cut on the axis that the step makes."""
        placed = self.after[self.axis]
        assert type(placed) is Split, f"{self.kind} ends in a cut, not in {placed}"
        return placed

    @property
    def reduction(self) -> str:
        """The reduction that the step finishes."""
        placed = self.before[self.axis]
        assert type(placed) is Pending, f"{self.kind} starts from a pending value, not from {placed}"
        return placed.op


def plan_hops(source: Spec, target: Spec) -> tuple[Hop, ...]:
    """The steps that turn `source` into `target`. Raises ShardingError for what cannot be (a cut to Pending)."""
    hops: list[Hop] = []
    current = list(source)
    changed = [axis for axis in range(len(source)) if source[axis] != target[axis]]
    redone = _nested_inside(source, target, changed)

    def hop(kind: Kind, axis: int, placed: Placed) -> None:
        before = tuple(current)
        current[axis] = placed
        hops.append(Hop(kind, axis, before, tuple(current)))

    for axis in sorted({*changed, *redone}, reverse=True):
        if type(current[axis]) is not Split:
            continue
        wanted = target[axis]
        if axis not in redone and type(wanted) is Split and _may_exchange(axis, current, target):
            hop("all_to_all", axis, wanted)
        else:
            hop("all_gather", axis, WHOLE)
    for axis in range(len(source)):
        wanted = target[axis]
        if current[axis] == wanted:
            continue
        if type(current[axis]) is Pending and type(wanted) is Whole:
            hop("all_reduce", axis, wanted)
        elif type(current[axis]) is Pending and type(wanted) is Split:
            hop("reduce_scatter", axis, wanted)
        elif type(current[axis]) is Whole and type(wanted) is Split:
            hop("slice", axis, wanted)
        elif type(current[axis]) is Whole and type(wanted) is Pending and wanted.op in ("sum", "avg"):
            if wanted.op == "sum":
                hop("keep_first", axis, wanted)
            else:
                current[axis] = wanted  # every coordinate holds the mean already
        elif type(current[axis]) is Pending and type(wanted) is Pending:
            hop("all_reduce", axis, WHOLE)
            if wanted.op == "sum":
                hop("keep_first", axis, wanted)
            elif wanted.op in ("avg", "max", "min"):
                current[axis] = wanted
            else:
                raise ShardingError(f"no way from {source} to {target}: {wanted} cannot be made from a whole value")
        elif type(wanted) is Pending and wanted.op in ("max", "min"):
            current[axis] = wanted  # equal values everywhere are their own maximum and minimum
        else:
            raise ShardingError(f"no way from {source} to {target} on mesh axis {axis}")
    return tuple(hops)


def _interval(placed: Placed) -> tuple[int, int, int] | None:
    return (placed.dim, placed.outer, placed.unit) if type(placed) is Split else None


def _nested_inside(source: Spec, target: Spec, changed: list[int]) -> set[int]:
    """Axes that stay as they are but cut an interval that an earlier axis stops or starts cutting."""
    redone = set()
    for axis, placed in enumerate(source):
        if axis in changed or type(placed) is not Split:
            continue
        outer = [a for a in changed if a < axis]
        if any(_interval(placed) in (_interval(source[a]), _interval(target[a])) for a in outer):
            redone.add(axis)
    return redone


def _may_exchange(axis: int, current: list[Placed], target: Spec) -> bool:
    """Whether one all-to-all does: different dims, and no other axis now or later cuts the target's dim."""
    source, wanted = current[axis], target[axis]
    if type(source) is not Split or type(wanted) is not Split or source.dim == wanted.dim:
        return False
    others = [p for a, p in enumerate(current) if a != axis] + [p for a, p in enumerate(target) if a != axis]
    return all(type(p) is not Split or p.dim not in (wanted.dim, source.dim) for p in others)
