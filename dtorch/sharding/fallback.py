"""torch's own per-axis sharding strategies as data, for ops that we have no rule for.

In: an op and its arguments' metadata. Out: `Alternatives` (what is legal on one mesh axis), or None when torch
does not know the op either. torch.distributed.tensor is imported only when this is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtorch.ir.layout import WHOLE, Pending, Placed, Split
from dtorch.sharding.factors import Alternatives, Strategy


def _placed(placement: Any) -> Placed:
    if placement.is_shard():
        return Split(placement.dim)
    return Pending(placement.reduce_op) if placement.is_partial() else WHOLE


def alternatives_of(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: int, outputs: int
) -> Alternatives | None:
    """Torch's strategies for one call with that many tensor inputs and results, or None.

    Averages are left out: torch's Partial("avg") is exact for even pieces only. So are partial inputs but sums:
    torch's tables say of some ops (the Fourier transforms) that they take partial maxima to partial maxima.
    """
    from dtorch.torch_private import single_dim_strategies

    try:
        raw = single_dim_strategies(op, args, kwargs)
    except Exception:  # torch's tables are not written for every form of a call; then we know nothing of this one
        return None
    if raw is None:
        return None
    found: list[Strategy] = [((WHOLE,) * inputs, (WHOLE,) * outputs)]
    for placements in raw:
        placed = tuple(_placed(p) for p in placements)
        if len(placed) != inputs + outputs or any(type(p) is Pending and p.op == "avg" for p in placed):
            continue
        if any(type(p) is Pending and p.op != "sum" for p in placed[outputs:]):
            continue
        strategy = placed[outputs:], placed[:outputs]
        if strategy not in found:
            found.append(strategy)
    return Alternatives(tuple(found))
