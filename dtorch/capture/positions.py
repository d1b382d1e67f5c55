"""Integers in indexes that change from call to call become values: `x[:, t]` in a loop is one program for all t.

In: an indexing call on an eager tensor, and what the same place of the program indexed before. Out: the view, or the
write through it, with the integer as a 0-d tensor (`index_select`, `index_copy`); or `NOT_TAKEN`: the call stays as it
is. Taken are integers, and slices of a constant length whose start changes: also those of `select` and `narrow`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.expand import Operation, operation, traced
from dtorch.capture.mutation import laid_out, strides_fit
from dtorch.capture.steps import VIEW, Expansion, followed, ref
from dtorch.capture.symbol import Tensor, TensorMeta, tensor_meta
from dtorch.ir.layout import WHOLE

_GET, _SET = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_SELECTS = frozenset((torch.select, torch.Tensor.select))
_NARROWS = frozenset((torch.narrow, torch.Tensor.narrow))
TAKES_POSITIONS = frozenset((_GET, _SET)) | _SELECTS | _NARROWS
NOT_TAKEN: Any = object()
SITES = 20_000  # places of programs that are remembered


@dataclass(frozen=True)
class Place:
    """The part of a dim that an item of an index takes: `length` from `start` on in steps of `step`; one if None."""

    start: int
    length: int | None
    step: int


_NONE: frozenset[int] = frozenset()


class Decided:
    """Of a call after one trace: the numbers with which it is recorded as it is, and which numbers are values else."""

    __slots__ = ("constant", "moving")

    def __init__(self) -> None:
        self.constant: tuple | None = None
        self.moving: frozenset[int] | None = None


class Seen:
    """The numbers that calls at each place of a program had the first time."""

    def __init__(self) -> None:
        self.traces = 0  # begun so far
        self._sites: dict[Any, tuple[Any, tuple]] = {}
        self._visits: dict[Any, tuple[int, int, Any]] = {}  # of a line: last trace, visits in one, first site

    def changing(self, recorder: Any, symbol: Tensor, call: tuple, given: tuple) -> frozenset[int]:
        """Which numbers of a call on a symbol are to be values now; none, where all are those of the first time.

        call: all else about it. The first time: of this place, so that all numbers of a program become values
        together; for a new place, of whoever made such a call after the same trace. What was decided after a trace is
        kept to, so that a program that comes again finds its steps.
        """
        call = (symbol.meta, *call)
        site = self._site(recorder)
        known = self._sites.get(site)
        if known is None or known[0] != call:
            self._sites[site] = (call, given)
        first = known[1] if known is not None and known[0] == call else given
        decided = recorder.state.numbers.setdefault((recorder.value(symbol).index, call), Decided())
        if given == decided.constant:
            return _NONE
        if decided.moving is None:
            if first == given:
                if decided.constant is None:
                    decided.constant = given
                    return _NONE
                first = decided.constant
            decided.moving = _NONE
        decided.moving |= {i for i, (now, then) in enumerate(zip(given, first)) if now != then}
        if not decided.moving:  # the numbers of the first time, which were never recorded as they are after this trace
            decided.moving = frozenset(range(len(given)))
        return decided.moving

    def _site(self, recorder: Any) -> Any:
        """Where a program is: the instruction outside of this package that runs now.

        An instruction that comes several times in a trace, such as a loop that is recorded as one, is a place for each
        time: how far the trace has come tells them from each other.
        """
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("dtorch."):
            frame = frame.f_back
        line = None if frame is None else (frame.f_code, frame.f_lasti)
        trace, most, first = self._visits.get(line, (0, 0, None))
        site = (line, recorder.steps)
        if len(self._sites) >= SITES or len(self._visits) >= SITES:
            self._sites.clear()
            self._visits.clear()
        if trace == self.traces:
            self._visits[line] = (trace, most + 1, first)
            return site
        first = site if first is None else first
        self._visits[line] = (self.traces, max(most, 1), first)
        return first if most <= 1 else site


def indexed(recorder: Any, function: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """The call's result, if one of its integers has changed since the program was last here, else `NOT_TAKEN`."""
    if type(args[0]) is not Tensor or args[0].recorder is not recorder or kwargs:
        return NOT_TAKEN
    x = args[0]
    index = _index_of(function, args)
    parsed = None if index is None else _parse(x.meta.shape, index)
    if index is None or parsed is None:
        return NOT_TAKEN
    places, template = parsed
    given = tuple([_plain(index[number]) for number, _ in places])  # -1 and the last are different texts of one program
    moving = recorder.numbers.changing(recorder, x, (function, template), given)
    if not moving:
        return NOT_TAKEN
    before, links = recorder.steps, _links(x) if function is _SET else 0
    result = _taken(recorder, function, args, index, [places[i] for i in sorted(moving)])
    if recorder.steps > before:  # counted as the plain call would be, so that what follows is at the same place
        recorder.steps = before + 1 + links
    return result


