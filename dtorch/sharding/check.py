"""Prove a sharding rule on examples: run an op whole and in parts, under every strategy of its rule, and compare.

In: an op with real arguments. Out: how many runs were compared, or a `RuleError` that names the strategy, the mesh
and the difference. No runtime is needed: devices are coordinates of a loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from dtorch.ir.layout import (
    Pending,
    Spec,
    Split,
    dim_cuts,
    local_bounds,
    local_dim,
    local_shape,
    put_local,
    take_local,
)
from dtorch.sharding.factors import Alternatives, Mapping, Strategy, carry, cut, whole
from dtorch.sharding.localize import OpCall, localize
from dtorch.sharding.rules.registry import is_tensor, mappings_of, tensors_in

_REDUCE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
Coordinate = tuple[int, ...]
Shape = tuple[int, ...]


class RuleError(AssertionError):
    """A rule does not hold: the op in parts gives something else than the op as a whole."""


@dataclass(frozen=True)
class Choice:
    """One strategy of a rule, with what was cut: `cuts` is `(factor, outer, unit)` or None."""

    strategy: Strategy
    cuts: tuple[str, int, int] | None = None


class RealContext:
    """A `LocalContext` over real tensors: localisers run at once, at one coordinate."""

    def __init__(
        self, mesh_shape: Shape, coordinate: Coordinate, inputs: Sequence[Spec], outputs: Sequence[Spec]
    ) -> None:
        self.mesh_shape, self.coordinate = mesh_shape, coordinate
        self._inputs, self._outputs = inputs, outputs

    def input_spec(self, position: int) -> Spec:
        """Placement of tensor argument `position`."""
        return self._inputs[position]

    def output_spec(self, position: int = 0) -> Spec:
        """Placement of tensor result `position`."""
        return self._outputs[position]

    def local_shape(self, shape: Sequence[int], spec: Spec) -> list[int]:
        """Local shape at this coordinate."""
        return list(local_shape(tuple(shape), spec, self.mesh_shape, self.coordinate))

    def local_size(self, size: int, dim: int, spec: Spec) -> int:
        """Local size of one dim at this coordinate."""
        return local_dim(size, dim, spec, self.mesh_shape, self.coordinate)

    def begin(self, size: int, dim: int, spec: Spec) -> int:
        """First unit held of the one interval that cuts `dim`."""
        ((_, _, begin, _),) = local_bounds(size, dim_cuts(spec, dim, self.mesh_shape, self.coordinate))
        return begin

    def integer(self, function: str, *operands: int) -> int:
        """Plain arithmetic."""
        first, second = operands
        return {
            "add": first + second,
            "sub": first - second,
            "mul": first * second,
            "floordiv": first // second if second else 0,
            "min": min(first, second),
            "max": max(first, second),
        }[function]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return function(*args, **kwargs)


def replace_tensors(value: Any, new: Iterator[Any]) -> Any:
    """Arguments with their tensors replaced, in order."""
    if isinstance(value, dict):
        return {name: replace_tensors(item, new) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(replace_tensors(item, new) for item in value)
    return next(new) if is_tensor(value) else value


def addends(tensor: torch.Tensor, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """`count` tensors that add up to `tensor`, none of them telling."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        others = [torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) for _ in range(count - 1)]
    else:
        others = [torch.randint(-9, 9, tensor.shape, generator=generator, dtype=tensor.dtype) for _ in range(count - 1)]
    return [*others, tensor - sum(others)] if others else [tensor]


def scatter(tensor: torch.Tensor, spec: Spec, mesh_shape: Shape, generator: torch.Generator) -> dict[Coordinate, Any]:
    """What every coordinate holds of a tensor placed as `spec`."""
    held: dict[Coordinate, torch.Tensor] = {(): tensor}
    for placed, count in zip(spec, mesh_shape, strict=True):
        spread = {}
        for coordinate, value in held.items():
            parts = addends(value, count, generator) if type(placed) is Pending else [value] * count
            spread.update({(*coordinate, index): part for index, part in enumerate(parts)})
        held = spread
    return {c: take_local(value, spec, mesh_shape, c).contiguous() for c, value in held.items()}


