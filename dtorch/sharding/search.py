"""Choose a placement for every value on one mesh axis: pins first, then a beam over the steps.

In: a Problem, what is pinned or free on this axis, and the choices for earlier axes. Out: an `AxisChoice`.
The beam keeps the best few states, a state being what placements the live values are at hand in; so an
all-reduce can be put off past a residual, and a column-parallel layer is only worth it with the row-parallel one
behind it. A purely local greedy choice misses both. Cost: steps × width, whatever the number of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtorch.ir.cost import CostModel
from dtorch.ir.layout import PENDING, WHOLE, Pending, Placed, Split
from dtorch.sharding.moves import At, Axis, Free, Interned, Menu, Move, Strategy, made_with
from dtorch.sharding.problem import Problem, Step

BEAM_WIDTH = 6
FORMS = 4  # of the widest live value, at most


@dataclass
class AxisChoice:
    """The outcome for one axis: per value the placement it is made with, per step the strategy taken."""

    placed: list[Placed]
    strategies: list[Strategy]
    seconds: float


@dataclass(eq=False)
class _State:
    seconds: float
    rank: float  # seconds, plus the reductions that live Pending values will still need
    at: tuple[int, ...]  # of the live values, in the order of `live`, as numbers
    before: _State | None
    move: Move | None


def choose(
    problem: Problem,
    given: dict[int, At | Free],
    earlier: list[AxisChoice],
    earlier_sizes: tuple[int, ...],
    size: int,
    cost: CostModel,
    tied: dict[int, int],
    cut_results: bool = False,
    width: int = BEAM_WIDTH,
) -> AxisChoice:
    """Run the beam. `given`: placements or options of the graph's inputs; `tied`: state output → state input.

    cut_results: results may be left cut at no cost, as on an axis that cuts the batch.
    """
    if size == 1:
        return _all_whole(problem)
    axis = Axis(len(earlier), size, cost, {}, earlier_sizes)
    search = _Search(problem, axis, earlier, tied, cut_results)
    live: list[int] = []
    states = [_State(0.0, 0.0, (), None, None)]
    entered: set[int] = set()
    for position, step in enumerate(problem.steps):
        fresh = [i for i in dict.fromkeys(step.inputs) if i not in entered and i in given]
        entered.update(fresh)
        if fresh:
            live = live + fresh
            extra = tuple([search.numbers.number(given[i]) for i in fresh])
            for state in states:
                state.at = state.at + extra
        states, live = search.advance(step, position, states, live)
        states = _pruned(states, _widest(problem, live, given), width)
    best = min(states, key=lambda state: state.seconds)
    return _trace(problem, best, given)


def _widest(problem: Problem, live: list[int], given: dict[int, At | Free]) -> int | None:
    """Position among the live values of the largest one that a step made: usually the residual stream."""
    made = [i for i, value in enumerate(live) if value not in given]
    return max(made, key=lambda i: problem.values[live[i]].size_bytes) if made else None


def _pruned(states: list[_State], widest: int | None, width: int) -> list[_State]:
    """The best `width` states for each placement of the widest live value, so that none of its forms dies out early."""
    if len(states) <= width:
        return states
    kept: list[_State] = []
    count: dict[object, int] = {}
    for state in sorted(states, key=_rank):
        form = None if widest is None else state.at[widest]
        seen = count.get(form, 0)
        if seen < width:
            count[form] = seen + 1
            kept.append(state)
            if len(kept) >= FORMS * width:
                break
    return kept


def _rank(state: _State) -> float:
    return state.rank


class _Search:
    """What stays the same over one run of the beam."""

    def __init__(
        self, problem: Problem, axis: Axis, earlier: list[AxisChoice], tied: dict[int, int], cut_results: bool
    ) -> None:
        self.problem, self.axis, self.earlier, self.tied = problem, axis, earlier, tied
        self.cut_results = cut_results
        self.numbers = Interned()
        self.sizes = _bytes_on_axis(problem, earlier, axis.earlier)
        self.last_use, self.results = _last_uses(problem, tied)
        if problem.open_results:
            self.results = set()
        self.debts = [axis.cost.convert(PENDING, WHOLE, size, axis.size) for size in self.sizes]
        self._menus: dict[tuple, Menu] = {}

    def menu(self, step: Step, position: int) -> Menu:
        """The options of a step, shared by all steps like it."""
        cuts = tuple(
            tuple([WHOLE if p is None else p for p in placed])
            for placed in zip(*[c.strategies[position].placed for c in self.earlier])
        ) or ((),) * (len(step.inputs) + len(step.outputs))
        key = (id(step.template), step.units, cuts)
        found = self._menus.get(key)
        if found is None:
            sizes = tuple([self.sizes[value] for value in step.inputs])
            found = self._menus[key] = Menu(self.axis, step, cuts, sizes, self.numbers)
        return found

    def advance(
        self, step: Step, position: int, states: list[_State], live: list[int]
    ) -> tuple[list[_State], list[int]]:
        """Extend every state by the options of one step and merge those that end up alike."""
        last_use, only_pending = self.last_use, self.numbers.only_pending
        where = {value: i for i, value in enumerate(live)}
        slots = [where[value] for value in step.inputs]
        stays = [i for i, value in enumerate(live) if last_use.get(value, -1) > position]
        made = [k for k, value in enumerate(step.outputs) if last_use.get(value, -1) > position]
        settled = [(k, v) for k, v in enumerate(step.outputs) if v in self.results and last_use.get(v, -1) <= position]
        settled_live = [(i, v) for i, v in enumerate(live) if v in self.results and last_use.get(v, -1) == position]
        kept = [live[i] for i in stays] + [step.outputs[k] for k in made]
        debts = [self.debts[value] for value in kept]
        menu = self.menu(step, position)
        merged: dict[tuple[int, ...], _State] = {}
        for state in states:
            at = state.at
            for option in menu.options(tuple([at[slot] for slot in slots])):
                seconds = state.seconds + option.seconds
                entries = list(at)
                for slot, after in zip(slots, option.after):
                    entries[slot] = after if entries[slot] == at[slot] else self._joined(entries[slot], after)
                for k, value in settled:
                    seconds += self._settle(option.outputs[k], value, where, entries)
                for i, value in settled_live:
                    seconds += self._settle(entries[i], value, where, entries)
                key = tuple([entries[i] for i in stays] + [option.outputs[k] for k in made])
                known = merged.get(key)
                if known is None or seconds < known.seconds:
                    rank = seconds
                    for entry, debt in zip(key, debts):
                        if only_pending[entry]:
                            rank += debt
                    merged[key] = _State(seconds, rank, key, state, option.move)
        return list(merged.values()), kept

    def _joined(self, first: int, second: int) -> int:
        """A value that one step reads twice is at hand in what either reading made of it."""
        numbers = self.numbers
        return numbers.number(tuple(dict.fromkeys((*numbers.at(first), *numbers.at(second)))))

    def _settle(self, number: int, value: int, where: dict[int, int], entries: list[int]) -> float:
        """Cost of handing a result out: reductions are finished, a state goes back to where it came from.

        Whoever reads a result wants all of it: a cut one is left cut, but fetching it costs a gather. A resident one
        is read by later steps instead; it costs memory on every device that it is kept whole on.
        """
        at = self.numbers.entries[number]
        if isinstance(at, Free):
            return 0.0
        axis, size = self.axis, self.sizes[value]
        partner = self.tied.get(value)
        if partner is not None and partner in where:
            home = made_with(self.numbers.entries[entries[where[partner]]])
            return min(axis.cost.convert(source, home, size, axis.size) for source in at)
        if value in self.problem.resident:
            made = at[0]
            kept = size / (2 * axis.cost.network_bytes_per_s)  # worth less than one gather of it
            reduced = WHOLE if type(made) is Pending else made
            share = axis.size if type(made) is Split else 1
            return kept / share + axis.cost.convert(made, reduced, size, axis.size)
        if self.cut_results and any(type(source) is Split for source in at):
            return 0.0
        return min(axis.cost.convert(source, WHOLE, size, axis.size) for source in at)


def _last_uses(problem: Problem, tied: dict[int, int]) -> tuple[dict[int, int], set[int]]:
    """Position of each value's last reading step, and which values are results of the graph."""
    last: dict[int, int] = {}
    for position, step in enumerate(problem.steps):
        for value in step.inputs:
            last[value] = position
    outputs = {index for index in problem.outputs if index is not None}
    made_at = {value: position for position, step in enumerate(problem.steps) for value in step.outputs}
    for output, source in tied.items():  # the input's placement is still needed when its new value is settled
        settled = max(last.get(output, -1), made_at.get(output, -1))
        last[source] = max(last.get(source, -1), settled + 1)
    return last, outputs