def _links(symbol: Tensor) -> int:
    """Through how many views a write into the symbol goes."""
    count = 0
    while symbol.base is not None:
        symbol, count = symbol.base, count + 1
    return count


def _index_of(function: Any, args: tuple) -> tuple | None:
    """The items of the index that a call means."""
    if function is _GET or function is _SET:
        return args[1] if type(args[1]) is tuple else (args[1],)
    if not all(type(item) is int for item in args[1:]) or len(args) != (3 if function in _SELECTS else 4):
        return None
    dim, start = args[1:3]
    rank = len(args[0].meta.shape)
    if not -rank <= dim < rank:
        return None
    before = (slice(None),) * (dim % rank)
    if function in _SELECTS:
        return (*before, start)
    size, length = args[0].meta.shape[dim], args[3]
    start = start + size if start < 0 else start
    return (*before, slice(start, start + length)) if 0 <= start <= size - length and length > 0 else None


def _parse(shape: torch.Size, items: tuple) -> tuple[list[tuple[int, Place]], tuple] | None:
    """The places that an index names, each with its item's number, and what else the index says.

    None for what is no basic index, or is out of range: torch says so.
    """
    used = sum(type(item) in (int, slice) for item in items)
    if used > len(shape) or sum(item is ... for item in items) > 1:
        return None
    found: list[tuple[int, Place]] = []
    template: list[Any] = []
    source = 0
    for number, item in enumerate(items):
        kind = type(item)
        if item is ...:
            source += len(shape) - used
        elif kind is int:
            size = shape[source]
            if not -size <= item < size:
                return None
            found.append((number, Place(item % size, None, 1)))
            template.append(int)
            source += 1
            continue
        elif kind is slice:
            place = _of_slice(shape[source], item)
            source += 1
            if place is not None:
                found.append((number, place))
                template.append((place.length, place.step))
                continue
        elif item is not None:
            return None
        template.append((item.start, item.stop, item.step) if kind is slice else item)
    return found, tuple(template)


def _of_slice(size: int, item: slice) -> Place | None:
    """A slice with two ends, as a place."""
    if type(item.stop) is not int or not all(type(end) in (int, type(None)) for end in (item.start, item.step)):
        return None
    if item.step is not None and item.step < 1:
        return None
    taken = range(*item.indices(size))
    return None if not taken or len(taken) == size else Place(taken.start, len(taken), taken.step)


def _taken(recorder: Any, function: Any, args: tuple, index: tuple, places: list[tuple[int, Place]]) -> Any:
    """The call with the places in values' hands."""
    x = args[0]
    found = dict(places)
    items = tuple(
        [
            Moving(found[number].length, found[number].step) if number in found else item
            for number, item in enumerate(index)
        ]
    )
    called = _moving_view(x.meta, tuple(map(_plain, items)), items, index)
    given = [x, *[_as_value(recorder, place.start) for _, place in places]]
    view = recorder._apply(called, given, given)
    if function is not _SET:
        return view
    from dtorch.capture.intercept import intercepted

    return intercepted(recorder, _SET, (view, ..., args[2]), {})


def _plain(item: Any) -> Any:
    """The item of an index as a key: slices are no keys before Python 3.12."""
    return (slice, item.start, item.stop, item.step) if type(item) is slice else item


