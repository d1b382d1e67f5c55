"""Random functions taken apart: numbers that torch draws on the host at the call, and a graph of the rest.

In: an `Operation` that draws. Out: its `Draw`: steps that need no values of tensors, their shapes at most, and the same
operation on more tensors, the numbers drawn; or None where what is drawn depends on values (`multinomial`, `rrelu`).
Nothing waits for the tensors then, and the numbers are torch's own, whatever the mesh: drawn on the whole shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dtorch import torch_private
from dtorch.capture.steps import Expansion, Ref, Step, collect_refs, fill, ref, without_dead
from dtorch.capture.symbol import TensorMeta, meta_of

if TYPE_CHECKING:
    from dtorch.capture.expand import Operation

aten = torch.ops.aten

_FILL_NAMES = "normal_ uniform_ exponential_ random_ log_normal_ cauchy_ geometric_ bernoulli_"
FILLS = frozenset(getattr(torch.Tensor, name) for name in _FILL_NAMES.split())
"""Methods that give every element of their tensor a new number, whatever was there; `bernoulli_` of a float."""

_FILLED: dict[Any, Any] = {
    aten.normal_functional.default: aten.normal_.default,
    aten.uniform.default: aten.uniform_.default,
    aten.exponential.default: aten.exponential_.default,
    aten.log_normal.default: aten.log_normal_.default,
    aten.cauchy.default: aten.cauchy_.default,
    aten.geometric.default: aten.geometric_.default,
    aten.bernoulli.p: aten.bernoulli_.float,
    aten.random.default: aten.random_.default,
    aten.random.to: aten.random_.to,
}
"""The functional form that a trace has, and what is called: torch draws in the order of memory, so strides matter."""

_SHAPED = frozenset(
    (
        aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
        aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
    )
)  # fmt: skip
"""Operators that look at their tensor's shape, strides and dtype alone."""


def _normal(mean: Any = 0.0, std: Any = 1.0, generator: Any = None) -> torch.Tensor:
    """`torch.normal` as its kernels compute it. A negative deviation, which they refuse, gives NaN."""
    if not isinstance(std, torch.Tensor):
        drawn = torch.empty_like(mean, memory_format=torch.contiguous_format).normal_(0, std, generator=generator)
        return drawn.add(mean)
    size = torch.broadcast_shapes(mean.shape, std.shape) if isinstance(mean, torch.Tensor) else std.shape
    kind = mean if isinstance(mean, torch.Tensor) else std
    drawn = torch.empty(size, dtype=kind.dtype, device=kind.device).normal_(generator=generator)
    return drawn.mul(std.where(std >= 0, torch.nan)).add(mean)


_APART: dict[Any, Callable[..., torch.Tensor]] = dict.fromkeys(
    (aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor), _normal
)
"""Operators that draw, written as others; composite ones besides, which torch takes apart itself."""


@dataclass(frozen=True)
class Draw:
    """steps: on the host, each on results of earlier ones. taken: which results the operation takes besides its own
    tensors, with the metadata that it expects.
    """

    steps: tuple[Step, ...]
    taken: tuple[int, ...]
    metas: tuple[TensorMeta, ...]
    operation: Operation

    def numbers(self, generator: torch.Generator | None) -> list[torch.Tensor]:
        """Draw from a generator, or from torch's own: it moves on as it does in torch."""
        values: list[Any] = []
        with torch.no_grad(), torch_private.without_torch_function():
            for step in self.steps:
                kwargs = drawing_from(generator, fill(step.kwargs, values))
                values.append(step.target(*fill(step.args, values), **kwargs))
            return [_laid_out(values[i], meta) for i, meta in zip(self.taken, self.metas, strict=True)]

    def written(self, number: int) -> int | None:
        """Which of the operation's own tensors has the numbers `number` as its new value, if one has."""
        expansion = self.operation.expand()  # made before there was anything to draw
        fresh = len(expansion.outputs) - len(self.operation.mutated)
        place = ref(len(self.operation.metas) - len(self.taken) + number)
        new = expansion.outputs[fresh:]
        return next((i for i, output in zip(self.operation.mutated, new, strict=True) if output is place), None)


