"""The short way from a torch function to ATen: run it once on meta tensors and take down what it calls.

In: an `Operation` that was not looked at yet. Out: the same results, aliases and expansion that the probe and the
functional trace find (`expand.py`), in a tenth of their time; or False, and they are asked. Only functions that reach
nothing but the operators named here, none of which writes or draws random numbers, are understood.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from dtorch import torch_private
from dtorch.capture.shapes import CPU_SHAPE_RULES, SHAPE_RULES
from dtorch.capture.steps import (
    DROPPED,
    SELF,
    VIEW,
    Expansion,
    Ref,
    Step,
    draws,
    fill,
    is_inactive_dropout,
    ref,
    without_dead,
)
from dtorch.capture.symbol import meta_of

if TYPE_CHECKING:
    from dtorch.capture.expand import Operation

aten = torch.ops.aten
_META = torch.device("meta")

VIEWS = """view transpose t permute unsqueeze squeeze expand slice select alias detach diagonal unbind split
split_with_sizes unfold view_as_real view_as_complex real imag"""
PRODUCTS = "mm bmm matmul linear addmm baddbmm addmv mv dot outer einsum scaled_dot_product_attention"
REDUCTIONS = """sum mean amax amin max min argmax argmin prod var std norm linalg_vector_norm all any cumsum cumprod
logsumexp softmax log_softmax layer_norm rms_norm group_norm count_nonzero"""
MOVES = """cat stack clone _to_copy copy flip roll repeat tril triu constant_pad_nd pad index index_select gather
embedding take_along_dim masked_fill where topk sort argsort scatter scatter_add index_add index_copy index_fill
slice_scatter select_scatter"""
MADE_LIKE = "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty fill"
OTHERS = "dropout glu pixel_shuffle lerp addcmul addcdiv clamp relu6 softplus elu leaky_relu"
LISTED = frozenset(" ".join((VIEWS, PRODUCTS, REDUCTIONS, MOVES, MADE_LIKE, OTHERS)).split())
"""Operators that torch can run on meta tensors without reading them, by name; all element-wise ones are besides."""


def accepts(op: torch_private.OpOverload) -> bool:
    """Whether an operator may be part of a direct expansion."""
    facts = torch_private.schema_facts(op)
    if facts.mutates or op.namespace != "aten":
        return False
    name = op.overloadpacket.__name__
    return name in LISTED or torch.Tag.pointwise in op.tags and not facts.seeded


def _accepts_elsewhere(op: torch_private.OpOverload) -> bool:
    """Off the CPU a meta tensor does not tell how attention's result lies in memory."""
    return accepts(op) and op is not aten.scaled_dot_product_attention.default


def look(called: Operation) -> bool:
    """Fill in results, aliases and expansion of an operation; False: not understood, nothing was filled in."""
    if not called.metas or isinstance(called.function, torch_private.OpOverload):
        return False
    if torch.are_deterministic_algorithms_enabled():  # torch's Python functions look at the device then
        return False
    given = [_meta_tensor(meta) for meta in called.metas]
    on_cpu = called.metas[0].device.type == "cpu"
    found = torch_private.composite_calls(
        lambda: called.function(*fill(called.args, given), **fill(called.kwargs, given)),
        accepts if on_cpu else _accepts_elsewhere,
        CPU_SHAPE_RULES if on_cpu else SHAPE_RULES,
    )
    if found is None:
        return False
    result, calls = found
    notes = _Notes(given, called.metas[0].device)
    if not all(notes.take(*call) for call in calls):
        return False
    flat, spec = torch_private.tree_flatten(result)
    storages = {torch_private.storage_id(tensor): i for i, tensor in reversed(list(enumerate(given)))}
    results: list[Any] = []
    aliases: list[Any] = []
    outputs: list[Any] = []
    for value in flat:
        if not isinstance(value, torch.Tensor):
            results.append(value)
            aliases.append(None)
            continue
        known = notes.known.get(id(value))
        if known is None:
            return False
        results.append(meta_of(value, notes.device))
        if known.index < len(given) and given[known.index] is value:
            aliases.append((SELF, known.index))
        else:
            base = storages.get(torch_private.storage_id(value))
            aliases.append(None if base is None else (VIEW, base))
            outputs.append(known)
    called.results, called.spec, called.aliases, called.mutated = results, spec, aliases, ()
    called.expansion = notes.expansion(tuple(outputs))
    return True


def _meta_tensor(meta: Any) -> torch.Tensor:
    with torch.inference_mode(False), torch_private.without_torch_function():
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=_META)


class _Notes:
    """Calls on tensors as steps on `Ref`s. Tensors are known by identity; `kept` holds those that calls made."""

    def __init__(self, given: list[torch.Tensor], device: torch.device) -> None:
        self.given, self.device = len(given), device
        self.known: dict[int, Ref] = {id(tensor): ref(i) for i, tensor in enumerate(given)}
        self.steps: list[Any] = []
        self.kept: list[Any] = []

    def take(self, target: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> bool:
        """Note one call; False where something in it is not understood."""
        self.kept.append(result)
        if target in DROPPED or is_inactive_dropout(target, args):
            self.known[id(result)] = self.known[id(args[0])]
            return True
        if torch_private.draws_random_numbers(target) and draws(target, args, kwargs):
            return False
        try:
            args, kwargs = self._template(args), self._template(kwargs)
        except KeyError:
            return False
        if target is aten.type_as.default:
            target, args, kwargs = aten._to_copy.default, args[:1], {"dtype": result.dtype}
        if isinstance(result, torch.Tensor):
            self._step(target, args, kwargs, result)
            return True
        whole = ref(self.given + len(self.steps))
        self.steps.append((target, args, kwargs, type(result)(map(self._val, result))))
        for i, part in enumerate(result):
            self._step(operator.getitem, (whole, i), {}, part)
        return True

    def _step(self, target: Any, args: tuple, kwargs: dict[str, Any], result: torch.Tensor) -> None:
        self.known[id(result)] = ref(self.given + len(self.steps))
        self.steps.append((target, args, kwargs, self._val(result)))

    def _val(self, tensor: torch.Tensor) -> torch.Tensor:
        return meta_of(tensor, self.device).val()

    def _template(self, item: Any) -> Any:
        kind = type(item)
        if isinstance(item, torch.Tensor):
            return self.known[id(item)]
        if kind is tuple or kind is torch.Size:
            return tuple([self._template(child) for child in item])
        if kind is list:
            return [self._template(child) for child in item]
        if kind is dict:
            return {key: self._template(child) for key, child in item.items()}
        return self.device if item == _META else item

    def expansion(self, outputs: tuple) -> Expansion:
        """The steps that the outputs need."""
        return without_dead([Step(*step) for step in self.steps], outputs, self.given)
