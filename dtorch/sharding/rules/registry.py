"""The registry of sharding rules and the order in which they are asked.

In: an op, its arguments with metadata in place of tensors, and its results' metadata. Out: the op's mappings and
where they came from: a user's rule, our own, torch's strategy tables, or nothing known (replicate everything).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dtorch.errors import ShardingError
from dtorch.sharding import fallback
from dtorch.sharding.factors import Alternatives, Dims, Mapping
from dtorch.sharding.localize import is_tensor, op_names
from dtorch.sharding.notation import Notation, apply, parse
from dtorch.torch_private import OpOverload, OpOverloadPacket, schema_arguments, schema_tensors

Rule = Callable[..., "Mapping | tuple[Mapping, ...] | None"]

_RULES: dict[str, Rule] = {}
_USER: dict[str, Rule] = {}
_FOUND: dict[Any, Rule | None] = {}
_LISTENERS: list[Callable[[], None]] = []


def tensors_in(values: Iterable[Any]) -> list[Any]:
    """Tensors among arguments, lists looked into, in order."""
    found = []
    for value in values:
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            found.extend(tensors_in(value))
        elif is_tensor(value):
            found.append(value)
    return found


class Call:
    """What a rule sees of one op call: the op, its tensors in the signature's order, its results, and two writers."""

    __slots__ = ("op", "outputs", "tensors")

    def __init__(self, op: Any, tensors: list[Any], outputs: Sequence[Any]) -> None:
        self.op = op
        self.tensors = tensors
        self.outputs = outputs

    @property
    def name(self) -> str:
        """The op's name without namespace and overload."""
        return self.op.name().partition("::")[2].partition(".")[0]

    def notate(self, text: str, *tensors: Any, **options: Any) -> Mapping:
        """A Mapping from notation; `tensors` may hold None for absent ones (default: all tensors of the call)."""
        return apply(parse(text), tensors or self.tensors, self.outputs, **options)

    def build(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        *,
        sizes: dict[str, int] | None = None,
        blocked: Iterable[str] = (),
        reduce: dict[str, str] | None = None,
        linear: Iterable[Iterable[int]] = (),
        additive: Iterable[int] = (),
        ignored: Iterable[int] = (),
    ) -> Mapping:
        """A Mapping from a list of dims for each tensor, for rules that depend on ranks.

        A dim is written as a factor's name, as None for no factor, or as a tuple of names whose `sizes` are given.
        A name that begins with `!` is blocked. A dim of size one has no factor, whatever is written: that is how
        broadcasting is expressed.
        """
        found = dict(sizes or {})
        written = tuple(
            self._dims(dims, tensor, found) for dims, tensor in zip(inputs, self.tensors, strict=True)
        ) + tuple(self._dims(dims, tensor, found) for dims, tensor in zip(outputs, self.outputs, strict=True))
        return Mapping(
            inputs=written[: len(self.tensors)],
            outputs=written[len(self.tensors) :],
            sizes=found,
            blocked=frozenset(name for name in found if name[0] == "!").union(blocked),
            reduce=reduce or {},
            linear=tuple(map(frozenset, linear)),
            additive=frozenset(additive),
            ignored=frozenset(ignored),
        )

    def _dims(self, written: Iterable[Any], tensor: Any, sizes: dict[str, int]) -> Dims:
        dims: list[tuple[str, ...]] = []
        for names, size in zip(written, tensor.shape, strict=True):
            if names is None or size == 1:
                dims.append(())
            elif isinstance(names, str):
                if sizes.setdefault(names, size) != size:
                    raise ValueError(f"{self.op}: factor {names} is both {sizes[names]} and {size}")
                dims.append((names,))
            else:
                dims.append(tuple(name for name in names if sizes[name] != 1))
        return tuple(dims)


