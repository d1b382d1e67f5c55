"""The notation of sharding rules: which dimensions of an op's tensors belong together.

A `Mapping` says, for one call of one op, what each dimension of each tensor argument and result is made of:
named factors, outermost first. From it alone follow the legal placements, partial results, divisibility and cost.
`"... i, o i, o? -> ... o"` (linear) reads: `i` is summed over (Partial when cut), `o?` may be absent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Dims = tuple[tuple[str, ...], ...]  # for each tensor dim the factors it is the product of, outermost first


@dataclass(frozen=True)
class Mapping:
    """The factors of one op call.

    inputs / outputs: one `Dims` per tensor argument (flattened order of args, then kwargs) and per tensor result.
    sizes: size of every factor (the product of a dim's factors is the dim's size).
    blocked: factors that must not be cut (a softmax's dim, a norm's dims). Factors that only inputs have and are
        not blocked are reduced: cutting them leaves the results Pending(reduce).
    reduce: for such factors the reduction, "sum" unless given ("max", "min", "avg" ...).
    linear: each entry is a set of input positions; when exactly these inputs are Pending(sum), the results are.
        `({0}, {1})` for mul, `({0, 1},)` for add, `({0, 2},)` for linear with a bias (bias is kept on coordinate 0).
    unit_only: factors that may only be cut at whole units of 1 (no coarser or finer interval), rarely needed.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: dict[str, int]
    blocked: frozenset[str] = frozenset()
    reduce: dict[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
