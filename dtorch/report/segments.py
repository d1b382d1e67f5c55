"""The segments of eager code that one graph compiled: kept to be looked at, dumped, and told of in a log.

In: traces that have no plan yet, and what became of them. Out: `CompiledSegment`s with the methods of a compiled
module, folders of dumps, and lines of the log `recompiles` that say what was new about a trace.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from dtorch.capture.eager import Called, Entered, Moved, Trace
from dtorch.compiler import Compiled
from dtorch.ir.spec import from_spec
from dtorch.ir.text import node_line, spec_text, value_text, where_text
from dtorch.options import current, logger
from dtorch.report.inspection import Inspection, write_dump

Entry = Entered | Moved | Called


@dataclass(frozen=True)
class Recorded:
    """What a trace is made of, apart from the trie that it lies in: `entries` in order, `wanted` slots."""

    entries: tuple[Entry, ...]
    wanted: tuple[int, ...]

    @property
    def steps(self) -> int:
        """How many steps it has, values that come in left out."""
        return sum(1 for entry in self.entries if not isinstance(entry, Entered))

    def lines(self) -> tuple[str, ...]:
        """The user's lines that recorded it, in the order of recording, each once."""
        return tuple(dict.fromkeys(entry.where for entry in self.entries if isinstance(entry, Called) and entry.where))

    def results(self) -> str:
        """The wanted values by the places that made them."""
        places = [place for entry in self.entries for place in [_place(entry)] * _results(entry)]
        found = [places[index] or "an input, moved" for index in self.wanted]
        return f"{len(found)} ({', '.join(dict.fromkeys(found))})"

    def span(self) -> str:
        """`5 steps, <first line> to <last line>`."""
        lines = [entry.where for entry in self.entries if isinstance(entry, Called) and entry.where]
        ends = " to ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else "no line of the user's"
        return f"{self.steps} step{'' if self.steps == 1 else 's'}, {ends}"


class CompiledSegment(Inspection):
    """A segment of eager code, looked at like a compiled module: `passes`, `graph`, `diff`, `plan`, `placements`.

    `number` counts the segments that its graph compiled, from 0; `steps` those of the recording.
    """

    def __init__(self, number: int, recorded: Recorded, compiled: Compiled) -> None:
        self.number, self.recorded, self.compiled = number, recorded, compiled
        self.steps = recorded.steps

    def lines(self) -> tuple[str, ...]:
        """The user's lines it was recorded from, in order: `file:line in function: source`.

        Equal traces share a segment: these are the lines that recorded it first.
        """
        return self.recorded.lines()

    def placements(self) -> dict[str, tuple]:
        """Public placements of the values that come in and of those that go out, by their names in the graphs."""
        placed = {item.target: from_spec(item.spec) for item in self.plan().inputs}
        outputs = zip(self.compiled.traced.signature.outputs, self.compiled.placement.outputs, strict=True)
        return placed | {item.name: from_spec(spec) for item, spec in outputs if spec is not None}

    @property
    def mesh(self) -> str:
        """The mesh in short: `mesh(tp=2)`."""
        axes = zip(self.compiled.plan.axis_names, self.compiled.plan.mesh_shape, strict=True)
        return f"mesh({', '.join(f'{name}={size}' for name, size in axes)})"

    def __repr__(self) -> str:
        return f"CompiledSegment({self.number} on {self.mesh}: {self.recorded.span()})"

    def _inspected(self) -> Compiled:
        return self.compiled


class SegmentJournal:
    """The segments that a graph compiled last. One thread at a time compiles; any may look."""

    def __init__(self, kept: int) -> None:
        self._kept: deque[CompiledSegment] = deque(maxlen=kept)
        self._count = 0

    def segments(self) -> list[CompiledSegment]:
        """The segments compiled last, oldest first."""
        return list(self._kept)

    def announce(self, trace: Trace) -> None:
        """Say in the log `recompiles` that a trace is compiled now, and why."""
        log = logger("recompiles")
        if log.isEnabledFor(logging.INFO):
            recorded = recorded_of(trace)
            why = difference(recorded, self.segments())
            log.info("segment %d: %s; %s", self._count, recorded.span(), why)

    def add(self, trace: Trace, compiled: Compiled) -> None:
        """Keep a segment, and write its dump if the options ask for one."""
        segment = CompiledSegment(self._count, recorded_of(trace), compiled)
        self._count += 1
        self._kept.append(segment)
        folder = current().dump
        if folder is not None:
            more = {"number": segment.number, "steps": segment.steps, "lines": segment.lines()}
            write_dump(Path(folder), "segment", segment.mesh, compiled, segment.number, more)


