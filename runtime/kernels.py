"""What the kernel names of a plan mean: torch builtins for ATen ops, and the few operations of our own.

In: a kernel's name. Out: a callable on local tensors. Builtins are bound where they parse to the very same
overload, since they cost about a microsecond less a call than `OpOverload` objects.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from dtorch.errors import PlanError
from dtorch.ir import ops
from dtorch.ir.plan import PYTHON
from dtorch.torch_private import native_functions

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@cache
def kernel(name: str) -> Callable[..., Any]:
    """The callable behind a kernel name. Raises PlanError for a name that this torch does not have."""
    if name == "getitem":
        return operator.getitem
    own = _OWN.get(name)
    if own is not None:
        return own
    builtin = native_functions().get(name)
    if builtin is not None:
        return builtin
    if name.startswith(PYTHON):
        return _python_function(name.removeprefix(PYTHON))
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise PlanError(
            f"kernel {name!r} of the plan is not in torch {torch.__version__}: register its library, or compile again."
        ) from error
    return found


def _python_function(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    try:
        return operator.attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"the plan calls {path} of module {module!r}, which cannot be imported here: {error}. Workers import what "
            "the program imports; code of the script itself must be in a module."
        ) from error


def keep_first(value: torch.Tensor, index: int) -> torch.Tensor:
    """The value on coordinate 0 of an axis, zeros elsewhere."""
    return value if index == 0 else torch.zeros_like(value)


_OWN: dict[str, Callable[..., Any]] = {
    "dtorch.keep_first": keep_first,
    "dtorch.slice_scatter_in_place": ops.slice_scatter_in_place,
}


# --- collectives, over the parts of one group in order --------------------------------------------------------------


def reduce_parts(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce equal-shaped parts in group order; half precision sums are made in float32 and rounded once."""
    first = parts[0]
    if len(parts) == 1:
        return first.clone()
    if op in ("sum", "avg"):
        wide = _WIDER.get(first.dtype)
        total = first.to(wide) if wide is not None else first.clone()
        for part in parts[1:]:
            total += part
        if op == "avg":
            total = total / len(parts) if total.is_floating_point() else total // len(parts)
        return total.to(first.dtype)
    combine = {"max": torch.maximum, "min": torch.minimum, "product": torch.mul}.get(op)
    if combine is None:
        raise PlanError(f"a plan reduces with {op!r}; known are sum, avg, max, min, product")
    result = first
    for part in parts[1:]:
        result = combine(result, part)
    return result


def all_gather(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along dim 0."""
    return torch.cat(list(parts), 0)


def reduce_scatter(parts: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
    """Reduce, then hand out equal chunks of dim 0."""
    return list(reduce_parts(parts, op).chunk(len(parts), 0)) if parts[0].shape[0] else list(parts)


def all_to_all(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Part i of every chunk of dim 0 goes to member i."""
    count = len(parts)
    if not parts[0].shape[0]:
        return list(parts)
    chunks = [part.chunk(count, 0) for part in parts]
    return [torch.cat([chunk[index] for chunk in chunks], 0) for index in range(count)]
