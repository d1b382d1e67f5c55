"""What a device calls for its part of an op, where that is not simply the same op with the same arguments.

In: an `OpCall` (global arguments and metadata) and a `LocalContext` that knows how its tensors are placed and can
emit calls. Out: the local value(s). Shape arguments, group counts and vocabulary offsets are rewritten here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dtorch.ir.layout import Spec, Split

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


def localizer(*names: str) -> Callable[[Localizer], Localizer]:
    """Register a localiser for ops by name, `"aten::view"` for all overloads or `"aten::sum.dim_IntList"` for one."""

    def register(function: Localizer) -> Localizer:
        for name in names:
            _LOCALIZERS[name if "::" in name else f"aten::{name}"] = function
        return function

    return register


def op_names(op: Any) -> tuple[str, str]:
    """An op's full name (`aten::view.default`) and that of all its overloads (`aten::view`); empty for other targets."""
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
    function = localizer_of(call.op)
    return function(ctx, call) if function is not None else as_is(ctx, call)


def as_is(ctx: LocalContext, call: OpCall) -> Any:
    """The same op with the same arguments."""
    return ctx.call(call.op, *call.args, **call.kwargs)


def cuts_of(spec: Spec, dim: int) -> list[Split]:
    """The distinct intervals at which `spec` cuts dimension `dim`."""
    return list(dict.fromkeys(placed for placed in spec if type(placed) is Split and placed.dim == dim))


def may_be_empty(size: int, dim: int, spec: Spec, mesh_shape: tuple[int, ...]) -> bool:
    """Whether some device may hold nothing of dimension `dim`: decided without looking at a coordinate."""
    left: dict[Split, int] = {}
    for axis, placed in enumerate(spec):
        if type(placed) is Split and placed.dim == dim:
            parts = left.get(placed, size // (placed.outer * placed.unit))
            piece = -(-parts // mesh_shape[axis])
            last = parts - piece * (mesh_shape[axis] - 1)
            if last <= 0:
                return True
            left[placed] = last
    return False
