"""Between public placements (torch's Shard, Replicate, Partial) and the compiler's `Spec` with units.

In: normalized placements. Out: a Spec; and back, where units are dropped (`Shard(d)` is all that users see).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from dtorch.ir.layout import WHOLE, Pending, Spec, Split, Whole


def to_spec(placements: Iterable[Any]) -> Spec:
    """The Spec of normalized placements; a Shard(d) becomes Split(d) with unit 1, torch's own cut."""
    return tuple(_to_placed(placement) for placement in placements)


def _to_placed(placement: Any) -> Whole | Pending | Split:
    if placement.is_shard():
        return Split(placement.dim)
    if placement.is_partial():
        return Pending(placement.reduce_op)
    return WHOLE


@lru_cache(maxsize=4096)
def from_spec(spec: Spec) -> tuple[Any, ...]:
    """The public placements of a Spec, one a mesh axis."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return tuple(
        Shard(placed.dim) if isinstance(placed, Split)
        else Partial(placed.op) if isinstance(placed, Pending)
        else Replicate()
        for placed in spec
    )  # fmt: skip