def recorded_of(trace: Trace) -> Recorded:
    """A trace's entries; unlike its states, they keep nothing of the trie alive."""
    return Recorded(tuple(state.entry for state in trace.state.path()), trace.wanted)


def difference(recorded: Recorded, known: Sequence[CompiledSegment]) -> str:
    """What is new about a trace next to the most similar of the segments `known`, in words."""
    if not known:
        return "the first of its graph"
    nearest = min(reversed(known), key=lambda segment: _distance(recorded, segment.recorded))
    name, entries, before = f"segment {nearest.number}", recorded.entries, nearest.recorded.entries
    same, apart = _common(entries, before), _distance(recorded, nearest.recorded)[0]
    if same < min(len(entries), len(before)):
        if apart > max(recorded.steps, nearest.steps):
            return "first time seen"
        now, then = _first_difference(entries[same], before[same])
        return f"unlike {name} in {now}, which was {then}"
    if len(entries) > len(before):
        return f"goes on where {name} ended, with {_described(entries[same])}"
    if len(before) > len(entries):
        return f"ends where {name} goes on with {_described(before[same])}"
    if recorded.wanted != nearest.recorded.wanted:
        return f"the steps of {name} for other results: {recorded.results()}, which were {nearest.recorded.results()}"
    return f"the steps of {name}, which was forgotten since"


def _distance(one: Recorded, other: Recorded) -> tuple[int, int, bool]:
    """How many operations only one of them calls, then how few are equal up to the first difference; least: alike."""
    surplus = Counter(map(_name, one.entries))
    surplus.subtract(map(_name, other.entries))
    del surplus[Entered.__name__]
    differing = sum(map(abs, surplus.values()))
    return differing, -_common(one.entries, other.entries), one.wanted != other.wanted


def _common(one: Sequence[Entry], other: Sequence[Entry]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if not _same(a, b):
            break
        count += 1
    return count


def _same(one: Entry, other: Entry) -> bool:
    if isinstance(one, Called) and isinstance(other, Called):  # whatever line recorded them
        return one.placed is other.placed and one.inputs == other.inputs
    return one == other


def _name(entry: Entry) -> str:
    return entry.placed.name if isinstance(entry, Called) else type(entry).__name__


def _results(entry: Entry) -> int:
    return len(entry.placed.outputs) if isinstance(entry, Called) else 1


def _place(entry: Entry) -> str:
    return where_text(entry.where) if isinstance(entry, Called) else ""


def _first_difference(one: Entry, other: Entry) -> tuple[str, str]:
    """The first operations of two entries that differ, in words; of equal ones the values they take do."""
    for now, then in zip_longest(_texts(one), _texts(other), fillvalue="nothing"):
        if now != then:
            return now + _at(one), then + _at(other)
    return f"the values that {_described(one)} takes", f"those of {_described(other)}"


def _described(entry: Entry) -> str:
    return _texts(entry)[0] + _at(entry)


def _at(entry: Entry) -> str:
    return f" @ {_place(entry)}" if _place(entry) else ""


def _texts(entry: Entry) -> list[str]:
    """An entry in the words of dumped graphs, an operation each."""
    if isinstance(entry, Entered):
        return [f"an input {value_text(entry.meta.val())} {spec_text(entry.spec)}"]
    if isinstance(entry, Moved):
        return [f"redistribute {spec_text(entry.before)} to {spec_text(entry.after)}"]
    nodes = [node for node in entry.placed.graph.graph.nodes if node.op == "call_function"]
    return [node_line(node) for node in nodes] or [entry.placed.name]
