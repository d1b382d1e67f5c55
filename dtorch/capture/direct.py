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

VIEWS = """view _unsafe_view transpose t permute unsqueeze squeeze expand slice select alias detach diagonal unbind
split split_with_sizes unfold view_as_real view_as_complex real imag meshgrid
broadcast_tensors"""
PRODUCTS = """mm bmm matmul linear addmm baddbmm addmv mv dot outer inner tensordot einsum
scaled_dot_product_attention"""
REDUCTIONS = """sum mean amax amin max min argmax argmin prod var std norm linalg_vector_norm all any cumsum cumprod
var_mean std_mean logsumexp softmax log_softmax layer_norm rms_norm group_norm count_nonzero"""
MOVES = """cat stack clone _to_copy copy flip roll repeat tril triu constant_pad_nd pad index index_select gather
embedding take_along_dim masked_fill where topk sort argsort scatter scatter_add index_add index_copy index_fill
slice_scatter select_scatter index_put hstack vstack dstack tile repeat_interleave bucketize scatter_reduce"""
MADE_LIKE = "empty scalar_tensor zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty fill"
OTHERS = """dropout glu pixel_shuffle pixel_unshuffle rsub floor_divide hardswish prelu log_sigmoid isclose zero
mse_loss l1_loss smooth_l1_loss cross_entropy_loss binary_cross_entropy_with_logits square pow"""
IMAGES = """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d max_pool3d
max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
_native_batch_norm_legit_no_training instance_norm"""
_BY_DEVICE = frozenset((*IMAGES.split(), "scaled_dot_product_attention"))
LISTED = frozenset(" ".join((VIEWS, PRODUCTS, REDUCTIONS, MOVES, MADE_LIKE, OTHERS, IMAGES)).split())
"""Operators that torch can run on meta tensors without reading them, by name; all element-wise ones are besides.
`IMAGES` choose a memory format by the device: shapes.py says where that is known.
"""


def accepts(op: torch_private.OpOverload) -> bool:
    """Whether an operator may be part of a direct expansion."""
    facts = torch_private.schema_facts(op)
    if facts.mutates or op.namespace != "aten":
        return False
    name = op.overloadpacket.__name__
    return name in LISTED or torch.Tag.pointwise in op.tags and not facts.seeded


def _accepts_elsewhere(op: torch_private.OpOverload) -> bool:
    """Off the CPU a meta tensor does not tell how the results of attention, convolutions and pools lie in memory."""
    return accepts(op) and op.overloadpacket.__name__ not in _BY_DEVICE


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
        given,
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
    positions = {id(tensor): i for i, tensor in enumerate(given)}
    storages = {torch_private.storage_id(tensor): i for i, tensor in enumerate(given)}
    results: list[Any] = []
    aliases: list[Any] = []
    outputs: list[Any] = []
    for value in flat:
        if not isinstance(value, torch.Tensor):
            results.append(value)
            aliases.append(None)
            continue
        known = notes.ref_of(value)
        if known is None:
            return False
        results.append(meta_of(value, notes.device))
        if id(value) in positions:
            aliases.append((SELF, positions[id(value)]))
            continue
        base = storages.get(torch_private.storage_id(value))
        if base is not None and notes.written:
            return False  # a view, before or after the write
        aliases.append(None if base is None else (VIEW, base))
        outputs.append(known)
    mutated = tuple(sorted(notes.written))
    called.results, called.spec, called.aliases, called.mutated = results, spec, aliases, mutated
    called.expansion = notes.expansion((*outputs, *[notes.known[id(given[i])] for i in mutated]))
    return True


def _meta_tensor(meta: Any) -> torch.Tensor:
    with torch.inference_mode(False), torch_private.without_torch_function():
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=_META)


class _Notes:
    """Calls on tensors as steps on `Ref`s. Tensors are known by identity; `kept` holds those that calls made."""

    def __init__(self, given: list[torch.Tensor], device: torch.device) -> None:
        self.given, self.device = len(given), device
        self.inputs = given
        self.written: set[int] = set()
        self.views = False
        self.known: dict[int, Ref] = {id(tensor): ref(i) for i, tensor in enumerate(given)}
        self.steps: list[Any] = []
        self.kept: list[Any] = []

    def ref_of(self, value: torch.Tensor) -> Ref | None:
        """The number of a result: of the very object, or (factories hand out a second one) of the same memory."""
        known = self.known.get(id(value))
        last = self.kept[-1] if self.kept else None
        if known is None and isinstance(last, torch.Tensor) and meta_of(last) is meta_of(value):
            if torch_private.storage_id(last) == torch_private.storage_id(value) and not self.views:
                return self.known.get(id(last))
        return known

    def take(self, target: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> bool:
        """Note one call; False where something in it is not understood."""
        self.kept.append(result)
        twin = torch_private.functional_twin(target)
        if twin is not None:
            return self._write(twin, args, kwargs, result)
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

    def _write(self, twin: Any, args: tuple, kwargs: dict[str, Any], result: torch.Tensor) -> bool:
        """A call that gives an input a new value: its functional twin's result, if it is of the input's kind."""
        target = args[0]
        position = next(i for i, tensor in enumerate(self.inputs) if tensor is target)
        meta = meta_of(target)
        if meta_of(result) is not meta or not meta.contiguous or self.views:  # a view would have to be derived again
            return False
        source = args[1] if twin is aten.copy.default else None
        if isinstance(source, torch.Tensor) and meta_of(source) is meta:
            self.known[id(target)] = self.known[id(source)]
        elif self.take(twin, args, kwargs, result):
            self.known[id(target)] = self.known[id(result)]
        else:
            return False
        self.written.add(position)
        return True

    def _step(self, target: Any, args: tuple, kwargs: dict[str, Any], result: torch.Tensor) -> None:
        if target is not operator.getitem and torch_private.schema_facts(target).aliases is not None:
            self.views = True
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
