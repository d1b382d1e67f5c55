"""The recorder of eager code: calls on distributed tensors walk a trie; what was recorded before costs a lookup.

In: torch functions on symbols that have values on a mesh's devices (`remote`) or will have (`node`, a `Slot` of the
pending trace). Out: new symbols at once, with final shape and placements; `flush` hands the pending trace on as a
`Trace`. A state of the trie stands for a whole trace so far: equal traces reach the same state, and plans hang off it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dtorch import options, torch_private
from dtorch.capture import fast, mutation, overrides, positions, repeat
from dtorch.capture.draw import Draw, drawing_from
from dtorch.capture.expand import Expansion, Operation, Step, fill, name_of, operation, ref
from dtorch.capture.forget import forget_old
from dtorch.capture.place import PlacedStep, must_redistribute, place_expansion, place_made
from dtorch.capture.plain import PlainTensors, refuse_unfit
from dtorch.capture.record import Recorder, Scan
from dtorch.capture.symbol import Tensor, TensorMeta, make, meta_of
from dtorch.capture.turns import Turn
from dtorch.capture.where import here
from dtorch.errors import CaptureError, ShardingError
from dtorch.ir.layout import WHOLE, Spec, Split
from dtorch.mesh import DeviceMesh
from dtorch.recent import Recent

SEGMENT_OPS = 1024  # a trace is handed on after so many steps, so that devices start while the client still records,
LOOK_OPS = fast.LOOK_OPS  # and sooner where a loop comes round: after so many, before a call like the trace's first
references = sys.getrefcount


def _count_unheld() -> int:
    """What `references` says of an object that only a local variable holds, measured the way `flush` looks."""
    held = [object()]
    item = None
    while held:
        item = held.pop()
        count = references(item)
    return count


def _count_unshared() -> int:
    """What `references` says of a list that only a dict holds, measured the way `_forget` looks."""
    count, pools = 0, {0: list[Any]()}
    for _, pool in list(pools.items()):
        count = references(pool) - len(pool)
    return count


UNHELD = _count_unheld()
UNSHARED = _count_unshared()


def intercept_call(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """The long way: special functions, reads, recording."""
    from dtorch.capture.intercept import call

    return call(function, args, kwargs)


class Slot:
    """A value of the pending trace: stands where an fx node stands in the capture of a module."""

    __slots__ = ("index", "meta", "spec", "name")

    def __init__(self, index: int, val: Any, spec: Spec) -> None:
        self.index, self.spec = index, spec
        self.meta = {"val": val}
        self.name = f"v{index}"


@dataclass(frozen=True)
class Entered:
    """A step of a trace that brings in a value from the devices."""

    meta: TensorMeta
    spec: Spec


@dataclass(frozen=True)
class Moved:
    """A step of a trace that places a value otherwise."""

    source: int
    meta: TensorMeta
    before: Spec
    after: Spec


@dataclass(frozen=True)
class Called:
    """A step of a trace that computes: a placed expansion on slots. `where`: the line that recorded it first."""

    placed: PlacedStep
    inputs: tuple[int, ...]
    where: str


class State:
    """A node of the trie: everything recorded since the last flush, in order."""

    __slots__ = ("next", "fast", "edge", "parent", "entry", "outputs", "count", "plans", "keep", "used", "numbers")

    def __init__(self, parent: State | None, entry: Any, outputs: tuple[Slot, ...], count: int, keep: Any) -> None:
        self.next: dict[Any, State] = {}
        self.fast: dict[Any, Any] = {}  # what `dtorch.capture.fast` has learnt here
        self.edge = repeat.NOWHERE  # which of that came last
        self.parent, self.entry, self.outputs, self.count = parent, entry, outputs, count
        self.plans: dict[tuple[int, ...], Any] = {}
        self.numbers: dict[Any, positions.Decided] = {}  # which numbers of calls are values
        self.keep = keep  # what the key in the parent refers to by id
        self.used = 0  # when a trace last ended here: a number that grows

    def path(self) -> list[State]:
        """The states from the first step to this one."""
        found = []
        state: State | None = self
        while state is not None and state.parent is not None:
            found.append(state)
            state = state.parent
        return found[::-1]


@dataclass
class Trace:
    """A pending trace that was handed on: its state, the values it starts from, and the slots that are wanted."""

    state: State
    inputs: list[Any]
    wanted: tuple[int, ...]
    results: list[Any] = field(default_factory=list)

    def needed(self, index: int) -> set[int]:
        """Which inputs, by position, the value of a slot is computed from."""
        makers: dict[int, Any] = {}
        positions: dict[int, int] = {}
        for state in self.state.path():
            for slot in state.outputs:
                makers[slot.index] = state.entry
                if isinstance(state.entry, Entered):
                    positions[slot.index] = len(positions)
        found: set[int] = set()
        todo, seen = [index], {index}
        while todo:
            slot_index = todo.pop()
            entry = makers[slot_index]
            if slot_index in positions:
                found.add(positions[slot_index])
            sources = entry.inputs if isinstance(entry, Called) else (entry.source,) if isinstance(entry, Moved) else ()
            todo.extend(each for each in sources if each not in seen)
            seen.update(sources)
        return found


class Home(Protocol):
    """What a recorder asks of the graph that owns it."""

    graph: Any  # the graph itself, known here by identity only
    runtime: Any  # the mesh's devices, which this room knows nothing of
    mesh: DeviceMesh
    mesh_shape: tuple[int, ...]
    mesh_text: str

    def put(self, tensor: torch.Tensor, spec: Spec) -> Any:
        """Place a host tensor; a remote value."""

    def submit(self, trace: Trace, metas: Sequence[tuple[TensorMeta, Spec]], wait: bool) -> list[Any]:
        """Take a trace; remote values for the wanted slots, perhaps not there yet. `wait`: one is read next."""

    def fetch(self, remote: Any) -> torch.Tensor:
        """A remote value on the host, waited for."""

    def explicit(self) -> bool:
        """Whether inputs must come placed as ops want them."""


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the recorder during which no other thread records."""

    @functools.wraps(method)
    def locked(self: EagerRecorder, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return locked


class EagerRecorder(Recorder):
    """Records eager code on one mesh of one graph."""

    eager = True
    segment_ops = SEGMENT_OPS

    def __init__(self, home: Home, device_type: str) -> None:
        super().__init__(None, device_type)
        self.home = home
        self.turn = Turn()  # several threads may record on one graph
        self.mesh_shape = home.mesh_shape
        self.device = torch.device(device_type)
        self.root = State(None, None, (), 0, None)
        self.states = 1
        self.ended = 0  # traces so far
        self.misses = self.hits = 0
        self.plain = PlainTensors()
        self._emitted: Recent[Expansion] = Recent()
        self.pools: dict[tuple[TensorMeta, Spec], list[Tensor]] = defaultdict(list)  # dead symbols, to be used again
        self.numbers = positions.Seen()
        self.default_dtype = torch.get_default_dtype()  # under which short ways are learnt
        self._start()

    def _start(self) -> None:
        self.state = self.root
        self.numbers.traces += 1
        limit = options.current().eager_cache_steps
        if self.states > limit:
            self._forget(limit * 3 // 4)
        self.entered: list[Any] = []
        self.entered_slots: dict[int, Any] = {}  # remote values by slot
        self.held: list[Tensor] = []
        self.steps = 0
        self.anchor: tuple[Any, frozenset[int]] | None = None  # the trace's first call

    def _forget(self, keep: int) -> None:
        """Let old traces go, and symbols that only they could use again: programs that never repeat stay bounded."""
        self.states = forget_old(self.root, keep)
        for key, pool in list(self.pools.items()):
            if references(pool) - len(pool) <= UNSHARED:  # each symbol in a pool knows it
                pool.clear()
                del self.pools[key]
        torch_private.forget_fake_results(options.current().eager_cache_steps)

    # --- values ---------------------------------------------------------------------------------------------------

    def value(self, symbol: Tensor) -> Any:
        """The slot with the symbol's value as of now."""
        if symbol.recorder is not self:
            raise ShardingError(self._foreign(symbol))
        if symbol.root is not None and symbol.seen != symbol.root.version:
            mutation.derive_again(self, symbol)
            self.hold(symbol)
        if symbol.node is None:
            symbol.node = self._enter(symbol)
            self.hold(symbol)
        return symbol.node

    def _foreign(self, symbol: Tensor) -> str:
        other = symbol.recorder
        if not isinstance(other, EagerRecorder):
            return f"{self.line()}: {symbol.summary} has no value here: it belongs to a captured model."
        ways = "x.redistribute_like(y), or x.redistribute(device_mesh=..., placements=...)"
        if other.home.graph is self.home.graph:
            what, way = "of one graph", f"Bring them to one mesh first: {ways}"
        else:
            what = "of two graphs"
            way = f"Bring them to one graph first: {ways} inside the `with graph:` of the graph it goes to"
        return (
            f"{self.line()}: tensors {what}, on {self.home.mesh_text} and on {other.home.mesh_text}, meet in one "
            f"operation. {way}. That waits for nothing."
        )

    def hold(self, symbol: Tensor) -> None:
        """Remember a symbol whose value is pending, to give it its remote value at the next flush."""
        self.held.append(symbol)

    def _enter(self, symbol: Tensor) -> Slot:
        if symbol.remote is None:
            raise CaptureError(f"{self.line()}: {symbol.summary} has no value.")
        key = ("in", symbol.meta, symbol.spec)
        state = self.state.next.get(key)
        if state is None:
            state = self._grow(key, Entered(symbol.meta, symbol.spec), [(symbol.meta.val(), symbol.spec)], symbol.meta)
        self.state = state
        self.entered.append(symbol.remote)
        self.entered_slots[state.outputs[0].index] = symbol.remote
        return state.outputs[0]

    def _grow(self, key: Any, entry: Any, outputs: Sequence[tuple[Any, Spec]], keep: Any) -> State:
        before = self.state
        slots = tuple(Slot(before.count + i, val, spec) for i, (val, spec) in enumerate(outputs))
        state = before.next[key] = State(before, entry, slots, before.count + len(slots), keep)
        self.states += 1
        return state

    def symbol(self, meta: TensorMeta, spec: Spec, remote: Any, requires_grad: bool = False) -> Tensor:
        """A new symbol with a value on the devices."""
        made = make(meta, self, requires_grad=requires_grad)
        made.spec, made.remote = spec, remote
        if requires_grad:
            made.__dict__["_keeps_flag"] = True  # never used again for another value
        return made

    def lift(self, tensor: torch.Tensor) -> Tensor:
        """A plain tensor as a replicated value: once for each object and state of it."""
        if isinstance(tensor, Tensor):
            return tensor
        known = self.plain.find(tensor)
        if known is not None:
            return known
        refuse_unfit(tensor, self.line)
        spec = (WHOLE,) * len(self.mesh_shape)
        symbol = self.symbol(meta_of(tensor, self.device), spec, self.home.put(tensor.detach(), spec))
        self.plain.keep(tensor, symbol)
        return symbol

    # --- steps ----------------------------------------------------------------------------------------------------

    def inline(self, expansion: Expansion, inputs: Sequence[Any]) -> list[Any]:
        """Walk on by an operation's expansion; its output slots."""
        slots = list(inputs)
        for constant in expansion.constants:
            slots.append(self.value(self.lift(constant)))
        key = (id(expansion), *[slot.index for slot in slots])
        state = self.state.next.get(key)
        if state is None:
            self.misses += 1
            vals, specs = [slot.meta["val"] for slot in slots], tuple(slot.spec for slot in slots)
            placed = place_expansion(expansion, vals, specs, self.mesh_shape)
            self._refuse_moves(placed)
            entry = Called(placed, tuple(slot.index for slot in slots), here({})[0])
            state = self._grow(key, entry, placed.outputs, expansion)
        else:
            self._refuse_moves(state.entry.placed)
            self.hits += 1
        self.state = state
        self.steps += 1
        return list(state.outputs)

    def _refuse_moves(self, placed: PlacedStep) -> None:
        """Where redistribution is explicit: raise for a step that would move an input."""
        if placed.moves and self.home.explicit():
            raise ShardingError(f"{self.line()}: {must_redistribute(placed, self.home.mesh)}")

    def emit(self, target: Callable[..., Any], args: tuple, kwargs: dict[str, Any], val: Any) -> Any:
        """One ATen call on slots, as an expansion of its own."""
        slots: list[Slot] = []

        def template(item: Any) -> Any:
            if isinstance(item, Slot):
                slots.append(item)
                return ref(len(slots) - 1)
            if isinstance(item, (list, tuple)):
                return type(item)(template(child) for child in item)
            return item

        args, kwargs = template(args), {key: template(item) for key, item in kwargs.items()}
        key = (target, repr(args), repr(kwargs), tuple(meta_of(slot.meta["val"]) for slot in slots))
        found = self._emitted.get(key)
        if found is None:
            made = Expansion((Step(target, args, kwargs, val),), (ref(len(slots)),))
            found = self._emitted.put(key, made, options.current().eager_cache_steps)
        return self.inline(found, slots)[0]

    def settled(self, symbol: Tensor, node: Any) -> Any:
        """A written symbol keeps its placements: bring the new value to them."""
        if node.spec != symbol.spec and self.home.explicit():
            raise ShardingError(
                f"{self.line()}: what is written into {symbol.summary} comes out as {list(node.spec)}, and "
                "redistribution is explicit here. Redistribute the inputs, so that the result is placed as the tensor "
                "written to, or allow moves by dtorch.explicit_redistribution(False)."
            )
        return self.moved(node, symbol.meta, symbol.spec)

    def moved(self, slot: Slot, meta: TensorMeta, spec: Spec) -> Slot:
        """The slot placed as `spec`."""
        if slot.spec == spec:
            return slot
        key = ("move", slot.index, spec)
        state = self.state.next.get(key)
        if state is None:
            state = self._grow(key, Moved(slot.index, meta, slot.spec, spec), [(slot.meta["val"], spec)], meta)
        self.state = state
        self.steps += 1
        return state.outputs[0]

    @_locked
    def redistribute(self, symbol: Tensor, spec: Spec) -> Tensor:
        """A new symbol with the same values, placed as `spec`."""
        slot = self.moved(self.value(symbol), symbol.meta, spec)
        made = self.symbol(symbol.meta, spec, None, symbol.requires_grad)
        made.node = slot
        self.hold(made)
        return made

    @_locked
    def rebind(self, symbol: Tensor, value: Tensor) -> None:
        """`symbol.data = value`: the same object with another value, perhaps of another shape, dtype or placement."""
        slot = self.value(value)
        torch_private.set_data(symbol, value)
        symbol.meta, symbol.spec, symbol.node, symbol.remote = value.meta, value.spec, slot, value.remote
        symbol.base = symbol.step = symbol.root = symbol.pool = None
        self.hold(symbol)

    @_locked
    def create(
        self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], spec_of: Callable[[int], Spec]
    ) -> Tensor:
        """Record a factory; `spec_of` gives the placement for a number of dimensions."""
        scan = Scan(args, kwargs)
        called = operation((function, (), self.ambient(), *scan.tokens), function, scan.args, scan.kwargs, ())
        meta = called.results[0]
        expansion, spec = called.expand(), spec_of(len(meta.shape))
        key = ("make", id(expansion), spec)
        state = self.state.next.get(key)
        if state is None:
            placed = place_made(expansion, spec, self.mesh_shape)
            state = self._grow(key, Called(placed, (), here({})[0]), placed.outputs, expansion)
        self.state = state
        self.steps += 1
        made = make(meta, self, state.outputs[0])
        made.spec = spec
        self.hold(made)
        return made

    # --- calls ----------------------------------------------------------------------------------------------------

    def quick_call(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> Any:
        """A call by what the trie has learnt, or by the long way."""
        opens = self.anchor is None
        if opens or self.steps >= LOOK_OPS:
            self._look(function, args)
        with self.turn:
            begin = self.state
            key = fast.key_of(self, function, args, kwargs)
            before = self.state
            known = None if key is None else before.fast.get(key)
            if known is not None:
                steps = self.steps
                result = fast.found(self, known, args)
                if result is not None:
                    anchor = self.anchor[0] if self.anchor is not None else None
                    look = steps >= LOOK_OPS and (steps >= SEGMENT_OPS or function is anchor)
                    if known is not fast.SAME and not look:  # what has to be looked at goes this way each time
                        repeat.note(begin, before, known, opens, function, args, kwargs)
                    return result
        if key is not None and function in fast.TAKES_NUMBERS:
            taken = self._number_as_value(function, args, kwargs)
            if taken is not None:
                return self.quick_call(function, taken, kwargs)
        if key is not None and function in positions.TAKES_POSITIONS:
            found = positions.indexed(self, function, args, kwargs)
            if found is not positions.NOT_TAKEN:
                return found
        result = intercept_call(function, args, kwargs or {})  # unlocked: it may wait for a value
        if key is not None:
            with self.turn:
                fast.learn(self, before, key, args, kwargs, result)
        return result

    @_locked
    def _number_as_value(
        self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None
    ) -> tuple | None:
        """The arguments with a float brought in as a 0-d value, where the trace has seen another float in that place.

        A schedule's rate changes at every step: as a part of the key, each value would be a plan of its own.
        """
        if len(args) != 2 or kwargs or type(args[0]) is not Tensor or type(args[1]) is not float:
            return None
        symbol, number = args
        if not symbol.meta.dtype.is_floating_point or not symbol.meta.shape:  # a 0-d value would take part in promotion
            return None
        if number * 0.0 != 0.0 or number == 0.0:  # placements go by these: what spoils the zeros of a `Partial()`
            return None
        if not self.numbers.changing(self, symbol, (function,), (number,)):
            return None
        with torch_private.without_torch_function():
            value = torch.tensor(number, dtype=torch.float64)
        spec = (WHOLE,) * len(self.mesh_shape)
        return symbol, self.symbol(meta_of(value, self.device), spec, self.home.put(value, spec))

    @_locked
    def _look(self, function: Callable[..., Any], args: tuple) -> None:
        """Note a trace's first call, and end the trace before one like it, or when it is full.

        Alike: the same function on the same lasting tensors. So the traces of a loop begin at one place of it, and are
        found again, however many steps an iteration has.
        """
        if self.anchor is not None:
            lasting = {id(item) for item in args if type(item) is Tensor and item.remote is not None}
            if self.steps < SEGMENT_OPS and not (function is self.anchor[0] and lasting <= self.anchor[1]):
                return
            self.flush()
        self.anchor = (function, frozenset(id(item) for item in args if type(item) is Tensor))

    @_locked
    def _apply(
        self,
        called: Operation,
        symbols: list[Tensor],
        given: list[torch.Tensor],
        generator: torch.Generator | None = None,
    ) -> Any:
        if called.mutated and isinstance(called.function, torch_private.OpOverload):
            return self._draw(called, symbols, generator)  # a custom op that writes: nobody knows its functional form
        if called.expansion is None or called.expansion.random is not None:
            new_values = called.mutated or any(type(result) is TensorMeta for result in called.results)
            draw = called.draw() if new_values else None
            if draw is not None:
                drawn = self._numbers(draw, symbols, generator)
                called, symbols, given = draw.operation, [*symbols, *drawn], [*given, *drawn]
            elif new_values and called.expand().random is not None:
                return self._draw(called, symbols, generator)
        result = super()._apply(called, symbols, given, generator)
        if self.steps >= SEGMENT_OPS:
            self.flush()
        return result

    def _result(self, called: Operation, position: int, node: Any, symbols: list[Tensor]) -> Tensor:
        symbol = super()._result(called, position, node, symbols)
        symbol.spec, symbol.remote = symbol.node.spec, None
        self.hold(symbol)
        return symbol

    def _numbers(self, draw: Draw, symbols: list[Tensor], generator: torch.Generator | None) -> list[Tensor]:
        """Random numbers drawn on the host now, cut as the tensors that they will meet."""
        made = []
        for number, value in enumerate(draw.numbers(generator)):
            written = draw.written(number)
            spec = symbols[written].spec if written is not None else self._cut_alike(value, symbols)
            made.append(self.symbol(meta_of(value, self.device), spec, self.home.put(value, spec)))
        return made

    def _cut_alike(self, value: torch.Tensor, symbols: list[Tensor]) -> Spec:
        """The placement of the first symbol of as many dims, on those that have its size; whole on the others."""
        like = next((symbol for symbol in symbols if len(symbol.meta.shape) == value.dim()), None)
        if like is None:
            return (WHOLE,) * len(self.mesh_shape)
        sizes = like.meta.shape
        return tuple(
            placed if type(placed) is Split and value.shape[placed.dim] == sizes[placed.dim] else WHOLE
            for placed in like.spec
        )

    def _draw(self, called: Operation, symbols: list[Tensor], generator: torch.Generator | None) -> Any:
        """A random operation whose numbers depend on values: torch draws on the host, on the full values read there."""
        values = [self.host_value(symbol, name_of(called.function)) for symbol in symbols]
        with torch.no_grad():
            kwargs = drawing_from(generator, fill(called.kwargs, values))
            result = called.function(*fill(called.args, values), **kwargs)
        like = symbols[0].spec if symbols else (WHOLE,) * len(self.mesh_shape)
        for i in called.mutated:
            drawn = self.symbol(symbols[i].meta, symbols[i].spec, self.home.put(values[i], symbols[i].spec))
            mutation.write(self, symbols[i], self.value(drawn))
            self.hold(symbols[i])
        flat, tree = torch_private.tree_flatten(result)
        made = []
        for value, alias in zip(flat, called.aliases, strict=True):
            if alias is not None and alias[0] == "self":
                made.append(symbols[alias[1]])
            elif isinstance(value, torch.Tensor):
                fits = value.shape == symbols[0].meta.shape if symbols else False
                spec = like if fits else (WHOLE,) * len(self.mesh_shape)
                made.append(self.symbol(meta_of(value, self.device), spec, self.home.put(value, spec)))
            else:
                made.append(value)
        return torch_private.tree_unflatten(made, tree)

    # --- reading and handing on -----------------------------------------------------------------------------------

    def host_value(self, symbol: Tensor, what: str = "") -> torch.Tensor:
        """The symbol's value as a host tensor; closes the segment."""
        return self.home.fetch(self.remote_of(symbol, wait=True))

    def known_value(self, symbol: Tensor, value: torch.Tensor) -> None:
        """Capture keeps values that it knows; eager symbols have theirs on the devices."""

    @_locked
    def remote_of(self, symbol: Tensor, wait: bool = False) -> Any:
        """The remote value of a symbol; closes the segment if it is pending. `wait`: it is read at once."""
        stale = symbol.root is not None and symbol.seen != symbol.root.version
        if stale or symbol.node is not None or symbol.remote is None:
            self.value(symbol)
            self.flush(wait)
        return symbol.remote

    @_locked
    def flush(self, wait: bool = False) -> None:
        """Hand the pending trace on; symbols that somebody still holds get their remote values.

        wait: the caller waits for one of them next, so nobody else needs to be woken.
        """
        wanted: dict[int, list[Tensor]] = {}
        metas: dict[int, tuple[TensorMeta, Spec]] = {}
        entered, held = self.entered_slots, self.held
        count, watched, unheld = references, weakref.getweakrefcount, UNHELD
        while held:
            symbol = held.pop()  # the last first: a view holds its base
            if count(symbol) <= unheld and not watched(symbol) and not symbol.__dict__:
                pool = symbol.pool
                if pool is not None:
                    symbol.node = symbol.remote = None
                    symbol.version = 0
                    if symbol.root is not None:
                        symbol.base = symbol.step = symbol.root = None
                        symbol.seen = 0
                    pool.append(symbol)
                continue
            slot, symbol.node = symbol.node, None
            if slot is None:
                continue
            if symbol.root is not None and symbol.seen != symbol.root.version:
                symbol.remote = None  # derived again from its base when it is next used
            elif slot.index in entered:
                symbol.remote = entered[slot.index]
            else:
                wanted.setdefault(slot.index, []).append(symbol)
                metas[slot.index] = (symbol.meta, slot.spec)
        state, inputs = self.state, self.entered
        self.ended += 1
        state.used = self.ended
        self._start()
        if not wanted:
            return
        order = tuple(sorted(wanted))
        remotes = self.home.submit(Trace(state, inputs, order), [metas[index] for index in order], wait)
        for index, remote in zip(order, remotes, strict=True):
            for symbol in wanted[index]:
                symbol.remote = remote


overrides.install()
