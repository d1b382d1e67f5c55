"""Einops-like text to a `Mapping`: the way sharding rules are written, by us and by users.

In: `"... i, o i, o? -> ... o"` and the shapes of one call. Out: a `Mapping`, or a ShardingError that names both.

    a b          dims, each one factor; factors of one name have one size in all tensors
    (h d)        one dim that is the product of factors, outermost first
    1            a dim of size one
    !x           factor x must not be cut, in whichever tensor this stands
    ...          any number of dims, aligned to the right and broadcast: size one against a larger size is not cut
    x y?         `?` after a whole operand: this tensor argument may be absent
    ,            the next tensor argument (flattened, in the order of the op's signature) or result
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from dtorch.errors import ShardingError
from dtorch.sharding.factors import Dims, Mapping

ELLIPSIS = ("...",)
_TOKEN = re.compile(r"\s*(\.\.\.|[()]|!?[A-Za-z_][A-Za-z_0-9]*|1(?!\d)|\?)")


@dataclass(frozen=True)
class Operand:
    """One tensor of a notation: its dims (ELLIPSIS marks the broadcast ones) and whether it may be absent."""

    dims: Dims
    optional: bool = False


@dataclass(frozen=True)
class Notation:
    """A parsed rule: it can be applied to the shapes of any call of the op."""

    text: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    blocked: frozenset[str]


def _parse_operand(text: str, whole: str, blocked: set[str]) -> Operand:
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    optional = False
    position = 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or optional:
            raise ShardingError(f"sharding rule {whole!r}: cannot read {text[position:]!r} in operand {text!r}")
        token, position = match[1], match.end()
        if token == "?":
            optional = True
        elif token == "(":
            if group is not None:
                raise ShardingError(f"sharding rule {whole!r}: a group within a group in operand {text!r}")
            group = []
        elif token == ")":
            if group is None:
                raise ShardingError(f"sharding rule {whole!r}: `)` without `(` in operand {text!r}")
            dims.append(tuple(group))
            group = None
        elif token == "...":
            if group is not None or ELLIPSIS in dims:
                raise ShardingError(f"sharding rule {whole!r}: `...` may stand once in an operand, outside of groups")
            dims.append(ELLIPSIS)
        elif token == "1":
            if group is None:
                dims.append(())
        else:
            name = token.lstrip("!")
            if token != name:
                blocked.add(name)
            if group is None:
                dims.append((name,))
            else:
                group.append(name)
    if group is not None:
        raise ShardingError(f"sharding rule {whole!r}: `(` is not closed in operand {text!r}")
    return Operand(tuple(dims), optional)


@cache
def parse(text: str) -> Notation:
    """Read a notation; ShardingError says what is wrong with it. A factor used twice in one tensor is blocked."""
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ShardingError(f"sharding rule {text!r}: expected exactly one `->` between inputs and outputs")
    blocked: set[str] = set()
    inputs = tuple(_parse_operand(part, text, blocked) for part in left.split(",")) if left.strip() else ()
    outputs = tuple(_parse_operand(part, text, blocked) for part in right.split(","))
    for operand in inputs + outputs:
        names = [name for dim in operand.dims for name in dim]
        blocked.update(name for name in names if names.count(name) > 1)
    if any(operand.optional for operand in outputs):
        raise ShardingError(f"sharding rule {text!r}: a result cannot be optional")
    return Notation(text, inputs, outputs, frozenset(blocked))


def _mismatch(notation: Notation, tensors: Sequence[Any], outputs: Sequence[Any], why: str) -> ShardingError:
    shapes = ", ".join("None" if t is None else str(tuple(t.shape)) for t in tensors)
    results = ", ".join(str(tuple(t.shape)) for t in outputs)
    return ShardingError(f"sharding rule {notation.text!r} does not fit the shapes {shapes} -> {results}: {why}")


def _spread(operand: Operand, rank: int) -> Dims | None:
    """The operand's dims with the ellipsis written out for a tensor of `rank` dims; None if they cannot fit."""
    dims = operand.dims
    if ELLIPSIS not in dims:
        return dims if len(dims) == rank else None
    extra = rank - len(dims) + 1
    if extra < 0:
        return None
    position = dims.index(ELLIPSIS)
    return dims[:position] + tuple((f"...{i}",) for i in range(extra - 1, -1, -1)) + dims[position + 1 :]


