"""Calls that come again at the same place of a trace: straight-line code that knows one and walks on.

In: a call that a state of the trie knows and that came there again, with its arguments. Out: an `Edge` of that state.
Its `walk` gives the call's result when handed that very call, else None. The code is written once for each pattern of
arguments (their kinds and structure); what the arguments are is in the edge's values.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.symbol import Tensor, make

ALTERNATES = 4  # an edge is replaced so often by another call that comes at its state; then it stays

_SELECTS = (
    "view reshape transpose permute unsqueeze squeeze flatten unflatten expand expand_as movedim swapaxes "
    "narrow select t __getitem__ contiguous clone detach type_as to float double half bfloat16 "
    "masked_fill where tril triu repeat roll"
)
_COMPUTES = (
    "add sub mul div neg abs maximum minimum mean amax amin max min argmax argmin cos sin sqrt square "
    "relu sigmoid silu gelu clamp floor ceil eq ne lt le gt ge"
)
CAST_BY_NONE = tuple(f"{_SELECTS} {_COMPUTES}".split())
NOT_CAST = frozenset(
    getattr(home, name)
    for home in (torch.Tensor, torch, torch.nn.functional)
    for name in CAST_BY_NONE
    if hasattr(home, name)
)
"""Functions that autocast leaves alone (a test asks torch): no need to ask whether it is on."""

_BY_IDENTITY = frozenset({type(None), bool, torch.dtype, torch.memory_format, torch.layout, type(...)})
_BY_VALUE = frozenset({int, str, torch.device})
_MISSING = object()


class Edge:
    """The call that came last at a state, ready to be walked. `function` None: there is none."""

    __slots__ = ("function", "walk", "values", "state", "slot", "meta", "view", "pool", "left")

    def __init__(self, left: int = ALTERNATES) -> None:
        self.function: Any = None
        self.walk: Any = None
        self.values: tuple = ()
        self.state = self.slot = self.meta = self.view = self.pool = None
        self.left = left  # how often it may still be replaced


NOWHERE = Edge()
"""The edge of states that have none."""
_HARD = Edge(0)  # of states whose calls no pattern fits


class Unknown:
    """Stands for the state of a recorder that walks no trie."""

    edge = NOWHERE


class _UnsuitedError(Exception):
    """A call that no pattern fits."""


@dataclass(frozen=True)
class Pattern:
    """What is the same about all calls that one piece of code walks.

    args, named: nested kinds. base: which argument the result is a view of. steps: how far it walks. opens: it is the
    first call of a trace, which is noted. asks: what can change its meaning beside the arguments.
    """

    args: tuple
    named: tuple[tuple[str, Any], ...]
    base: int | None
    steps: int
    opens: bool
    asks: tuple[str, ...]


def note(
    begin: Any, before: Any, known: Any, opens: bool, function: Any, args: tuple, kwargs: dict[str, Any] | None
) -> None:
    """Give the state `begin` the edge of a call that has just been walked from `before`.

    Between the two, values came in that the call needs. known: a `Known` of fast.py. opens: it was its trace's first.
    """
    left = begin.edge.left
    if left <= 0:
        return
    try:
        begin.edge = _edge(begin, before, known, opens, function, args, kwargs)
        begin.edge.left = left - 1
    except _UnsuitedError:
        begin.edge = _HARD


def _edge(
    begin: Any, before: Any, known: Any, opens: bool, function: Any, args: tuple, kwargs: dict[str, Any] | None
) -> Edge:
    entered = set()
    while before is not begin:
        if before.parent is None or hasattr(before.entry, "placed"):  # something was computed on the way
            raise _UnsuitedError
        entered.update(before.outputs)
        before = before.parent
    description = _Description(entered)
    described = tuple(map(description.of, args))
    named = tuple((name, description.of(item)) for name, item in (kwargs or {}).items())
    if entered:
        raise _UnsuitedError
    base = None if known.view is None else _base(args, kwargs)
    asks = ["autocast"] * (function not in NOT_CAST) + ["moves"] * known.moves
    if description.integers:
        asks.append("default dtype")  # of what is computed from integers
    edge = Edge()
    edge.function, edge.values = function, tuple(description.values)
    edge.walk = _code(Pattern(described, named, base, known.steps, opens, tuple(asks)))
    edge.state, edge.slot, edge.meta = known.state, known.slot, known.meta
    edge.view, edge.pool = known.view, known.pool
    return edge


def fresh(known: Any, recorder: Any) -> Tensor:
    """A new symbol for a known call's result (an `Edge`'s or a `Known`'s), where no dead one is left to be used."""
    symbol = make(known.meta, recorder)
    symbol.spec, symbol.pool = known.slot.spec, known.pool
    return symbol