def drawing_from(generator: torch.Generator | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The named arguments of a call that was seen with another generator."""
    if generator is None or not kwargs:
        return kwargs
    return {name: generator if type(item) is torch.Generator else item for name, item in kwargs.items()}


def _laid_out(value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    if value.stride() == meta.stride:
        return value
    return torch.empty_strided(meta.shape, meta.stride, dtype=value.dtype, device=value.device).copy_(value)


def draw_of(called: Operation) -> Draw | None:
    """How an operation draws without reading; None: it has to read, or it draws nothing."""
    if called.function in FILLS and called.mutated == (0,) and len(called.metas) == 1:
        return _filled(called)
    expansion = called.expand()
    if expansion.random is None or expansion.constants:
        return None
    opened = _opened(expansion, called.metas)
    return None if opened is None else _Split(called, opened).draw()


def _filled(called: Operation) -> Draw:
    """A method that fills one tensor, called as it is."""
    meta = called.metas[0]
    place = _dense(meta)
    steps = (_blank(meta), Step(called.function, called.args, called.kwargs, None))
    return Draw(steps, (1,), (place,), _rest(called, (place,), Expansion((), (ref(1),))))


def _dense(meta: TensorMeta) -> TensorMeta:
    """The metadata of a copy: a view with gaps has its elements next to each other there."""
    with torch_private.without_torch_function():
        return meta_of(torch.empty_like(meta.base), meta.device)


def _blank(meta: TensorMeta) -> Step:
    """A tensor that stands for one of the operation's, whose values nobody looks at."""
    options = {"dtype": meta.dtype, "device": meta.device}
    return Step(torch.empty_strided, (tuple(meta.shape), meta.stride), options, meta.val())


def _rest(called: Operation, metas: tuple[TensorMeta, ...], expansion: Expansion) -> Operation:
    rest = type(called)(called.function, called.args, called.kwargs, (*called.metas, *metas))
    rest.results, rest.spec, rest.aliases = called.results, called.spec, called.aliases
    rest.mutated, rest.expansion = called.mutated, expansion
    return rest


def _opened(expansion: Expansion, metas: Sequence[TensorMeta]) -> Expansion | None:
    """The expansion with steps that draw taken apart; None where one cannot be."""
    moved: list[Any] = [ref(i) for i in range(len(metas))]
    vals: list[Any] = [meta.val() for meta in metas]
    steps: list[Step] = []

    def add(step: Step, refs: Sequence[Ref]) -> Ref:
        steps.append(Step(step.target, fill(step.args, refs), fill(step.kwargs, refs), step.val))
        vals.append(step.val)
        return ref(len(metas) + len(steps) - 1)

    for step in expansion.steps:
        apart = _taken_apart(step, [vals[each.index] for each in moved])
        if apart is None:
            moved.append(add(step, moved))
            continue
        inputs, inner = apart
        if inner.constants:
            return None
        own: list[Any] = [moved[i] for i in inputs]
        for each in inner.steps:
            own.append(add(each, own))
        moved.append(own[inner.outputs[0].index])
    return Expansion(tuple(steps), fill(expansion.outputs, moved))


def _taken_apart(step: Step, vals: Sequence[Any]) -> tuple[list[int], Expansion] | None:
    """A step that draws as several, and the values that they start from; None for what stays as it is."""
    target: Any = step.target
    if not isinstance(target, torch_private.OpOverload) or not torch_private.draws_random_numbers(target):
        return None
    written = _APART.get(target)
    if written is None and not torch_private.is_composite(target) or not isinstance(step.val, torch.Tensor):
        return None
    found: set[int] = set()
    collect_refs((step.args, step.kwargs), found)
    inputs = sorted(found)
    places: list[Any] = [ref(inputs.index(i)) if i in found else None for i in range(len(vals))]
    args, kwargs = fill(step.args, places), fill(step.kwargs, places)

    def run(*tensors: torch.Tensor) -> tuple:
        return ((written or target)(*fill(args, tensors), **fill(kwargs, tensors)),)

    from dtorch.capture.expand import traced  # which asks this module in turn

    return inputs, traced(run, [meta_of(vals[i]) for i in inputs], str(target), composites=False)


class _Split:
    """Parts an opened expansion into what depends on values of the operation's tensors and what does not."""

    def __init__(self, called: Operation, opened: Expansion) -> None:
        self.called, self.opened = called, opened
        self.given = len(called.metas)
        self.vals: list[Any] = [meta.val() for meta in called.metas] + [step.val for step in opened.steps]
        self.free: set[int] = set()  # values that depend on no tensor's values
        self.random: set[int] = set()  # those of them that depend on numbers drawn

    def draw(self) -> Draw | None:
        """The two parts; None where what is drawn depends on values."""
        for number, step in enumerate(self.opened.steps, self.given):
            found: set[int] = set()
            collect_refs((step.args, step.kwargs), found)
            target: Any = step.target
            ignores = target in _SHAPED or target in _FILLED
            seeded = isinstance(target, torch_private.OpOverload) and torch_private.draws_random_numbers(target)
            if ignores or found <= self.free:
                self.free.add(number)
                if seeded or found & self.random and not ignores:
                    self.random.add(number)
            elif seeded:
                return None
        needed: set[int] = set()
        collect_refs(self.opened.outputs, needed)
        for number, step in enumerate(self.opened.steps, self.given):
            if number not in self.random:
                collect_refs((step.args, step.kwargs), needed)
        taken = sorted(needed & self.random)
        steps, places = self._on_host()
        metas = tuple(meta_of(self.vals[i]) for i in taken)
        return Draw(steps, tuple(places[i] for i in taken), metas, _rest(self.called, metas, self._on_devices(taken)))

    def _on_host(self) -> tuple[tuple[Step, ...], dict[int, int]]:
        """The steps that draw, with what they need; where each value is among their results."""
        needed = set(self.random)
        for number in range(self.given + len(self.opened.steps) - 1, self.given - 1, -1):
            step = self.opened.steps[number - self.given]
            if number in needed and step.target not in _FILLED and step.target not in _SHAPED:
                collect_refs((step.args, step.kwargs), needed)
        steps: list[Step] = []
        places: dict[int, int] = {}
        for number in range(self.given, self.given + len(self.opened.steps)):
            if number not in needed:
                continue
            step = self.opened.steps[number - self.given]
            target, args, kwargs = step.target, step.args, step.kwargs
            if target in _FILLED or target in _SHAPED:
                steps.append(_blank(self._stand_in(target, args[0].index)))
                target = _FILLED.get(target, target)
                args = (ref(len(steps) - 1), *args[1:])
                steps.append(Step(target, args, kwargs, step.val))
            else:
                values = [ref(places[i]) if i in places else None for i in range(number)]
                steps.append(Step(target, fill(args, values), fill(kwargs, values), step.val))
            places[number] = len(steps) - 1
        return tuple(steps), places

    def _stand_in(self, target: Any, index: int) -> TensorMeta:
        meta = meta_of(self.vals[index])
        if target is aten.bernoulli.p and index < self.given and index not in self.called.mutated:
            with torch_private.without_torch_function():  # `torch.bernoulli(x, p)` fills a contiguous tensor
                return meta_of(torch.empty(meta.shape, dtype=meta.dtype, device="meta"), meta.device)
        return meta

    def _on_devices(self, taken: list[int]) -> Expansion:
        moved: list[Any] = [ref(i) for i in range(self.given)]
        steps: list[Step] = []
        for number, step in enumerate(self.opened.steps, self.given):
            if number in self.random:
                moved.append(ref(self.given + taken.index(number)) if number in taken else None)
                continue
            steps.append(Step(step.target, fill(step.args, moved), fill(step.kwargs, moved), step.val))
            moved.append(ref(self.given + len(taken) + len(steps) - 1))
        return without_dead(steps, fill(self.opened.outputs, moved), self.given + len(taken))