def apply(
    notation: Notation,
    tensors: Sequence[Any],
    outputs: Sequence[Any],
    *,
    linear: Iterable[Iterable[int]] = (),
    blocked: Iterable[str] = (),
    reduce: dict[str, str] | None = None,
    additive: Iterable[int] = (),
) -> Mapping:
    """The Mapping of one call. `tensors` holds None for absent optional operands; positions count operands."""
    tensors = [*tensors, *(None for _ in notation.inputs[len(tensors) :])]
    if len(tensors) > len(notation.inputs) or len(outputs) != len(notation.outputs):
        raise _mismatch(notation, tensors, outputs, "the number of tensors differs")
    sizes: dict[str, int] = {}
    found: list[tuple[Dims, Any]] = []
    place: dict[int, int] = {}
    groups: list[tuple[tuple[str, ...], int]] = []
    for position, (operand, tensor) in enumerate(zip((*notation.inputs, *notation.outputs), (*tensors, *outputs))):
        if tensor is None:
            if not operand.optional:
                raise _mismatch(notation, tensors, outputs, f"operand {position} is absent but not marked `?`")
            continue
        dims = _spread(operand, len(tensor.shape))
        if dims is None:
            raise _mismatch(notation, tensors, outputs, f"tensor {position} has {len(tensor.shape)} dims")
        if position < len(notation.inputs):
            place[position] = len(place)
        found.append((dims, tensor))
        for names, size in zip(dims, tensor.shape):
            if len(names) == 1:
                name = names[0]
                known = sizes.setdefault(name, size)
                if known != size:
                    if name[0] != "." or (known != 1 and size != 1):
                        raise _mismatch(notation, tensors, outputs, f"{name} is both {known} and {size}")
                    sizes[name] = size if known == 1 else known
            else:
                groups.append((names, size))
    _solve(notation, tensors, outputs, sizes, groups)
    written = tuple(
        tuple(
            () if size == 1 else tuple(name for name in names if sizes[name] != 1)
            for names, size in zip(dims, tensor.shape)
        )
        for dims, tensor in found
    )
    return Mapping(
        inputs=written[: len(place)],
        outputs=written[len(place) :],
        sizes={name: size for name, size in sizes.items() if size != 1},
        blocked=notation.blocked.union(blocked),
        reduce=reduce or {},
        linear=tuple(
            kept for group in linear if (kept := frozenset(place[position] for position in group if position in place))
        ),
        additive=frozenset(place[position] for position in additive if position in place),
    )


def _solve(notation: Notation, tensors: Any, outputs: Any, sizes: dict[str, int], groups: list) -> None:
    """Find the sizes of factors that stand only in groups, and check every group's product."""
    waiting = groups
    while waiting:
        later = []
        for names, size in waiting:
            unknown = [name for name in names if name not in sizes]
            product = 1
            for name in names:
                product *= sizes.get(name, 1)
            if len(unknown) > 1:
                later.append((names, size))
            elif unknown:
                if product == 0 or size % product:
                    raise _mismatch(notation, tensors, outputs, f"{size} is no multiple of {product} in {names}")
                sizes[unknown[0]] = size // product
            elif product != size:
                raise _mismatch(notation, tensors, outputs, f"({' '.join(names)}) is {product}, not {size}")
        if len(later) == len(waiting):
            raise _mismatch(
                notation, tensors, outputs, f"the factors of ({' '.join(later[0][0])}) cannot be told apart"
            )
        waiting = later
