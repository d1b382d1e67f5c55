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
from dtorch.sharding.moves import At, Axis, Free, Move, Strategy, moves
from dtorch.sharding.problem import Problem, Step

BEAM_WIDTH = 6


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
    at: tuple[At | Free, ...]  # of the live values, in the order of `live`
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
    width: int = BEAM_WIDTH,
) -> AxisChoice:
    """Run the beam. `given`: placements or options of the graph's inputs; `tied`: state output → state input."""
    axis = Axis(len(earlier), size, cost, {}, {}, earlier_sizes)
    if size == 1:
        return _all_whole(problem)
    divisors = _bytes_on_axis(problem, earlier, earlier_sizes)
    last_use, output_uses = _last_uses(problem, tied)
    live: list[int] = []
    states = [_State(0.0, 0.0, (), None, None)]
    entered: set[int] = set()
    for position, step in enumerate(problem.steps):
        fresh = [i for i in dict.fromkeys(step.inputs) if i not in entered and i in given]
        entered.update(fresh)
        if fresh:
            live = live + fresh
            extra = tuple(given[i] for i in fresh)
            for state in states:
                state.at = state.at + extra
        states, live = _advance(problem, axis, step, position, states, live, last_use, output_uses, earlier, divisors, tied)
        states = _pruned(states, _widest(problem, live, given), width)
    best = min(states, key=lambda state: state.seconds)
    return _trace(problem, best, given)


def _widest(problem: Problem, live: list[int], given: dict[int, At | Free]) -> int | None:
    """Position among the live values of the largest one that a step made: usually the residual stream."""
    made = [i for i, value in enumerate(live) if value not in given]
    return max(made, key=lambda i: problem.values[live[i]].size_bytes) if made else None


def _pruned(states: list[_State], widest: int | None, width: int) -> list[_State]:
    """The best `width` states for each placement of the widest live value, so that none of its forms dies out early."""
    kept: list[_State] = []
    count: dict[object, int] = {}
    for state in sorted(states, key=lambda state: state.rank):
        form = None if widest is None else state.at[widest]
        count[form] = count.get(form, 0) + 1
        if count[form] <= width:
            kept.append(state)
        if len(kept) >= 4 * width:
            break
    return kept


def _advance(
    problem: Problem,
    axis: Axis,
    step: Step,
    position: int,
    states: list[_State],
    live: list[int],
    last_use: dict[int, int],
    output_uses: set[int],
    earlier: list[AxisChoice],
    sizes: list[float],
    tied: dict[int, int],
) -> tuple[list[_State], list[int]]:
    """Extend every state by the moves of one step and merge those that end up alike."""
    where = {value: i for i, value in enumerate(live)}
    slots = [where[value] for value in step.inputs]
    cuts = tuple(
        tuple([WHOLE if p is None else p for p in placed])
        for placed in zip(*[(*c.strategies[position].inputs, *c.strategies[position].outputs) for c in earlier])
    ) or ((),) * (len(step.inputs) + len(step.outputs))
    weights = tuple(sizes[value] for value in step.inputs)
    stays = [i for i, value in enumerate(live) if last_use.get(value, -1) > position]
    made = [k for k, value in enumerate(step.outputs) if last_use.get(value, -1) > position]
    settle = [
        (k, value, tied.get(value))
        for k, value in enumerate(step.outputs)
        if value in output_uses and last_use.get(value, -1) <= position
    ]
    settle_live = [
        (i, value, tied.get(value))
        for i, value in enumerate(live)
        if value in output_uses and last_use.get(value, -1) == position
    ]
    kept = [live[i] for i in stays] + [step.outputs[k] for k in made]
    debts = [axis.cost.convert(PENDING, WHOLE, sizes[value], axis.size) for value in kept]
    resident = problem.resident
    merged: dict[tuple, _State] = {}
    for state in states:
        at = tuple([state.at[slot] for slot in slots])
        for move in moves(axis, step, cuts, at, weights):
            seconds = state.seconds + move.seconds
            entries = list(state.at)
            for slot, after in zip(slots, move.after):
                current = entries[slot]
                entries[slot] = after if type(current) is Free or len(after) > len(current) else current
            outputs = move.strategy.outputs
            for k, value, partner in settle:
                seconds += _settle(axis, (outputs[k],), partner, where, entries, sizes[value], value in resident)
            for i, value, partner in settle_live:
                seconds += _settle(axis, entries[i], partner, where, entries, sizes[value], value in resident)
            key = tuple([entries[i] for i in stays] + [(outputs[k],) for k in made])
            known = merged.get(key)
            if known is None or seconds < known.seconds:
                rank = seconds
                for entry, debt in zip(key, debts):
                    if type(entry) is tuple and type(entry[0]) is Pending and len(entry) == 1:
                        rank += debt
                merged[key] = _State(seconds, rank, key, state, move)
    return list(merged.values()), kept


def _settle(
    axis: Axis,
    at: At | Free,
    partner: int | None,
    where: dict[int, int],
    entries: list[At | Free],
    size: float,
    resident: bool,
) -> float:
    """Cost of handing a result out: reductions are finished, a state goes back to where it came from.

    Whoever reads a result wants all of it: a cut one is left cut, but fetching it costs a gather. A resident one is
    read by later steps instead; it costs memory on every device that it is kept whole on.
    """
    if type(at) is Free:
        return 0.0
    if partner is not None and partner in where:
        home = entries[where[partner]]
        home = home.options[0] if type(home) is Free else home[0]
        return min(axis.cost.convert(source, home, size, axis.size) for source in at)
    if resident:
        made = at[0]
        kept = size / (2 * axis.cost.network_bytes_per_s)  # worth less than one gather of it
        return (kept / axis.size if type(made) is Split else kept) + axis.cost.convert(
            made, WHOLE if type(made) is Pending else made, size, axis.size
        )
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
        placed[value] = entry.options[0] if type(entry) is Free else entry[0]
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