def _bytes_on_axis(problem: Problem, earlier: list[AxisChoice], sizes: tuple[int, ...]) -> list[float]:
    """Bytes of each value on one device of the earlier axes."""
    result = []
    for value in problem.values:
        share = 1.0
        for choice, count in zip(earlier, sizes):
            if type(choice.placed[value.index]) is Split:
                share /= count
        result.append(value.size_bytes * share)
    return result


def _trace(problem: Problem, best: _State, given: dict[int, At | Free]) -> AxisChoice:
    placed: list[Placed] = [WHOLE] * len(problem.values)
    for value, entry in given.items():
        placed[value] = made_with(entry)
    path: list[Move] = []
    state: _State | None = best
    while state is not None and state.move is not None:
        path.append(state.move)
        state = state.before
    path.reverse()
    decided: set[int] = set()
    for step, move in zip(problem.steps, path):
        for value, after in zip(step.inputs, move.after):
            if value in given and value not in decided:
                placed[value] = after[0]
            decided.add(value)
        for value, output in zip(step.outputs, move.strategy.outputs):
            placed[value] = output
    return AxisChoice(placed, [move.strategy for move in path], best.seconds)


def _all_whole(problem: Problem) -> AxisChoice:
    strategies = [
        Strategy((WHOLE,) * len(step.inputs), (WHOLE,) * len(step.outputs), 0.0) for step in problem.steps
    ]
    return AxisChoice([WHOLE] * len(problem.values), strategies, 0.0)
