"""What one step can do on one mesh axis: its strategies, and what each costs given where its inputs are.

In: a step, the axis size, how earlier axes cut the step's tensors, and the placements at hand of each input.
Out: `Move`s, cheapest first, cached by all of that, so that repeated blocks of a model are weighed once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dtorch.ir.cost import CostModel, is_reduction_pair
from dtorch.ir.layout import WHOLE, Pending, Placed, Split, Whole
from dtorch.sharding.factors import Mapping, carry, cut, locate
from dtorch.sharding.problem import Step, Template

At = tuple[Placed, ...]  # placements of a value that exist already; the first is the one it was made with


@dataclass(frozen=True)
class Free:
    """An input whose placement is still open. `options` in order of preference; `keep_s`: cost of keeping it Whole.

    `loose`: a value given by the host, which may also be cut on arrival without communication.
    """

    options: tuple[Placed, ...]
    keep_s: float = 0.0
    bytes: int = 0


def made_with(entry: At | Free) -> Placed:
    """The placement a value was made with; the preferred one where it is still open."""
    return entry.options[0] if isinstance(entry, Free) else entry[0]


@dataclass(frozen=True)
class Strategy:
    """One legal way to run an op on one axis: a placement for every tensor argument and result.

    None for an argument whose values are not read, so that any placement will do.
    """

    inputs: tuple[Placed | None, ...]
    outputs: tuple[Placed, ...]
    seconds: float

    @property
    def placed(self) -> tuple[Placed | None, ...]:
        """Placements of all tensors, arguments first."""
        return (*self.inputs, *self.outputs)


@dataclass(frozen=True)
class Move:
    """A strategy together with what it makes of the inputs at hand: their placements afterwards, and the cost."""

    strategy: Strategy
    after: tuple[At, ...]
    seconds: float


Cuts = tuple[tuple[Placed, ...], ...]  # for each tensor of a step, its placements on the earlier axes


@dataclass
class Axis:
    """One mesh axis while it is being decided."""

    index: int
    size: int
    cost: CostModel
    strategies: dict[Any, tuple[Strategy, ...]]
    earlier: tuple[int, ...] = ()  # sizes of the axes decided before
    keep: int = 10  # options looked at for each step and state


class Interned:
    """Numbers for placements at hand, so that states of the search are tuples of small ints."""

    def __init__(self) -> None:
        self.entries: list[At | Free] = []
        self.only_pending: list[bool] = []
        self._numbers: dict[At | Free, int] = {}

    def at(self, number: int) -> At:
        """The placements of an entry that is not open."""
        entry = self.entries[number]
        assert not isinstance(entry, Free), "the placement of this value is still open"
        return entry

    def number(self, entry: At | Free) -> int:
        """The number of an entry; equal entries have equal numbers."""
        found = self._numbers.get(entry)
        if found is None:
            found = self._numbers[entry] = len(self.entries)
            self.entries.append(entry)
            self.only_pending.append(type(entry) is tuple and len(entry) == 1 and type(entry[0]) is Pending)
        return found


@dataclass(frozen=True)
class Option:
    """A move in numbers: what the inputs are at afterwards, what the outputs are at."""

    seconds: float
    after: tuple[int, ...]
    outputs: tuple[int, ...]
    move: Move


class Menu:
    """The options of all steps with one template, units and earlier cuts, by where their inputs are."""

    def __init__(self, axis: Axis, step: Step, earlier: Cuts, sizes: tuple[float, ...], numbers: Interned) -> None:
        self._make = (axis, step, earlier, sizes)
        self._numbers = numbers
        self._options: dict[tuple[int, ...], tuple[Option, ...]] = {}

    def options(self, at: tuple[int, ...]) -> tuple[Option, ...]:
        """The best few options for inputs that are `at` these numbered placements."""
        found = self._options.get(at)
        if found is None:
            axis, step, earlier, sizes = self._make
            numbers = self._numbers
            made = []
            for move in _weigh(axis, step, earlier, tuple([numbers.entries[i] for i in at]), sizes):
                after = tuple([numbers.number(entry) for entry in move.after])
                outputs = tuple([numbers.number((placed,)) for placed in move.strategy.outputs])
                made.append(Option(move.seconds, after, outputs, move))
            found = self._options[at] = tuple(made)
        return found


def _weigh(
    axis: Axis, step: Step, earlier: Cuts, at: tuple[At | Free, ...], sizes: tuple[float, ...]
) -> tuple[Move, ...]:
    """The best few moves of a step for inputs that are `at` these placements; `sizes`: their bytes on this axis."""
    result: list[Move] = []
    if not any(_starts_cut(entry) for entry in at):
        strategies: tuple[Strategy, ...] = (_all_whole(axis, step),)
    else:
        strategies = _strategies(axis, step, earlier, at)
    pending = any(not isinstance(entry, Free) and any(type(p) is Pending for p in entry) for entry in at)
    for strategy in strategies:
        if not pending and any(type(p) is Pending for p in strategy.inputs) and not _needs_pending(strategy):
            continue
        seconds, after = strategy.seconds, []
        for entry, wanted, size in zip(at, strategy.inputs, sizes):
            extra, now = _bring(axis, entry, wanted, size)
            seconds += extra
            if seconds == math.inf:
                break
            after.append(now)
        else:
            result.append(Move(strategy, tuple(after), seconds))
    result.sort(key=lambda move: move.seconds)
    best: dict[Any, Move] = {}
    for move in result:  # of moves with the same outcome the cheapest
        best.setdefault((move.after, move.strategy.outputs), move)
    return tuple(list(best.values())[: axis.keep])


def _all_whole(axis: Axis, step: Step) -> Strategy:
    template = step.template
    ignored = template.mappings[0].ignored if template.mappings else ()
    inputs = tuple([None if place in ignored else WHOLE for place in range(len(step.inputs))])
    outputs = (WHOLE,) * len(step.outputs)
    return Strategy(inputs, outputs, _seconds(axis, template, inputs, outputs, 1.0))


def _starts_cut(entry: At | Free) -> bool:
    """Whether an input may be the reason to cut an op: a weight to be cut, or a value that is not whole already.

    Whole activations are not sliced just to save a little arithmetic: every such cut ends in a gather, and the many
    ways to do it would crowd better states out of the beam.
    """
    if isinstance(entry, Free):
        return entry.keep_s > 0.0
    return any(type(placed) is not Whole for placed in entry)


def _needs_pending(strategy: Strategy) -> bool:
    """Whether Pending inputs stand beside cut ones (a bias that is added in once), not all by themselves."""
    return any(type(p) is Split for p in strategy.inputs)


def _bring(axis: Axis, entry: At | Free, wanted: Placed | None, size: float) -> tuple[float, At]:
    """Cost of having a value placed as `wanted`, and the placements at hand afterwards."""
    if wanted is None:
        return 0.0, (entry.options[0],) if isinstance(entry, Free) else entry
    if isinstance(entry, Free):
        best: tuple[float, At] = (math.inf, (wanted,))
        for rank, option in enumerate(entry.options):
            kept = entry.keep_s if type(option) is Whole else entry.keep_s / axis.size
            convert = axis.cost.convert(option, wanted, size, axis.size)
            if entry.keep_s and type(option) is Split and option != wanted:
                convert *= 64.0  # a stored weight is not to be gathered at every step
            total = kept + convert + rank * 1e-12
            if type(option) is Split and option.outer > 1:
                total += axis.cost.collective_s  # cuts inside a unit seem free until something reads the whole unit
            if total < best[0]:
                best = (total, (option,) if option == wanted else (option, wanted))
        return best
    if wanted in entry:
        return 0.0, entry
    cheapest = min(axis.cost.convert(source, wanted, size, axis.size) for source in entry)
    return cheapest, (*entry, wanted)


# --- strategies ---------------------------------------------------------------------------------------------------


def _strategies(axis: Axis, step: Step, earlier: Cuts, at: tuple[At | Free, ...]) -> tuple[Strategy, ...]:
    splits = tuple(
        tuple(p for p in (entry.options if isinstance(entry, Free) else entry) if type(p) is Split) for entry in at
    )
    weights = any(type(entry) is Free for entry in at)
    key = (id(step.template), step.units, earlier, splits, weights)
    found = axis.strategies.get(key)
    if found is None:
        found = axis.strategies[key] = tuple(_enumerate(axis, step, earlier, splits, weights))
    return found


def _enumerate(
    axis: Axis, step: Step, earlier: Cuts, splits: tuple[tuple[Split, ...], ...], weights: bool
) -> list[Strategy]:
    template = step.template
    count_in, count_out = len(step.inputs), len(step.outputs)
    pairs: dict[tuple[tuple[Placed, ...], tuple[Placed, ...]], float] = {
        ((WHOLE,) * count_in, (WHOLE,) * count_out): 1.0
    }
    if template.alternatives is not None:
        for inputs, outputs in template.alternatives.strategies:
            pairs.setdefault((tuple(inputs), tuple(outputs)), _share(axis, template, inputs, outputs, earlier))
    units = dict(step.units)
    for mapping in template.mappings:
        for factor, outer, unit in _candidates(axis, mapping, units, splits, template, earlier, weights):
            pair = cut(mapping, factor, outer, unit)
            if pair not in pairs:
                pairs[pair] = _share(axis, template, *pair, earlier)
        for positions in mapping.linear:
            pairs.setdefault(carry(mapping, positions), 1.0)
    ignored = template.mappings[0].ignored if template.mappings else ()
    result = []
    for (inputs, outputs), share in pairs.items():
        wanted = tuple([None if place in ignored else placed for place, placed in enumerate(inputs)])
        if all(_fits(placed, cuts, shape) for placed, cuts, shape in _places(template, wanted, outputs, earlier)):
            result.append(Strategy(wanted, outputs, _seconds(axis, template, wanted, outputs, share)))
    return result


def _places(template: Template, inputs: tuple, outputs: tuple, earlier: Cuts) -> zip:
    return zip((*inputs, *outputs), earlier, (*template.input_shapes, *template.output_shapes))


def _candidates(
    axis: Axis,
    mapping: Mapping,
    units: dict[str, tuple[int, ...]],
    splits: tuple[tuple[Split, ...], ...],
    template: Template,
    earlier: Cuts,
    weights: bool,
) -> list[tuple[str, int, int]]:
    """Factor intervals worth trying: those the inputs come cut at, and those that whole units allow.

    The latter only where a weight may be cut at will, or where the op cannot take its inputs' cuts as they come.
    """
    found: list[tuple[str, int, int]] = []
    for position, cuts in enumerate(splits):
        for split in cuts:
            if split.dim < len(template.input_shapes[position]):
                left = parts_left(template.input_shapes[position], split, earlier[position], axis)
                where = locate(mapping.inputs[position], mapping.sizes, split, axis.size, left)
                if where is not None and where not in found:
                    found.append(where)
    found = [entry for entry in found if entry[0] not in mapping.blocked]
    if not weights and (found or not any(splits)):
        return found
    taken = _cut_before(axis, mapping, earlier)
    for factor, size in mapping.sizes.items():
        if factor in mapping.blocked or size < 2:
            continue
        for outer, unit in intervals(size, units.get(factor, ()), axis.size * taken.get(factor, 1)):
            if (factor, outer, unit) not in found:
                found.append((factor, outer, unit))
    return found


def _cut_before(axis: Axis, mapping: Mapping, earlier: Cuts) -> dict[str, int]:
    """Into how many pieces the earlier axes have cut each factor already."""
    taken: dict[str, int] = {}
    for dims, cuts in zip((*mapping.inputs, *mapping.outputs), earlier):
        here: dict[str, int] = {}
        for placed, count in zip(cuts, axis.earlier):
            if type(placed) is Split and placed.dim < len(dims):
                for factor in dims[placed.dim]:
                    here[factor] = here.get(factor, 1) * count
        for factor, count in here.items():
            taken[factor] = max(taken.get(factor, 1), count)
    return taken


def intervals(size: int, marks: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    """`(outer, unit)` of the cuts that respect a dimension's marks (see `units`), the preferred one first.

    Without marks that is the plain cut (1, 1). With units (64, 192) of 576 on two devices: whole groups of heads,
    or the heads within each group. With parts (-768) of 2304: the cut that goes through all three parts. For each
    upper end the coarsest unit that still gives every device a part is taken; finer ones split what is read together.
    """
    units = [mark for mark in marks if mark > 0]
    parts = [-mark for mark in marks if mark < 0]
    found = []
    for high in (size, *sorted((abs(mark) for mark in marks), reverse=True)):
        inside = [unit for unit in units if unit < high]
        if high in units and not inside:
            continue  # a unit is not cut
        for low in reversed(inside or [1]):
            if high // low >= count and not any(low < part < high for part in parts):
                found.append((size // high, low))
                break
    if found:
        return found
    return [(1, units[0])] if units and size // units[0] > 1 else [(1, 1)]


def parts_left(shape: tuple[int, ...], split: Split, cuts: tuple[Placed, ...], axis: Axis) -> int:
    """Units of `split` that one device of the earlier axes holds at most (coordinate 0)."""
    parts = shape[split.dim] // (split.outer * split.unit) if split.outer * split.unit else 0
    for other, count in zip(cuts, axis.earlier):
        if other == split:
            parts = -(-parts // count)
    return parts


def _fits(placed: Placed | None, cuts: tuple[Placed, ...], shape: tuple[int, ...]) -> bool:
    """Whether a placement can stand beside those of the earlier axes on the same tensor."""
    if type(placed) is Pending:
        return all(type(other) is not Pending or is_reduction_pair(placed, other) for other in cuts)
    if type(placed) is not Split:
        return True
    if placed.dim >= len(shape):
        return False
    low, high = placed.unit, shape[placed.dim] // placed.outer
    for other in cuts:
        if type(other) is Split and other.dim == placed.dim and other != placed:
            other_low, other_high = other.unit, shape[placed.dim] // other.outer
            if low < other_high and other_low < high:
                return False
    return True


def _share(axis: Axis, template: Template, inputs: tuple, outputs: tuple, earlier: Cuts) -> float:
    """The largest device's part of the work: 1/n where something is cut evenly, more where it is not."""
    for placed, cuts, shape in _places(template, inputs, outputs, earlier):
        if type(placed) is Split and placed.dim < len(shape):
            parts = parts_left(shape, placed, cuts, axis)
            return -(-parts // axis.size) / parts if parts else 1.0
    return 1.0


def _seconds(axis: Axis, template: Template, inputs: tuple, outputs: tuple, share: float) -> float:
    if template.is_view:
        return 0.0
    moved = sum(
        size * (share if type(placed) is Split else 1.0)
        for placed, size in zip((*inputs, *outputs), (*template.input_bytes, *template.output_bytes))
    )
    return axis.cost.compute(template.flops * share, moved)
