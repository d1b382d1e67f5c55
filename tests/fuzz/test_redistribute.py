"""Every change of placement, lowered and run on simulated devices, against slices of the full tensor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule

from dtorch.ir import ops
from dtorch.ir.layout import PENDING, WHOLE, Pending, Placed, Spec, Split, Whole, take_local
from dtorch.ir.signature import InputSpec, OutputSpec, Signature
from dtorch.ir.verify import verify
from dtorch.lower.emit import emit
from dtorch.lower.lower import lower
from dtorch.lower.schedule import schedule
from dtorch.runtime.simulate import SimulatedRuntime
from dtorch.sharding.propagate import Placement
from dtorch.sharding.redistribute import plan_hops
from dtorch.torch_private import fake_tensor

NAMES = ("a", "b", "c")


def moved(full: torch.Tensor, source: Spec, target: Spec, mesh: tuple[int, ...]) -> dict[tuple[int, ...], torch.Tensor]:
    """Lower and run one redistribution; what every coordinate holds afterwards."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta.update(val=fake_tensor(tuple(full.shape), full.stride(), full.dtype, full.device), spec=source)
    y = graph.call_function(ops.redistribute, (x, source, target))
    y.meta.update(val=x.meta["val"], spec=target)
    graph.output((y,))
    module = GraphModule({}, graph)
    signature = Signature(
        (InputSpec("x", "user", "x", tuple(full.shape), full.dtype, full.stride()),), (OutputSpec(y.name),)
    )
    local = lower(module, mesh, NAMES[: len(mesh)])
    verify(local, "local", None, dict(zip(NAMES, mesh)))
    schedule(local)
    plan = emit(local, signature, Placement({"x": source}, (target,), ()), mesh, NAMES[: len(mesh)])
    runtime = SimulatedRuntime(mesh)
    (data,) = runtime.load(plan).run([spread(runtime, full, source)])
    axes = [axis for axis, placed in enumerate(target) if type(placed) is not Whole and mesh[axis] > 1]
    parts = data if axes else [data]
    held = {}
    for coordinate in itertools.product(*[range(size) for size in mesh]):
        index = 0
        for axis in axes:
            index = index * mesh[axis] + coordinate[axis]
        held[coordinate] = parts[index]
    return held


def spread(runtime: SimulatedRuntime, full: torch.Tensor, spec: Spec) -> Any:
    """Data placed as `spec`; Pending axes hold random addends (equal values for max, min and avg)."""
    mesh = runtime.mesh_shape
    axes = [axis for axis, placed in enumerate(spec) if type(placed) is not Whole and mesh[axis] > 1]
    if not axes:
        return full.clone()
    sums = [axis for axis in axes if spec[axis] == PENDING]
    addends: dict[tuple[int, ...], torch.Tensor] = {}
    choices = list(itertools.product(*[range(mesh[axis]) for axis in sums]))
    generator = torch.Generator().manual_seed(7)
    rest = full
    for choice in choices[1:]:
        addends[choice] = torch.randint(-9, 9, full.shape, generator=generator).to(full.dtype)
        rest = rest - addends[choice]
    addends[choices[0]] = rest
    parts = []
    for coordinate in itertools.product(*[range(mesh[axis]) if axis in axes else (0,) for axis in range(len(mesh))]):
        value = addends[tuple(coordinate[axis] for axis in sums)]
        parts.append(take_local(value, spec, mesh, coordinate).clone())
    return parts


def check(full: torch.Tensor, source: Spec, target: Spec, mesh: tuple[int, ...]) -> None:
    held = moved(full, source, target, mesh)
    sums = [axis for axis, placed in enumerate(target) if placed == PENDING]
    totals: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinate, part in held.items():
        key = tuple(0 if axis in sums else index for axis, index in enumerate(coordinate))
        totals[key] = totals[key] + part if key in totals else part.clone()
    for coordinate, total in totals.items():
        expected = take_local(full, target, mesh, coordinate)
        assert total.shape == expected.shape, (source, target, mesh, coordinate)
        assert torch.equal(total, expected), (source, target, mesh, coordinate)


def numbers(*shape: int) -> torch.Tensor:
    """Integers as float64, so that sums are exact in any order."""
    count = 1
    for size in shape:
        count *= size
    return torch.arange(1, count + 1, dtype=torch.float64).reshape(shape)


UNITS = (Split(1, 1, 2), Split(1, 3, 1), Split(1, 3, 2))
ONE_AXIS: tuple[Placed, ...] = (WHOLE, PENDING, Split(0), Split(1), Split(2), *UNITS)


@pytest.mark.parametrize("shape", [(4, 12, 6), (5, 12, 3), (1, 12, 7), (3, 24, 1), (0, 12, 2)])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_transition_on_one_axis(shape: tuple[int, ...], count: int) -> None:
    full = numbers(*shape)
    for source, target in itertools.product(ONE_AXIS, ONE_AXIS):
        check(full, (source,), (target,), (count,))


def fits(spec: Spec, shape: tuple[int, ...]) -> bool:
    """Whether cuts of one dimension are of one interval or of disjoint ones."""
    cuts = [placed for placed in spec if type(placed) is Split]
    for first, second in itertools.combinations(cuts, 2):
        if first.dim != second.dim or first == second:
            continue
        size = shape[first.dim]
        low, high = (first.unit, second.unit), (size // first.outer, size // second.outer)
        if low[0] < high[1] and low[1] < high[0]:
            return False
    return True


placed_of = st.sampled_from(ONE_AXIS)


@settings(max_examples=400)
@given(st.data())
def test_random_transitions_on_two_and_three_axes(data: st.DataObject) -> None:
    axes = data.draw(st.integers(2, 3))
    mesh = tuple(data.draw(st.integers(1, 4 if axes == 2 else 3)) for _ in range(axes))
    shape = (data.draw(st.integers(0, 5)), data.draw(st.sampled_from([12, 24])), data.draw(st.integers(1, 7)))
    source = tuple(data.draw(placed_of) for _ in range(axes))
    target = tuple(data.draw(placed_of) for _ in range(axes))
    if not (fits(source, shape) and fits(target, shape)):
        return
    check(numbers(*shape), source, target, mesh)


@pytest.mark.parametrize("source", ["max", "min", "avg"])
def test_other_reductions_end_in_whole_or_cut(source: str) -> None:
    full = numbers(5, 12)
    for target in (WHOLE, Split(0), Split(1)):
        held = moved(full, (Pending(source),), (target,), (3,))
        for coordinate, part in held.items():
            assert torch.equal(part, take_local(full, (target,), (3,), coordinate))


def test_inner_cuts_are_undone_before_outer_ones_change() -> None:
    hops = plan_hops((Split(0), Split(0)), (WHOLE, Split(0)))
    assert [(hop.kind, hop.axis) for hop in hops] == [("all_gather", 1), ("all_gather", 0), ("slice", 1)]


def test_one_exchange_moves_a_cut_to_another_dim() -> None:
    assert [hop.kind for hop in plan_hops((Split(0),), (Split(1),))] == ["all_to_all"]


def test_a_sum_that_is_cut_afterwards_is_one_reduce_scatter() -> None:
    assert [hop.kind for hop in plan_hops((PENDING,), (Split(1),))] == ["reduce_scatter"]
