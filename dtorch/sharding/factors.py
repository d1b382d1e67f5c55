"""The shared vocabulary of sharding rules: which dimensions of an op's tensors belong together.

A `Mapping` says, for one call of one op, what each dimension of each tensor argument and result is made of:
named factors, outermost first. From it alone follow the legal placements, partial results, divisibility and cost.
`"... i, o i, o? -> ... o"` (linear) reads: `i` is summed over (Pending when cut), `o?` may be absent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dtorch.ir.layout import PENDING, WHOLE, Pending, Placed, Split

Dims = tuple[tuple[str, ...], ...]  # for each tensor dim the factors it is the product of, outermost first
Strategy = tuple[tuple[Placed, ...], tuple[Placed, ...]]  # placements of all inputs and outputs on one mesh axis


@dataclass(frozen=True)
class Mapping:
    """The factors of one op call.

    inputs / outputs: one `Dims` per tensor argument (flattened order of args, then kwargs) and per tensor result.
    sizes: size of every factor (the product of a dim's factors is the dim's size; a dim of size one has none).
    blocked: factors that must not be cut (a softmax's dim, a norm's dims). Factors that only inputs have and are
        not blocked are reduced: cutting them leaves the results Pending(reduce). Factors that only results have
        and are not blocked cost nothing: each device makes its part of the result from whole inputs.
    reduce: for reduced factors the reduction, "sum" unless given ("max", "min").
    linear: each entry is a set of input positions; when exactly these inputs are Pending(sum), the results are.
        `({0}, {1})` for mul, `({0, 1},)` for add, `({0, 2}, {1, 2})` for linear with a bias.
    additive: inputs that are added in (a bias): Pending(sum), with the value kept on one coordinate, when the
        results become Pending by a cut of a reduced factor that the input does not have.
    ignored: inputs whose values are not read (the tensor of `new_zeros`): any placement of them will do.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: dict[str, int]
    blocked: frozenset[str] = frozenset()
    reduce: dict[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    ignored: frozenset[int] = frozenset()

    def cuttable(self) -> tuple[str, ...]:
        """The factors that may be cut, in order of first appearance in `sizes`."""
        return tuple(name for name, size in self.sizes.items() if name not in self.blocked and size != 1)


@dataclass(frozen=True)
class Alternatives:
    """A rule as a plain list of what is legal on one mesh axis, for ops known only through torch's own tables."""

    strategies: tuple[Strategy, ...]


def _place(dims: Dims, sizes: dict[str, int], factor: str, outer: int, unit: int) -> Split | None:
    """The Split that a tensor of these `dims` gets when `factor` is cut at `(outer, unit)`; None without the factor."""
    for dim, names in enumerate(dims):
        if factor in names:
            position = names.index(factor)
            for name in names[:position]:
                outer *= sizes[name]
            for name in names[position + 1 :]:
                unit *= sizes[name]
            return Split(dim, outer, unit)
    return None


def cut(mapping: Mapping, factor: str, outer: int = 1, unit: int = 1) -> Strategy:
    """Placements on one axis, of inputs and outputs, when `factor` is cut at the interval `(outer, unit)` of it."""
    sizes = mapping.sizes
    inputs = [_place(dims, sizes, factor, outer, unit) for dims in mapping.inputs]
    outputs = [_place(dims, sizes, factor, outer, unit) for dims in mapping.outputs]
    if not any(inputs):
        return (WHOLE,) * len(inputs), tuple(placed or WHOLE for placed in outputs)
    reduction = Pending(mapping.reduce.get(factor, "sum"))
    added = PENDING if not all(outputs) and reduction == PENDING else WHOLE
    return (
        tuple(placed or (added if position in mapping.additive else WHOLE) for position, placed in enumerate(inputs)),
        tuple(placed or reduction for placed in outputs),
    )


def carry(mapping: Mapping, pending: frozenset[int]) -> Strategy:
    """Placements on one axis when the inputs `pending` (an entry of `mapping.linear`) are Pending(sum)."""
    return (
        tuple(PENDING if position in pending else WHOLE for position in range(len(mapping.inputs))),
        (PENDING,) * len(mapping.outputs),
    )


def whole(mapping: Mapping) -> Strategy:
    """Everything is the same everywhere: always legal."""
    return (WHOLE,) * len(mapping.inputs), (WHOLE,) * len(mapping.outputs)


def locate(
    dims: Dims, sizes: dict[str, int], split: Split, count: int, parts: int | None = None
) -> tuple[str, int, int] | None:
    """Which interval of which factor an incoming `split` cuts: `(factor, outer, unit)`; None if it is none.

    A cut that straddles factors is read as the coarser cut of the outer one where that places the same elements:
    `Split(d, o, u)` equals `Split(d, o, u * k)` on `count` coordinates if `k` divides both the number of parts and
    `ceil(parts / count)`. `parts`: how many parts are left when earlier axes have cut the same interval.
    """
    names = dims[split.dim]
    size = 1
    for name in names:
        size *= sizes[name]
    if not size:
        return None
    end = size // split.unit  # the cut covers the products from split.outer to end, outermost first
    before = 1
    for name in names:
        after = before * sizes[name]
        if split.outer < after:
            if split.outer % before or after % split.outer:
                return None
            if after % end == 0:
                return name, split.outer // before, after // end
            coarser = end // after
            left = end // split.outer if parts is None else parts
            if end % after or left % coarser or -(-left // count) % coarser:
                return None
            return name, split.outer // before, 1
        before = after
    return None
