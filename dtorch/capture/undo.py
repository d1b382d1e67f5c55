"""Views taken back: what a base is when a view of it has a new value, written by hand where the view is a plain one.

In: the steps from a base to a view, and metadata of the view's new value. Out: the steps from (base, new value) to the
base's new value, the same that a functional trace of a write finds (expand.py), in a tenth of the time; or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.steps import Expansion, Ref, Step, ref, without_dead
from dtorch.capture.symbol import TensorMeta, meta_of

aten = torch.ops.aten
_SCATTERS = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
BASE, NEW = ref(0), ref(1)


def undone(target: Any, args: tuple, base: torch.Tensor) -> tuple[Any, tuple] | None:
    """The operator, with arguments of `BASE` and `NEW`, that undoes a view of `base`: `args` after it, the tensor."""
    if target in _SCATTERS:
        return _SCATTERS[target], (BASE, NEW, *args)
    if target is aten.t.default or target is aten.transpose.int:
        return target, (NEW, *args)
    if target is aten.permute.default:
        dims = [dim % base.dim() for dim in args[0]]
        return target, (NEW, [dims.index(dim) for dim in range(len(dims))])
    if target is aten.unsqueeze.default:
        return aten.squeeze.dim, (NEW, *args)
    if target is aten.squeeze.dim and base.dim() and base.shape[args[0]] == 1:
        return aten.unsqueeze.default, (NEW, *args)
    if target is aten.view.default:
        return target, (NEW, list(base.shape))
    return None


def stand_in(meta: TensorMeta) -> torch.Tensor:
    """A tensor on "meta" with this metadata."""
    with torch.inference_mode(False), torch_private.without_torch_function():
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def run_on_meta(target: Any, *args: Any) -> torch.Tensor | None:
    """The result of an operator on tensors on "meta"; None where torch refuses."""
    try:
        with torch.inference_mode(False), torch.no_grad(), torch_private.without_torch_function():
            return target(*args)
    except (RuntimeError, IndexError):
        return None


def scatter_through(
    expansion: Expansion, metas: Sequence[TensorMeta], output: Ref, base: int, value: TensorMeta
) -> Expansion | None:
    """As `Operation.scatter`: for a view that is result `output` of an expansion on tensors of `metas`."""
    given = len(metas)
    chain: list[Step] = []
    at = output.index
    while at >= given:
        step = expansion.steps[at - given]
        if step.kwargs or not isinstance(step.val, torch.Tensor) or type(step.args[0]) is not Ref:
            return None
        if any(isinstance(item, (Ref, tuple)) for item in step.args[1:]):
            return None
        chain.insert(0, step)
        at = step.args[0].index
    if at != base or not chain or torch_private.dispatcher_is_bypassed() or torch_private.dispatch_is_changed():
        return None
    device = metas[base].device
    steps: list[Step] = []
    tensors = [stand_in(metas[base])]
    refs = [ref(base)]

    def add(target: Any, args: tuple, kwargs: dict[str, Any], tensor: torch.Tensor) -> Ref:
        steps.append(Step(target, args, kwargs, meta_of(tensor, device).val()))
        return ref(given + len(steps))

    def derived() -> None:
        """The views from the base on; the trace derives them anew after it has looked at the last of them."""
        del tensors[1:], refs[1:]
        for step in chain:
            tensors.append(stand_in(meta_of(step.val, device)))
            refs.append(add(step.target, (refs[-1], *step.args[1:]), {}, tensors[-1]))

    derived()
    new: torch.Tensor | None = stand_in(value)
    place = ref(given)
    copied = run_on_meta(aten.copy.default, tensors[-1], new)
    if copied is None or new is None:
        return None
    if meta_of(copied) is not meta_of(new):
        place, new = add(aten.copy.default, (refs[-1], place), {}, copied), copied
        derived()
    for level in range(len(chain) - 1, -1, -1):
        found = undone(chain[level].target, chain[level].args[1:], tensors[level])
        if found is None:
            return None
        target, args = found
        given_args = [tensors[level] if item is BASE else new if item is NEW else item for item in args]
        new = run_on_meta(target, *given_args)
        if new is None:
            return None
        named = tuple([refs[level] if item is BASE else place if item is NEW else item for item in args])
        place = add(target, named, {}, new)
    return without_dead(steps, (place,), given + 1)
