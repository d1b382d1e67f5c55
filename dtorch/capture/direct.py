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
from dtorch.capture.undo import BASE, NEW, run_on_meta, undone

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
        if id(value) in notes.positions:
            aliases.append((SELF, notes.positions[id(value)]))
            continue
        base = notes.storages.get(torch_private.storage_id(value))
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
        self.positions = {id(tensor): i for i, tensor in enumerate(given)}
        self.storages = {torch_private.storage_id(tensor): i for i, tensor in enumerate(given)}
        self.written: set[int] = set()
        self.viewed: set[int] = set()  # inputs of which there are views
        self.over = False  # after a write through a view nothing else is understood
        self.sources: dict[int, tuple[Any, tuple]] = {}  # how a view was made
        self.numbers: dict[int, Any] = {}  # of tensors all elements of which are one Python number
        self.known: dict[int, Ref] = {id(tensor): ref(i) for i, tensor in enumerate(given)}
        self.steps: list[Any] = []
        self.kept: list[Any] = []

    def ref_of(self, value: torch.Tensor) -> Ref | None:
        """The number of a result: of the very object, or (factories hand out a second one) of the same memory."""
        known = self.known.get(id(value))
        last = self.kept[-1] if self.kept else None
        if known is None and isinstance(last, torch.Tensor) and meta_of(last) is meta_of(value):
            if torch_private.storage_id(last) == torch_private.storage_id(value) and not self.viewed:
                return self.known.get(id(last))
        return known

    def take(self, target: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> bool:
        """Note one call; False where something in it is not understood."""
        self.kept.append(result)
        if self.over:
            return False
        twin = torch_private.functional_twin(target)
        if twin is not None:
            rest = {name: item for name, item in kwargs.items() if name != "out"}
            return self._write(kwargs.get("out", args[0]), twin, args, rest, result)
        if target in DROPPED or is_inactive_dropout(target, args):
            self.known[id(result)] = self.known[id(args[0])]
            return True
        if torch_private.draws_random_numbers(target) and draws(target, args, kwargs):
            return False
        self._note_view(target, args, kwargs, result)
        try:
            args, kwargs = self._template(args), self._template(kwargs)
        except KeyError:
            return False
        if target is aten.scalar_tensor.default:
            if self.device.type != "cpu":
                return False
            with torch_private.without_function_modes():
                number = self.numbers[id(result)] = torch.tensor(args[0], dtype=result.dtype).item()
            target, args = aten.full.default, ([], number)
            kwargs = {"dtype": result.dtype, "device": self.device, "pin_memory": False}
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

    def _write(
        self, target: torch.Tensor, twin: Any, args: tuple, kwargs: dict[str, Any], result: torch.Tensor
    ) -> bool:
        """A call that gives an input a new value: its functional twin's result, if it is of the input's kind."""
        position = self.positions.get(id(target))
        if twin is aten.copy.default and self._is_spread(args[1]):
            return False  # kernels of a CPU fill by such a tensor
        if position is None:
            return self._write_through(target, twin, args, kwargs, result)
        meta = meta_of(target)
        if meta_of(result) is not meta or not meta.contiguous or position in self.viewed:
            return False  # a view would have to be derived again
        source = args[1] if twin is aten.copy.default else None
        new = result
        if isinstance(source, torch.Tensor) and id(source) in self.numbers and source.dim():
            new = self._fill(target, source)
        elif isinstance(source, torch.Tensor) and meta_of(source) is meta:
            new = source
        elif not self.take(twin, args, kwargs, result):
            return False
        self.known[id(target)] = self.known[id(new)]
        self.written.add(position)
        return True

    def _write_through(
        self, view: torch.Tensor, twin: Any, args: tuple, kwargs: dict[str, Any], result: torch.Tensor
    ) -> bool:
        """A call that writes a view of an input: the input gets the value that has the twin's result there."""
        if result.dtype is not view.dtype or result.shape != view.shape:
            return False
        new, source = result, args[1] if twin is aten.copy.default else None
        chain: list[tuple[torch.Tensor, Any, tuple]] = []
        at = view
        while id(at) in self.sources:
            chain.append((at, *self.sources[id(at)]))
            at = chain[-1][2][0]
        if isinstance(source, torch.Tensor) and meta_of(result) is meta_of(source):
            if source.dim() == 0 or id(source) not in self.numbers:
                new = source
        if new is not source:
            if isinstance(source, torch.Tensor) and id(source) in self.numbers:
                new = self._fill(view, source)
            elif not self.take(twin, args, kwargs, result):
                return False
            for made, target, given in reversed(chain):  # the trace derives the views anew
                self._step(target, self._template(given), {}, made)
        for _, target, (base, *rest) in chain:
            found = undone(target, tuple(rest), base)
            if found is None:
                return False
            target, places = found
            given = tuple([base if item is BASE else new if item is NEW else item for item in places])
            made = run_on_meta(target, *given)
            if made is None:
                return False
            self._step(target, self._template(given), {}, made)
            self.kept.append(made)
            new = made
        position = self.positions.get(id(at))
        if position is None or not meta_of(at).contiguous or meta_of(at) is not meta_of(new):
            return False
        self.known[id(at)] = self.known[id(new)]
        self.written.add(position)
        self.over = True
        return True

    def _is_spread(self, source: Any) -> bool:
        """Whether a tensor is an expanded one of no dims; that of a Python number is known otherwise."""
        while id(source) in self.sources and id(source) not in self.numbers:
            source = self.sources[id(source)][1][0]
            if source.dim() == 0:
                return id(source) not in self.numbers
        return False

    def _fill(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        number = self.numbers[id(source)]
        made = run_on_meta(aten.fill.Scalar, target, number)
        assert made is not None  # the fill of a tensor like that has just been noted
        self._step(aten.fill.Scalar, (self.known[id(target)], number), {}, made)
        self.kept.append(made)
        return made

    def _step(self, target: Any, args: tuple, kwargs: dict[str, Any], result: torch.Tensor) -> None:
        self.known[id(result)] = ref(self.given + len(self.steps))
        self.steps.append((target, args, kwargs, self._val(result)))

    def _note_view(self, target: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """What is known of a result that shares memory with an argument."""
        if torch_private.schema_facts(target).aliases is None:
            return
        source = args[0]
        if id(source) in self.numbers and isinstance(result, torch.Tensor):
            self.numbers[id(result)] = self.numbers[id(source)]
        viewed = self.storages.get(torch_private.storage_id(source))
        if viewed is not None:
            self.viewed.add(viewed)
        if isinstance(result, torch.Tensor) and not kwargs:
            self.sources[id(result)] = (target, args)

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
