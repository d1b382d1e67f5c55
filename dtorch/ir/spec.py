"""Between public placements (torch's Shard, Replicate, Partial) and the compiler's `Spec` with units.

In: normalized placements. Out: a Spec; and back, where units are dropped (`Shard(d)` is all that users see); and a
placed tensor in words, as messages show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch

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


DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
"""Short names of dtypes in graphs and messages."""


def tensor_text(dtype: torch.dtype, shape: Sequence[int], spec: Spec | None) -> str:
    """`f32[4,3][S(0)]`; without placements when `spec` is None."""
    text = f"{DTYPE_NAMES.get(dtype, str(dtype).removeprefix('torch.'))}[{','.join(map(str, shape))}]"
    return text if spec is None else f"{text}[{','.join(map(repr, spec))}]"
