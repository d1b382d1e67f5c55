"""What a device calls for its part of an op, where that is not simply the same op with the same arguments.

In: an `OpCall` (global arguments and metadata) and a `LocalContext` that knows how its tensors are placed and can
emit calls. Out: the local value(s). Shape arguments, group counts and vocabulary offsets are rewritten here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from dtorch.ir.layout import WHOLE, Spec, Split

aten = torch.ops.aten
Integer = Any  # an int, or a symbolic int that has its value on a device only


class LocalContext(Protocol):
    """How a localiser sees the placements of one call, and how it emits local calls."""

    mesh_shape: tuple[int, ...]

    def input_spec(self, position: int) -> Spec:
        """Placement of tensor argument `position` (flattened order)."""

    def output_spec(self, position: int = 0) -> Spec:
        """Placement of tensor result `position`."""

    def local_shape(self, shape: Sequence[int], spec: Spec) -> list[Integer]:
        """Local shape of a tensor of logical `shape`."""

    def local_size(self, size: int, dim: int, spec: Spec) -> Integer:
        """Local size of dimension `dim`, logically of `size` elements."""

    def begin(self, size: int, dim: int, spec: Spec) -> Integer:
        """Index of the first unit held here, in the one interval that cuts `dim`."""

    def integer(self, function: str, *operands: Integer) -> Integer:
        """Arithmetic on integers: "add", "sub", "mul", "floordiv", "min" or "max"."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Emit a call and give its value; symbolic integers may stand wherever integers do."""


@dataclass(frozen=True)
class OpCall:
    """One call of the global graph: arguments with local values for tensors, and the logical metadata.

    `meta_args` / `meta_kwargs` have the structure of `args` / `kwargs` with logical metadata in place of tensors;
    `outputs` is one metadata per tensor result.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta_args: tuple[Any, ...]
    meta_kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[Any, ...] = ()


Localizer = Callable[[LocalContext, OpCall], Any]
_LOCALIZERS: dict[str, Localizer] = {}
_NEVER_EMPTY: set[str] = set()


def localizer(*names: str) -> Callable[[Localizer], Localizer]:
    """Register a localiser for ops by name, `"aten::view"` for all overloads or `"aten::sum.dim_IntList"` for one."""

    def register(function: Localizer) -> Localizer:
        for name in names:
            _LOCALIZERS[name if "::" in name else f"aten::{name}"] = function
        return function

    return register


def never_empty(*names: str) -> None:
    """Say that ops fail on tensors without elements; devices that hold nothing then work on one unit of zeros."""
    _NEVER_EMPTY.update(name if "::" in name else f"aten::{name}" for name in names)


def op_names(op: Any) -> tuple[str, str]:
    """An op's full name (`aten::view.default`) and that of all its overloads (`aten::view`); empty for no op."""
    name = op.name() if hasattr(op, "name") else ""
    packet, dot, _ = name.partition(".")
    return (name if dot else f"{name}.default"), packet


def localizer_of(op: Any) -> Localizer | None:
    """The localiser of an OpOverload, or None when devices call the op as it is."""
    import dtorch.sharding.rules  # noqa: F401  (rules and localisers of a family live together and register on import)

    name, packet = op_names(op)
    return _LOCALIZERS.get(name) or _LOCALIZERS.get(packet)


def localize(ctx: LocalContext, call: OpCall) -> Any:
    """Emit what a device calls for its part of `call`; gives the op's value (a sequence for several results)."""
    function = localizer_of(call.op) or as_is
    if not _NEVER_EMPTY.isdisjoint(op_names(call.op)):
        return filled(ctx, call, function)
    return function(ctx, call)


def as_is(ctx: LocalContext, call: OpCall) -> Any:
    """The same op with the same arguments."""
    return ctx.call(call.op, *call.args, **call.kwargs)


def cuts_of(spec: Spec, dim: int) -> list[Split]:
    """The distinct intervals at which `spec` cuts dimension `dim`."""
    return list(dict.fromkeys(placed for placed in spec if type(placed) is Split and placed.dim == dim))