def free_dims(rank: int) -> list[Any]:
    """A factor of its own for each dim."""
    return [f"d{i}" for i in range(rank)]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for aten ops by name, all overloads (`"sum"`) or one (`"sum.dim_IntList"`).

    A rule is called with a `Call` and the op's own arguments; None means that it does not know this form of call.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            full = name if "::" in name else f"aten::{name}"
            if full in _RULES:
                raise ValueError(f"two sharding rules for {full}: {_RULES[full]} and {function}")
            _RULES[full] = function
        return function

    return register


def _rule_of(op: Any, rules: dict[str, Rule]) -> Rule | None:
    name, packet = op_names(op)
    return rules.get(name) or rules.get(packet)


def _own_rule(op: Any) -> Rule | None:
    """Our rule for an op; torch's tag says which ops without one are elementwise."""
    if op not in _FOUND:
        found = _rule_of(op, _RULES)
        if found is None and torch.Tag.pointwise in getattr(op, "tags", ()):
            found = _RULES["aten::add"]
        _FOUND[op] = found
    return _FOUND[op]


def mappings_of(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any]
) -> tuple[tuple[Mapping, ...] | Alternatives, str]:
    """The mappings of one call (the main one first) and their source: "user", "own", "torch" or "replicate".

    From torch's tables come `Alternatives`: strategies that are no mapping.

    `args` and `kwargs` hold metadata (shape, dtype, stride) in place of tensors, `outputs` is that of the results.
    """
    tensors = tensors_in(args)
    order = None
    if kwargs:
        named = {name: value for name, value in kwargs.items() if tensors_in((value,))}
        if len(named) > 1:
            order = _signature_order(op, named, len(tensors))
            kwargs = {**kwargs, **{name: named[name] for name in sorted(named, key=_argument_position(op))}}
            named = {name: kwargs[name] for name in sorted(named, key=_argument_position(op))}
        tensors += tensors_in(named.values())
    call = Call(op, tensors, outputs)
    for source, function in (("user", _rule_of(op, _USER) if _USER else None), ("own", _own_rule(op))):
        found = function(call, *args, **kwargs) if function is not None else None
        if found is not None:
            found = found if isinstance(found, tuple) else (found,)
            return tuple(_reorder(mapping, order) for mapping in found) if order else found, source
    alternatives = fallback.alternatives_of(op, args, kwargs, len(tensors), len(outputs)) if order is None else None
    if alternatives is not None:
        return alternatives, "torch"
    return (replicated(call),), "replicate"


def replicated(call: Call) -> Mapping:
    """Every dim of every tensor blocked."""
    return call.build(
        [[f"!i{k}_{d}" for d in range(len(t.shape))] for k, t in enumerate(call.tensors)],
        [[f"!o{k}_{d}" for d in range(len(t.shape))] for k, t in enumerate(call.outputs)],
    )


def _argument_position(op: Any) -> Callable[[str], int]:
    return schema_arguments(op).index


def _signature_order(op: Any, named: dict[str, Any], offset: int) -> list[int] | None:
    """For each tensor in the node's order its position in the signature's order; None when they agree."""
    begins, position = {}, offset
    for name in sorted(named, key=_argument_position(op)):
        begins[name] = position
        position += len(tensors_in((named[name],)))
    order = list(range(offset))
    for name, value in named.items():
        order += range(begins[name], begins[name] + len(tensors_in((value,))))
    return None if order == sorted(order) else order


def _reorder(mapping: Mapping, order: list[int]) -> Mapping:
    moved = {old: new for new, old in enumerate(order)}
    return Mapping(
        inputs=tuple(mapping.inputs[old] for old in order),
        outputs=mapping.outputs,
        sizes=mapping.sizes,
        blocked=mapping.blocked,
        reduce=mapping.reduce,
        linear=tuple(frozenset(moved[p] for p in group) for group in mapping.linear),
        additive=frozenset(moved[p] for p in mapping.additive),
        ignored=frozenset(moved[p] for p in mapping.ignored),
    )