def _base(args: tuple, kwargs: Any) -> int:
    """Which argument is the one tensor that a view is made from."""
    tensors = [i for i, item in enumerate(args) if type(item) is Tensor]
    if len(tensors) != 1 or kwargs or any(type(item) in (tuple, list) and _holds_tensor(item) for item in args):
        raise _UnsuitedError
    return tensors[0]


def _holds_tensor(items: Any) -> bool:
    return any(isinstance(item, torch.Tensor) for item in items)


class _Description:
    """Patterns of arguments; `values` is what they are compared with, in the order of the writer's tests."""

    def __init__(self, entered: set[Any]) -> None:
        self.entered = entered  # slots that came in for this call and were not met yet
        self.values: list[Any] = []
        self.integers = False  # whether a tensor is not of floats

    def of(self, item: Any) -> tuple:
        """The pattern of one argument."""
        kind = type(item)
        if kind is Tensor:
            return self._tensor(item)
        if kind in _BY_IDENTITY:
            self.values.append(item)
            return ("is",)
        if kind in _BY_VALUE or kind is float:
            self.values.append(item)
            if kind is float and not (item > 0.0 or item < 0.0):  # 0.0 == -0.0 and NaN != NaN: the object it must be
                return ("is",)
            return ("equal", kind)
        if kind is tuple or kind is list or kind is torch.Size:
            return ("many", kind, tuple(map(self.of, item)))
        if kind is slice:
            return ("slice", tuple(map(self.of, (item.start, item.stop, item.step))))
        raise _UnsuitedError

    def _tensor(self, symbol: Tensor) -> tuple:
        slot = symbol.node
        if slot is None or (symbol.root is not None and symbol.seen != symbol.root.version):
            raise _UnsuitedError
        self.integers = self.integers or not symbol.meta.dtype.is_floating_point
        if slot in self.entered:
            self.entered.remove(slot)
            self.values += (symbol.meta, symbol.spec, slot)
            return ("enter",)
        self.values.append(slot)
        return ("slot",)


# --- code -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2048)
def _code(pattern: Pattern) -> Any:
    """The function that walks calls of a pattern."""
    writer = _Writer(pattern)
    source = writer.source()
    namespace = dict(writer.names)
    exec(compile(source, "<dtorch call>", "exec"), namespace)  # our own text: names and numbers of a pattern
    return namespace["walk"]