def may_be_empty(size: int, dim: int, spec: Spec, mesh_shape: tuple[int, ...]) -> bool:
    """Whether some device may hold nothing of dimension `dim`: decided without looking at a coordinate."""
    held: dict[Split, set[int]] = {}  # how many parts a device may hold, given the axes so far
    for axis, placed in enumerate(spec):
        if type(placed) is Split and placed.dim == dim:
            counts: set[int] = set()
            for parts in held.get(placed, {size // (placed.outer * placed.unit)}):
                piece = -(-parts // mesh_shape[axis])
                last = parts - piece * (mesh_shape[axis] - 1)
                if last <= 0:
                    return True
                counts |= {piece, last}
            held[placed] = counts
    return False


# --- devices that hold nothing ------------------------------------------------------------------------------------


class FilledContext:
    """A `LocalContext` in which every dim of which some device may hold nothing has one more part."""

    def __init__(self, ctx: LocalContext) -> None:
        self.ctx, self.mesh_shape = ctx, ctx.mesh_shape
        self.input_spec, self.output_spec = ctx.input_spec, ctx.output_spec
        self.begin, self.integer, self.call = ctx.begin, ctx.integer, ctx.call

    def local_size(self, size: int, dim: int, spec: Spec) -> Integer:
        """Local size with what is added."""
        local: Integer = 1
        for held, added in self._pieces(size, dim, spec):
            local = self.integer("mul", local, self.integer("add", held, added))
        return local

    def local_shape(self, shape: Sequence[int], spec: Spec) -> list[Integer]:
        """Local shape with what is added."""
        return [self.local_size(size, dim, spec) for dim, size in enumerate(shape)]

    def _pieces(self, size: int, dim: int, spec: Spec) -> list[tuple[Integer, int]]:
        """A dim as nested parts, outermost first: how many are held of each, and how many (0 or 1) are added."""
        pieces: list[tuple[Integer, int]] = []
        rest = size
        for placed in sorted(cuts_of(spec, dim), key=lambda cut: -cut.unit):
            gap = rest // (size // placed.outer)
            alone = tuple(other if other == placed else WHOLE for other in spec)
            held = self.integer("floordiv", self.ctx.local_size(size, dim, alone), placed.outer * placed.unit)
            pieces += [(gap, 0)] * (gap > 1) + [(held, int(may_be_empty(size, dim, alone, self.mesh_shape)))]
            rest = placed.unit
        return [*pieces, (rest, 0)] if rest > 1 or not pieces else pieces

    def fill(self, value: Any, shape: Sequence[int], spec: Spec) -> Any:
        """Add a part of zeros to the dims that need it."""
        sizes = self.ctx.local_shape(shape, spec)
        for dim, size in enumerate(shape):
            pieces = self._pieces(size, dim, spec)
            if any(added for _, added in pieces):
                value = self._reshape(value, sizes, dim, [held for held, _ in pieces])
                pads = [pad for _, added in reversed(pieces) for pad in (0, added)]
                value = self.call(aten.constant_pad_nd.default, value, [0, 0] * (len(shape) - 1 - dim) + pads)
                sizes[dim] = self.local_size(size, dim, spec)
                value = self.call(aten.reshape.default, value, sizes) if len(pieces) > 1 else value
        return value

    def _reshape(self, value: Any, sizes: list[Integer], dim: int, parts: list[Integer]) -> Any:
        """The dim opened into its parts."""
        if len(parts) == 1:
            return value
        return self.call(aten.reshape.default, value, [*sizes[:dim], *parts, *sizes[dim + 1 :]])

    def drop(self, value: Any, shape: Sequence[int], spec: Spec) -> Any:
        """Take the added parts off again."""
        sizes = self.local_shape(shape, spec)
        for dim, size in enumerate(shape):
            pieces = self._pieces(size, dim, spec)
            if any(added for _, added in pieces):
                parts = [self.integer("add", held, added) for held, added in pieces]
                value = self._reshape(value, sizes, dim, parts)
                for position, (held, added) in enumerate(pieces):
                    if added:
                        value = self.call(aten.slice.Tensor, value, dim + position, 0, held)
                sizes[dim] = self.ctx.local_size(size, dim, spec)
                value = self.call(aten.reshape.default, value, sizes) if len(pieces) > 1 else value
        return value


def filled(ctx: LocalContext, call: OpCall, function: Localizer) -> Any:
    """Run a localiser so that no device works on nothing."""
    metas = flatten([*call.meta_args, *call.meta_kwargs.values()])
    values = flatten([*call.args, *call.kwargs.values()])
    shapes = [(tuple(meta.shape), position) for position, meta in enumerate(m for m in metas if is_tensor(m))]
    if not any(
        may_be_empty(size, dim, ctx.input_spec(position), ctx.mesh_shape)
        for shape, position in shapes
        for dim, size in enumerate(shape)
    ):
        return function(ctx, call)
    inside = FilledContext(ctx)
    new, position = [], 0
    for meta, value in zip(metas, values, strict=True):
        if is_tensor(meta):
            value = inside.fill(value, tuple(meta.shape), ctx.input_spec(position))
            position += 1
        new.append(value)
    supply = iter(new)
    args = tuple(refill(argument, supply) for argument in call.args)
    kwargs = {name: refill(argument, supply) for name, argument in call.kwargs.items()}
    found = function(inside, replace(call, args=args, kwargs=kwargs))
    if len(call.outputs) == 1:
        return inside.drop(found, tuple(call.outputs[0].shape), ctx.output_spec())
    parts = [ctx.call(operator.getitem, found, k) for k in range(len(call.outputs))]
    return tuple(inside.drop(part, tuple(call.outputs[k].shape), ctx.output_spec(k)) for k, part in enumerate(parts))


def is_tensor(value: Any) -> bool:
    """Whether an argument stands for a tensor (a tensor itself, or metadata with a shape and a dtype)."""
    return isinstance(value, torch.Tensor) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def flatten(value: Any) -> list[Any]:
    """Arguments with nested lists opened, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


def refill(value: Any, supply: Iterator[Any]) -> Any:
    """An argument with its leaves taken from `supply`: the inverse of `flatten`."""
    if isinstance(value, (list, tuple)):
        return [refill(item, supply) for item in value]
    return next(supply)