def _op_name(op: Any) -> str:
    if isinstance(op, str):
        if "::" not in op and "." in op:
            return op.replace(".", "::", 1)  # as an op prints: aten.view.default
        if "::" not in op:
            raise ShardingError(f"register_sharding_rule: {op!r} is not of the form 'namespace::name'")
        return op
    if isinstance(op, OpOverload):
        return op_names(op)[0]
    if isinstance(op, OpOverloadPacket):
        return str(op).replace(".", "::", 1)
    raise ShardingError(
        f"register_sharding_rule: expected an OpOverload, an OpOverloadPacket or 'namespace::name', got {op!r}"
    )


def register_sharding_rule(
    op: Any,
    notation: str,
    *,
    linear: Iterable[Iterable[int]] | None = None,
    blocked: Iterable[str] = (),
    reduce: str | dict[str, str] | None = None,
) -> None:
    """Say how an op may be sharded: `dtorch.register_sharding_rule("mylib::swiglu", "... d, ... d -> ... d")`.

    op: an OpOverload, an OpOverloadPacket (all its overloads) or a "namespace::name" string.
    notation: see `dtorch.sharding.notation`; one operand for each tensor argument, one for each tensor result.
    linear: sets of input positions; when exactly the inputs of a set are partial sums, so are the results.
    blocked: factors that must not be cut, besides those marked `!x`.
    reduce: what cutting a factor that no result has leaves to do: "sum" (default), "max" or "min", for all such
        factors or by name.
    A later rule for the same op replaces an earlier one; rules of users come before the built-in ones.
    Raises ShardingError (a ValueError) for a notation that cannot be read, and at use for shapes that do not fit it.
    """
    name = _op_name(op)
    parsed = parse(notation)
    linear = tuple(tuple(group) for group in linear or ())
    factors = {name for operand in parsed.inputs + parsed.outputs for dim in operand.dims for name in dim}
    reduced = dict.fromkeys(factors, reduce) if isinstance(reduce, str) else dict(reduce or {})
    for group in linear:
        if not all(0 <= position < len(parsed.inputs) for position in group):
            raise ShardingError(
                f"sharding rule {notation!r}: linear={group} names an input beyond {len(parsed.inputs)}"
            )
    for factor in (*blocked, *reduced):
        if factor not in factors:
            raise ShardingError(f"sharding rule {notation!r} has no factor {factor!r}; it has {sorted(factors)}")
    for kind in reduced.values():
        if kind not in ("sum", "max", "min"):
            raise ShardingError(f"sharding rule {notation!r}: reduce={kind!r} is not one of 'sum', 'max', 'min'")
    _USER[name] = _UserRule(name, parsed, linear, tuple(blocked), reduced)
    for forget in _LISTENERS:
        forget()


def when_registered(forget: Callable[[], None]) -> None:
    """Call `forget` whenever a rule of a user is registered: for caches of what `mappings_of` gave."""
    _LISTENERS.append(forget)


class _UserRule:
    """A registered notation, applied to calls."""

    def __init__(
        self, name: str, notation: Notation, linear: tuple, blocked: tuple[str, ...], reduce: dict[str, str]
    ) -> None:
        self.name, self.notation, self.linear, self.blocked, self.reduce = name, notation, linear, blocked, reduce

    def __call__(self, call: Call, *args: Any, **kwargs: Any) -> Mapping:
        operands: list[Any] = []
        for value in schema_tensors(call.op, args, kwargs):
            operands.extend(value if isinstance(value, (list, tuple)) else (value,))
        while len(operands) > len(self.notation.inputs) and operands[-1] is None:
            operands.pop()
        try:
            return apply(
                self.notation, operands, call.outputs, linear=self.linear, blocked=self.blocked, reduce=self.reduce
            )
        except ShardingError as error:
            raise ShardingError(f"{self.name}: {error}") from None
