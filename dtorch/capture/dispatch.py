"""ATen operators that reach a symbol past torch functions: from vmap's rules and other C++ callers.

In: an overload with its arguments; C++ sees a symbol as a meta tensor. Out: what the recorder makes of the call. C++
also gives fresh results another shape in place (`squeeze_` after a product), which symbols take on as a new value.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.expand import name_of
from dtorch.capture.intercept import call
from dtorch.capture.record import Scan
from dtorch.capture.refuse import refuse_derivatives
from dtorch.capture.symbol import Tensor

aten = torch.ops.aten
RESHAPES = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
}


def dispatch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Record an ATen operator."""
    symbol = next((tensor for tensor in Scan(args, kwargs).tensors if isinstance(tensor, Tensor)), None)
    refuse_derivatives(name_of(func), symbol)
    if symbol is None or symbol.recorder is None:
        return call(func, args, kwargs)
    recorder = symbol.recorder
    if func in RESHAPES and recorder.newest() is symbol and symbol.base is None:
        _become(symbol, call(RESHAPES[func], args, kwargs))
        return symbol
    device = kwargs.get("device")
    if device is not None and device.type == "meta":
        kwargs = {**kwargs, "device": symbol.device}
    result = call(func, args, kwargs)
    # What is newest cannot have views yet: they would be newer.
    if isinstance(result, Tensor):
        if func is aten._unsafe_view.default:  # promises that nobody looks at its argument again
            result.base = result.step = result.root = None
        recorder.newest = weakref.ref(result)
    return result


def _become(symbol: Tensor, value: Tensor) -> None:
    """Make `value` the symbol's own, shape and all."""
    recorder = symbol.recorder
    if recorder.eager:
        recorder.rebind(symbol, value)
        return
    torch_private.set_data(symbol, value)
    symbol.meta, symbol.node = value.meta, recorder.value(value)
