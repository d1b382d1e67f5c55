"""What torch's derivatives and tracers are told when they meet a distributed tensor: one clear error for each.

In: a tensor or a call that one of them works on. Out: nothing, or an UnsupportedError with the user's line, since what
is recorded would be missing from their results, or be a constant of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.methods import no_gradients
from dtorch.errors import UnsupportedError


def asked_whether_a_wrapper(tensor: Any) -> None:
    """Raise where a tracer asks whether the tensor wraps others, as it does of every value before it traces it."""
    tracer = torch_private.tracer_that_looks()
    if tracer is None:
        return
    operator = torch_private.higher_order_call()
    if operator is not None:
        message = (
            f"{operator} on {tensor.summary}: torch would compile the functions that it is given, and operations on "
            "dtorch tensors are recorded as they run. Write the branch or the loop in Python; bool(x) reads a value."
        )
    else:
        message = _no_tracer(tracer, tensor.summary)
    kind = torch_private.passes_dynamo(UnsupportedError) if tracer == torch_private.DYNAMO else UnsupportedError
    raise kind(_line(tensor) + message)


def asked_for_derivatives(tensor: Any) -> None:
    """Raise where torch.autograd.functional marks a tensor to differentiate by it."""
    transform = torch_private.derivative_in_progress()
    if transform is not None:
        raise no_gradients(f"{_line(tensor)}{transform} of {tensor.summary}")


def refuse_transforms(recorder: Any, name: str, tensors: Sequence[torch.Tensor], symbol: Any) -> None:
    """Raise where a call is traced, or where one of its tensors is differentiated."""
    tracer = torch_private.tracer_that_records()
    if tracer is not None:
        raise UnsupportedError(f"{recorder.line()}: {_no_tracer(tracer, symbol.summary)}")
    if any(torch_private.is_differentiated(tensor) for tensor in tensors):
        raise no_gradients(f"{recorder.line()}: {name} under {torch_private.derivative_in_progress() or 'torch.func'}")


def refuse_derivatives(name: str, symbol: Any) -> None:
    """Raise where an operator comes from a transform that differentiates."""
    transform = torch_private.derivative_in_progress()
    if transform is not None:
        raise no_gradients(f"{_line(symbol)}{name} under {transform}")


def _line(symbol: Any) -> str:
    return "" if symbol is None or symbol.recorder is None else f"{symbol.recorder.line()}: "


def _no_tracer(tracer: str, what: str) -> str:
    return (
        f"{tracer} of code that works on {what}: operations on dtorch tensors are recorded and compiled as they run, "
        "so call the function as it is. dtorch.compile(module, mesh) compiles a whole module; "
        "a function under torch.compiler.disable that takes and gives plain tensors may use them inside."
    )