class _Writer:
    """Writes `walk(edge, recorder, args, kwargs)`: guards, then the step, straight-line."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.names: dict[str, Any] = {
            "Tensor": Tensor,
            "MISSING": _MISSING,
            "ident": threading.get_ident,
            "autocast": torch_private.autocast_anywhere,
            "dtype": torch.get_default_dtype,
            "fresh": fresh,
        }
        self.tests: list[str] = []  # any that holds: another call
        self.entering: list[tuple[str, str]] = []  # (tensor, slot)
        self.values = 0
        self.locals = 0

    def source(self) -> str:
        """The function's text."""
        pattern = self.pattern
        count = len(pattern.args)
        first = ["turn.owner != me", f"len(args) != {count}"]
        if pattern.opens:
            first.append("recorder.anchor is not None")
        first.append(f"not kwargs or len(kwargs) != {len(pattern.named)}" if pattern.named else "kwargs")
        if "autocast" in pattern.asks:
            first.append("autocast()")
        if "default dtype" in pattern.asks:
            first.append("dtype() is not recorder.default_dtype")
        if "moves" in pattern.asks:
            first.append("recorder.home.explicit()")
        for i, kind in enumerate(pattern.args):
            self._test(f"a{i}", kind)
        for i, (_, kind) in enumerate(pattern.named):
            self._test(f"k{i}", kind)
        self._all_different()
        lines = ["me = ident()", "turn = recorder.turn", f"if {' or '.join(first)}:", "    return None"]
        if count:
            lines.append("".join(f"a{i}, " for i in range(count)) + "= args")
        lines += [f"k{i} = kwargs.get({name!r}, MISSING)" for i, (name, _) in enumerate(pattern.named)]
        if self.values:
            lines.append("".join(f"v{i}, " for i in range(self.values)) + "= edge.values")
        lines += ["try:", "    turn.busy = True", f"    if {' or '.join(['turn.owner != me', *self.tests])}:"]
        lines.append("        return None")
        lines += [f"    {line}" for line in self._step()]
        lines += ["finally:", "    turn.busy = False"]
        return "def walk(edge, recorder, args, kwargs):\n" + "".join(f"    {line}\n" for line in lines)

    def _step(self) -> list[str]:
        pattern = self.pattern
        # A new object may start a garbage collection, and finalizers may record: before the state is set it is looked
        # at again, and between it and what came in nothing is made or called.
        lines = []
        if self.entering:
            remotes = "".join(f"{tensor}.remote, " for tensor, _ in self.entering)
            lines += [f"remotes = ({remotes})", "if recorder.state.edge is not edge:", "    return None"]
        lines.append("recorder.state = edge.state")
        if self.entering:
            lines.append("recorder.entered += remotes")
        lines.append(f"recorder.steps += {pattern.steps}")
        for tensor, slot in self.entering:
            lines.append(f"recorder.entered_slots[{slot}.index] = {tensor}.remote")
            lines += [f"{tensor}.node = {slot}", f"recorder.held.append({tensor})"]
        if pattern.opens:
            tensors = "".join(f"id(a{i}), " for i, kind in enumerate(pattern.args) if kind[0] in ("slot", "enter"))
            lines.append(f"recorder.anchor = (edge.function, frozenset(({tensors})))")
        lines += ["pool = edge.pool", "symbol = pool.pop() if pool else fresh(edge, recorder)"]
        lines += ["symbol.node = edge.slot", "recorder.held.append(symbol)"]
        if pattern.base is not None:
            base = f"a{pattern.base}"
            lines += [f"symbol.base = {base}", "symbol.step = edge.view"]
            lines += [f"symbol.root = root = {base} if {base}.root is None else {base}.root"]
            lines += ["symbol.seen = root.version"]
        return [*lines, "return symbol"]

    def _test(self, place: str, kind: tuple) -> None:
        """Tests that hold where what stands at `place` (an expression) is not what the edge has there."""
        tests = self.tests
        if kind[0] == "is":
            tests.append(f"{place} is not {self._value()}")
            return
        name = place
        if not place.isidentifier():
            name, place = self._local(place)
        if kind[0] == "slot":
            tests += [f"type({place}) is not Tensor", f"{name}.node is not {self._value()}"]
            tests.append(f"({name}.root is not None and {name}.seen != {name}.root.version)")
        elif kind[0] == "enter":
            tests += [f"type({place}) is not Tensor", f"{name}.node is not None", f"{name}.meta is not {self._value()}"]
            tests += [f"{name}.remote is None", f"{name}.root is not None", f"{name}.recorder is not recorder"]
            tests.append(f"{name}.spec != {self._value()}")
            self.entering.append((name, self._value()))
        elif kind[0] == "equal":
            tests += [f"type({place}) is not {self._type(kind[1])}", f"{name} != {self._value()}"]
        elif kind[0] == "many":
            tests += [f"type({place}) is not {self._type(kind[1])}", f"len({name}) != {len(kind[2])}"]
            for i, child in enumerate(kind[2]):
                self._test(f"{name}[{i}]", child)
        else:
            tests.append(f"type({place}) is not slice")
            for part, child in zip(("start", "stop", "step"), kind[1]):
                self._test(f"{name}.{part}", child)

    def _all_different(self) -> None:
        names = [tensor for tensor, _ in self.entering]
        for i, name in enumerate(names):
            self.tests += [f"{name} is {other}" for other in names[:i]]

    def _value(self) -> str:
        self.values += 1
        return f"v{self.values - 1}"

    def _local(self, place: str) -> tuple[str, str]:
        self.locals += 1
        return f"b{self.locals}", f"b{self.locals} := {place}"

    def _type(self, kind: type) -> str:
        name = "kind_" + kind.__name__
        self.names[name] = kind
        return name