def _as_value(recorder: Any, number: int) -> Tensor:
    with torch_private.without_function_modes():
        value = torch.tensor(number)
    spec = (WHOLE,) * len(recorder.mesh_shape)
    return recorder.symbol(tensor_meta((), (), torch.int64, recorder.device), spec, recorder.home.put(value, spec))


# --- what it computes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moving:
    """An item of an index that takes `length` elements (None: one, without a dim) from where a value says."""

    length: int | None
    step: int

    def rows(self, position: torch.Tensor) -> torch.Tensor:
        """The indices that it stands for."""
        first = position.reshape(1)
        if self.length is None or self.length == 1:
            return first
        return first + torch.arange(0, self.length * self.step, self.step, device=position.device)


def read_at(x: torch.Tensor, positions: tuple[torch.Tensor, ...], items: tuple) -> torch.Tensor:
    """`x[items]`, where the moving ones among the items are at the positions; item by item, as torch does it."""
    dim, supply = 0, iter(positions)
    for item in items:
        if type(item) is Moving:
            x = x.index_select(dim, item.rows(next(supply)))
            if item.length is None:
                x = x.squeeze(dim)
            else:
                dim += 1
        else:
            x, dim = _step_into(x, dim, item, items)
    return x


def _step_into(x: torch.Tensor, dim: int, item: Any, items: tuple) -> tuple[torch.Tensor, int]:
    """A view by one item that stays, and the dim that the next one is for."""
    if item is ...:
        after = items[items.index(...) + 1 :]
        return x, x.dim() - sum(other is not None for other in after)
    if type(item) is int:
        return x.select(dim, item), dim
    if item is None:
        return x.unsqueeze(dim), dim + 1
    return x[(slice(None),) * dim + (item,)], dim + 1


def write_at(x: torch.Tensor, positions: tuple[torch.Tensor, ...], items: tuple, new: torch.Tensor) -> None:
    """`x[items] = new` in place, of the view's own shape."""
    dim = 0
    for number, item in enumerate(items):
        if type(item) is not Moving:
            x, dim = _step_into(x, dim, item, items[number:])
            continue
        rest = items[number + 1 :]
        rows = item.rows(positions[0])
        if rest:
            before = (slice(None),) * dim + ((slice(None),) if item.length is not None else (0,))
            part = x.index_select(dim, rows)
            write_at(part, positions[1:], (*before, *rest), new)
        else:
            part = new if item.length is not None else new.unsqueeze(dim)
        x.index_copy_(dim, rows, part)
        return
    x.copy_(new)


class MovingView(Operation):
    """A view that values take: `read_at` of (base, positions...), which is written through by `write_at`."""

    def scatter(self, position: int, value: TensorMeta) -> Expansion:
        """New value of the base from (base, positions..., new value of the view)."""
        found = self.scatters.get((position, value))
        if found is None:
            items = self.args[-1]

            def run(x: torch.Tensor, *others: torch.Tensor) -> tuple:
                write_at(x, others[:-1], items, others[-1])
                return (x,)

            found = self.scatters[position, value] = traced(run, (*self.metas, value), "write at a position")
        return found


_VIEWS: dict[Any, MovingView] = {}


def _moving_view(base: TensorMeta, key: Any, items: tuple, index: tuple) -> MovingView:
    """The operation for a base of this metadata; its result lies in memory as the view by `index` does."""
    found = _VIEWS.get((base, key))
    if found is not None:
        return found
    metas = (base, *[tensor_meta((), (), torch.int64, base.device)] * sum(type(item) is Moving for item in items))
    args = (ref(0), tuple([ref(i) for i in range(1, len(metas))]), items)
    dense = operation(None, read_at, args, {}, metas)
    with torch_private.without_function_modes():
        view = base.base[index]
    meta = tensor_meta(view.shape, view.stride(), base.dtype, base.device)
    made = MovingView(read_at, args, {}, metas)
    made.results, made.spec, made.aliases = [meta], dense.spec, [(VIEW, 0)]
    made.expansion = dense.expand()
    if not strides_fit(dense.results[0].stride, meta):
        given = len(metas) + len(made.expansion.constants)
        made.expansion = followed(made.expansion, laid_out(dense.results[0], meta), given)
    if len(_VIEWS) >= SITES:
        _VIEWS.clear()
    _VIEWS[base, key] = made
    return made