def gather(
    held: dict[Coordinate, torch.Tensor], spec: Spec, mesh_shape: Shape, like: torch.Tensor
) -> tuple[torch.Tensor, str]:
    """The full tensor from what the coordinates hold, and a complaint when copies differ."""
    cut_axes = [axis for axis, placed in enumerate(spec) if type(placed) is Split]
    other_axes = [axis for axis, placed in enumerate(spec) if type(placed) is not Split]
    full: dict[Coordinate, torch.Tensor] = {}
    for coordinate, local in held.items():
        key = tuple(coordinate[axis] for axis in other_axes)
        if key not in full:
            full[key] = torch.zeros(like.shape, dtype=local.dtype)
        put_local(full[key], local, spec, mesh_shape, coordinate)
    complaint = ""
    for axis in reversed(other_axes):
        position = other_axes.index(axis)
        placed = spec[axis]
        copies: dict[Coordinate, list[torch.Tensor]] = {}
        for key, value in full.items():
            copies.setdefault(key[:position] + key[position + 1 :], []).append(value)
        merged: dict[Coordinate, torch.Tensor] = {}
        for key, values in copies.items():
            if not isinstance(placed, Pending):
                if any(difference(values[0], value) > 1e-9 for value in values[1:]):
                    complaint = f"axis {axis} is said to hold copies, but they differ"
                merged[key] = values[0]
            else:
                merged[key] = _REDUCE[placed.op](torch.stack(values), 0).to(values[0].dtype)
        full = merged
        other_axes = [other for other in other_axes if other != axis]
    assert len(full) == 1, (cut_axes, other_axes)
    return next(iter(full.values())), complaint


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the expected values' magnitude; equal infinities and NaNs do not differ."""
    if expected.numel() == 0:
        return 0.0
    if expected.dtype.is_complex:
        return difference(torch.view_as_real(found.resolve_conj()), torch.view_as_real(expected.resolve_conj()))
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(found, expected) else float("inf")
    same = (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    apart = torch.where(same, torch.zeros_like(expected), found - expected).abs().max()
    finite = torch.nan_to_num(expected, posinf=0, neginf=0).abs().max().clamp(min=1)
    return float(apart / finite) if not apart.isnan() else float("inf")


def results(value: Any) -> list[torch.Tensor]:
    """The tensor results of an op."""
    return tensors_in([value])


def intervals(size: int) -> list[tuple[int, int]]:
    """A few ways to cut a factor: as a whole, in units, in each of several outer parts, both."""
    divisors = [d for d in range(2, size) if size % d == 0]
    found = [(1, 1)]
    if divisors:
        found += [(1, divisors[0]), (divisors[0], 1)]
    if any(size % (a * b) == 0 and a * b < size for a in divisors for b in divisors):
        found.append(next((a, b) for a in divisors for b in divisors if size % (a * b) == 0 and a * b < size))
    return found


def choices(rule: Mapping | Alternatives) -> list[Choice]:
    """Every strategy of a rule on one axis, factors cut at several intervals."""
    if isinstance(rule, Alternatives):
        return [Choice(strategy) for strategy in rule.strategies]
    found = [Choice(whole(rule))]
    for factor in rule.cuttable():
        for outer, unit in intervals(rule.sizes[factor]):
            found.append(Choice(cut(rule, factor, outer, unit), (factor, outer, unit)))
    return found + [Choice(carry(rule, pending)) for pending in rule.linear]


@dataclass(frozen=True)
class Parts:
    """What an op run in parts gave: for each result what every coordinate holds, and how it is placed."""

    local: list[dict[Coordinate, torch.Tensor]]
    placed: list[Spec]
    told: str


def run_parts(
    op: Any,
    args: tuple,
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
    chosen: Sequence[Choice],
    mesh_shape: Shape,
    seed: int = 0,
) -> Parts:
    """Run an op under one strategy per mesh axis at every coordinate; `outputs` are the results of the whole op."""
    tensors = tensors_in([*args, *kwargs.values()])
    input_specs = list(zip(*(choice.strategy[0] for choice in chosen))) if tensors else []
    output_specs = list(zip(*(choice.strategy[1] for choice in chosen)))
    told = (
        f"{op} on {[tuple(t.shape) for t in tensors]}, mesh {mesh_shape}, cut {[choice.cuts for choice in chosen]}: "
        f"{input_specs} -> {output_specs}"
    )
    generator = torch.Generator().manual_seed(seed)
    held = [scatter(t, spec, mesh_shape, generator) for t, spec in zip(tensors, input_specs, strict=True)]
    local: list[dict[Coordinate, torch.Tensor]] = [{} for _ in outputs]
    for coordinate in product(*map(range, mesh_shape)):
        new_args, new_kwargs = replace_tensors([list(args), kwargs], iter([parts[coordinate] for parts in held]))
        ctx = RealContext(mesh_shape, coordinate, input_specs, output_specs)
        try:
            call = OpCall(op, tuple(new_args), new_kwargs, args, kwargs, tuple(outputs))
            values = results(localize(ctx, call))
        except Exception as error:
            raise RuleError(f"{told}: at {coordinate}: {type(error).__name__}: {error}") from error
        for position, value in enumerate(values):
            wanted = local_shape(tuple(outputs[position].shape), output_specs[position], mesh_shape, coordinate)
            if tuple(value.shape) != wanted or value.dtype != outputs[position].dtype:
                raise RuleError(
                    f"{told}: at {coordinate} result {position} is {value.dtype}{tuple(value.shape)}, "
                    f"not {outputs[position].dtype}{wanted}"
                )
            local[position][coordinate] = value
    return Parts(local, output_specs, told)


def check_choice(
    op: Any,
    args: tuple,
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
    chosen: Sequence[Choice],
    mesh_shape: Shape,
    *,
    tolerance: float,
    seed: int = 0,
) -> None:
    """Run one strategy per mesh axis and compare what all coordinates hold together with the whole op's `outputs`."""
    parts = run_parts(op, args, kwargs, outputs, chosen, mesh_shape, seed)
    for position, output in enumerate(outputs):
        found, complaint = gather(parts.local[position], parts.placed[position], mesh_shape, output)
        apart = difference(found, output)
        if complaint or apart > tolerance:
            raise RuleError(f"{parts.told}: result {position} is off by {apart:.2e} {complaint}")


def compatible(first: Choice, second: Choice) -> bool:
    """Whether two strategies may stand on two axes at once: one factor is not cut at two overlapping intervals."""
    return first.cuts is None or second.cuts is None or first.cuts[0] != second.cuts[0] or first.cuts == second.cuts


def combinations(found: Sequence[Choice], count: int, draw: random.Random) -> Iterator[tuple[Shape, list[Choice]]]:
    """Up to `count` random meshes of two or three axes with a strategy for each axis, that may stand together."""
    for _ in range(count * 4 if len(found) > 1 else 0):
        mesh_shape = draw.choice([(2, 2), (2, 3), (3, 2), (2, 2, 2)])
        chosen = [draw.choice(found[1:]) for _ in mesh_shape]
        if all(compatible(a, b) for k, a in enumerate(chosen) for b in chosen[:k]):
            yield mesh_shape, chosen
            count -= 1
            if not count:
                return


def check_rule(
    op: Any,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    *,
    axis_sizes: Sequence[int] = (1, 2, 3, 4),
    joint: int = 12,
    tolerance: float = 1e-9,
    seed: int = 0,
) -> tuple[str, int]:
    """Compare under every strategy of the op's rule on axes of `axis_sizes`, and under `joint` random joint ones.

    Joint strategies run on meshes of two and three axes. Gives the rule's source and the number of runs.
    Raises RuleError at the first that differs.
    """
    kwargs = kwargs or {}
    outputs = results(op(*args, **kwargs))
    rules, source = mappings_of(op, args, kwargs, outputs)
    draw = random.Random(seed)
    runs = 0
    for rule in (rules,) if isinstance(rules, Alternatives) else rules:
        found = choices(rule)
        plans = [((count,), [choice]) for count in axis_sizes for choice in (found if count > 1 else found[:1])]
        for mesh_shape, chosen in (*plans, *combinations(found, joint, draw)):
            check_choice(op, args, kwargs, outputs, chosen, mesh_shape, tolerance=tolerance, seed=seed)
            runs += 1
    return source, runs
