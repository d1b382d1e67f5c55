"""Fourier transforms: linear along the transformed dims, which stay whole; all others are free."""

from __future__ import annotations

from typing import Any

from dtorch.sharding.factors import Mapping
from dtorch.sharding.localize import never_empty
from dtorch.sharding.rules.registry import Call, rule

_FOURIER = ("_fft_c2c", "_fft_r2c", "_fft_c2r")
never_empty(*_FOURIER)


@rule(*_FOURIER)
def fourier(call: Call, x: Any, dims: Any, *rest: Any, **options: Any) -> Mapping:
    """The `dims` of x are transformed; the last changes its size when one side is real."""
    rank = len(x.shape)
    touched = {d % rank for d in dims}
    before = [f"!i{i}" if i in touched else f"d{i}" for i in range(rank)]
    after = [f"!o{i}" if i in touched else f"d{i}" for i in range(rank)]
    return call.build([before], [after], linear=((0,),))
