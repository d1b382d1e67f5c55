"""Python methods of the symbol class, which skip torch's own round trip to `__torch_function__` for calls that repeat.

In: nothing; `install` runs once. Out: methods and operators that walk the edge of the recorder's state where it fits
(repeat.py) and else call torch's own, which hands the call to the recorder as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.capture.symbol import Tensor
from dtorch.torch_private import function_modes_active

OPERATORS = {
    "__add__": torch.Tensor.add,
    "__radd__": torch.Tensor.add,
    "__sub__": torch.Tensor.sub,
    "__mul__": torch.Tensor.mul,
    "__rmul__": torch.Tensor.mul,
    "__truediv__": torch.Tensor.div,
    "__matmul__": torch.Tensor.matmul,
    "__neg__": torch.Tensor.neg,
    "__lt__": torch.Tensor.lt,
    "__le__": torch.Tensor.le,
    "__gt__": torch.Tensor.gt,
    "__ge__": torch.Tensor.ge,
}
"""Operators, with the function that torch says was called when they are used."""
# no __getitem__ here: a Python one makes torch.tensor([x, 1.0]) take x for a sequence and ask a 0-d one for its len()
_METHODS = (
    "abs add addmm amax amin argmax argmin baddbmm bfloat16 bmm ceil clamp clone contiguous cos cumsum detach div "
    "double eq exp expand expand_as flatten float floor gather ge gelu gt half index_select le log long lt "
    "masked_fill matmul max maximum mean min minimum mm movedim mul narrow ne neg permute pow reciprocal relu "
    "repeat repeat_interleave reshape roll rsqrt select sigmoid sin softmax sqrt square squeeze sub sum swapaxes "
    "t tanh to transpose tril triu type_as unflatten unsqueeze var view where"
)
METHODS = {name: getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)}
CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
"""Methods that give the tensor itself where it has that dtype."""
_modes = function_modes_active


def install() -> None:
    """Give the symbol class the methods of the tables."""
    for name, seen in OPERATORS.items():
        own = getattr(torch.Tensor, name)
        setattr(Tensor, name, _unary(own, seen) if name == "__neg__" else _binary(own, seen))
    for name, function in METHODS.items():
        setattr(Tensor, name, _method(function))
    for name, dtype in CASTS.items():
        setattr(Tensor, name, _cast(name, dtype))
    Tensor.to = _to
    Tensor.contiguous = _contiguous


def _binary(function: Callable[..., Any], seen: Any) -> Callable[..., Any]:
    def operator(x: Tensor, other: Any) -> Any:
        recorder = x.recorder
        if recorder is not None and not _modes():
            edge = recorder.state.edge
            if edge.function is seen:
                result = edge.walk(edge, recorder, (x, other), None)
                if result is not None:
                    return result
        return function(x, other)

    operator.__name__ = getattr(function, "__name__", "operator")
    return operator


def _unary(function: Callable[..., Any], seen: Any) -> Callable[..., Any]:
    def operator(x: Tensor) -> Any:
        recorder = x.recorder
        if recorder is not None and not _modes():
            edge = recorder.state.edge
            if edge.function is seen:
                result = edge.walk(edge, recorder, (x,), None)
                if result is not None:
                    return result
        return function(x)

    operator.__name__ = getattr(function, "__name__", "operator")
    return operator


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        recorder = args[0].recorder
        if recorder is not None and not _modes():
            edge = recorder.state.edge
            if edge.function is function:
                result = edge.walk(edge, recorder, args, kwargs)
                if result is not None:
                    return result
        return function(*args, **kwargs)

    method.__name__ = getattr(function, "__name__", "method")
    method.__doc__ = function.__doc__
    return method



# --- methods that often give the tensor itself, which is no step of a trace -------------------------------------------

_recorded = {name: _method(METHODS[name]) for name in (*CASTS, "to", "contiguous")}


def _gives_itself(x: Any) -> bool:
    """Whether nobody is to hear of a call on an eager tensor that changes nothing."""
    recorder = x.recorder
    return recorder is not None and recorder.eager and not _modes()


def _cast(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    recorded = _recorded[name]

    def cast(*args: Any, **kwargs: Any) -> Any:
        x = args[0]
        if x.meta.dtype is dtype and len(args) == 1 and not kwargs and _gives_itself(x):
            return x
        return recorded(*args, **kwargs)

    cast.__name__, cast.__doc__ = recorded.__name__, recorded.__doc__
    return cast


def _to(*args: Any, **kwargs: Any) -> Any:
    x, count = args[0], len(args)
    if count == 2 and not kwargs:
        if args[1] is x.meta.dtype and _gives_itself(x):
            return x
    elif count == 1 and len(kwargs) == ("dtype" in kwargs) + ("device" in kwargs):
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        if (dtype is None or dtype is x.meta.dtype) and (device is None or device == x.meta.device):
            if kwargs and _gives_itself(x):
                return x
    return _recorded["to"](*args, **kwargs)


def _contiguous(*args: Any, **kwargs: Any) -> Any:
    x = args[0]
    if x.meta.contiguous and len(args) == 1 and not kwargs and _gives_itself(x):
        return x
    return _recorded["contiguous"](*args, **kwargs)
