"""How the calls of a compiled module are captured: each size for itself, or once for all sizes of some dimensions.

In: a call that has no program yet. Out: its `Traced`, with plain sizes: recorded, or made from a symbolic capture
(torch.export) that is kept. `dynamic=None`: the first call of a kind is recorded; one that differs from it in sizes
alone is captured with these sizes symbolic, so that further sizes need no capture.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtorch.capture.blank import blank_module
from dtorch.capture.export import Dynamic, export_module, symbolic_dims
from dtorch.capture.host import Host
from dtorch.capture.module import capture_module
from dtorch.capture.specialize import concretize
from dtorch.capture.structure import Flat
from dtorch.capture.traced import ReadRequest, Traced
from dtorch.errors import CaptureError, InputError
from dtorch.ir.signature import Signature
from dtorch.options import current, logger

EXPORTS = 3  # a kind of call whose sizes need more symbolic captures than this is recorded size by size

Dim = tuple[int, int]  # number of a tensor argument, dimension of it
Read = Callable[[ReadRequest], torch.Tensor] | None


@dataclass
class _Kind:
    """Calls that differ in sizes alone. `varied`: the dims that did; `fixed`: why they are recorded, if they are."""

    first: tuple[torch.Size, ...]
    varied: set[Dim] = field(default_factory=set)
    symbolic: list[Traced] = field(default_factory=list)
    fixed: str = ""


class Captures:
    """Captures the calls of one module. `dynamic`: as `dtorch.compile` has it. `counts["captures"]` goes up by each."""

    def __init__(self, dynamic: bool | None, title: str, counts: dict[str, int]) -> None:
        self.dynamic, self.title, self.counts = dynamic, title, counts
        self._kinds: OrderedDict[Any, _Kind] = OrderedDict()

    def clear(self) -> None:
        """Forget what was captured: the module has changed."""
        self._kinds.clear()

    def capture(
        self, host: Host, kind_key: Any, given: Flat, args: tuple, kwargs: dict[str, Any], read: Read
    ) -> Traced:
        """The program of a call. `kind_key`: equal for calls that differ in sizes and strides alone."""
        if self.dynamic is False:
            return self._record(host, args, kwargs, read)
        shapes = tuple(leaf.shape for leaf in given.leaves)
        kind = self._kinds.get(kind_key)
        if kind is None:
            kind = self._kinds[kind_key] = _Kind(shapes)
            while len(self._kinds) > current().plan_cache_entries:
                self._kinds.popitem(last=False)
        if self.dynamic:
            return self._made(kind, given) or self._export(host, kind, given, args, kwargs, True)
        if not kind.fixed:
            found = self._made(kind, given) or self._turn_symbolic(host, kind, given, args, kwargs)
            if found is not None:
                return found
        traced = self._record(host, args, kwargs, read)
        if traced.reads:
            self._fix(kind, "the model reads values")
        elif host.left:
            self._fix(kind, f"the forward assigns {', '.join(sorted(host.left)[:4])}")
        return traced

    def give_up(self, kind_key: Any, error: Exception) -> bool:
        """Whether a call whose program could not be built is to be captured again, recorded this time."""
        kind = self._kinds.get(kind_key)
        if self.dynamic is not None or kind is None or kind.fixed or not kind.symbolic:
            return False
        self._fix(kind, f"{type(error).__name__}: {error}")
        return True

    def _record(self, host: Host, args: tuple, kwargs: dict[str, Any], read: Read) -> Traced:
        traced = capture_module(host, args, kwargs, read=read)
        self.counts["captures"] += 1
        return traced

    def _made(self, kind: _Kind, given: Flat) -> Traced | None:
        """The program for these sizes from a symbolic capture that holds for them."""
        for traced in kind.symbolic:
            try:
                return concretize(traced, given)
            except (
                InputError
            ):  # sizes of 0 and 1 are never in it; some models tie sizes to each other, or branch on them
                continue
        return None

    def _turn_symbolic(
        self, host: Host, kind: _Kind, given: Flat, args: tuple, kwargs: dict[str, Any]
    ) -> Traced | None:
        """Capture with the sizes symbolic that have varied; None where that cannot be, and each is recorded."""
        shapes = tuple(leaf.shape for leaf in given.leaves)
        if given.states or any(type(leaf) not in (torch.Tensor, torch.nn.Parameter) for leaf in given.leaves):
            self._fix(kind, "values stay on the devices")
            return None
        for leaf, (now, before) in enumerate(zip(shapes, kind.first, strict=True)):
            kind.varied |= {(leaf, dim) for dim, size in enumerate(now) if size != before[dim]}
        dims = {(leaf, dim) for leaf, dim in kind.varied if shapes[leaf][dim] >= 2}
        if not dims or dims != kind.varied:
            return None
        if len(kind.symbolic) >= EXPORTS:
            self._fix(kind, f"{EXPORTS} symbolic captures do not hold for them")
            return None
        wanted: dict[str, dict[int, Any]] = {}
        for leaf, dim in sorted(dims):
            wanted.setdefault(given.paths[leaf], {})[dim] = torch.export.Dim.AUTO
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user did not ask for torch.export
                found = self._export(host, kind, given, args, kwargs, wanted)
        except Exception as error:
            self._fix(kind, f"{type(error).__name__}: {error}")
            return None
        text = "%s: captured for any size of %s; further ones need no capture"
        logger("recompiles").info(text, self.title, ", ".join(f"{path} {sorted(of)}" for path, of in wanted.items()))
        return found

    def _export(
        self, host: Host, kind: _Kind, given: Flat, args: tuple, kwargs: dict[str, Any], dynamic: Dynamic
    ) -> Traced:
        traced = _with_own_names(export_module(blank_module(host), args, kwargs, dynamic_shapes=dynamic), host)
        if dynamic is not True:
            if traced.assigned:
                raise CaptureError(f"the forward assigns {', '.join(traced.assigned[:4])}.")
            fixed = kind.varied - symbolic_dims(traced, given)
            if fixed:
                names = ", ".join(f"dimension {dim} of {given.paths[leaf]}" for leaf, dim in sorted(fixed))
                raise InputError(f"the model's code needs a plain number for {names}.")
        made = concretize(traced, given)
        kind.symbolic.append(traced)
        self.counts["captures"] += 1
        return made

    def _fix(self, kind: _Kind, why: str) -> None:
        kind.fixed = why
        kind.symbolic = []
        reason = why.partition("\n")[0]
        logger("recompiles").info("%s: each size of these arguments is captured for itself: %s", self.title, reason)


def _with_own_names(traced: Traced, host: Host) -> Traced:
    """Weights and buffers under the names that the whole model has for them, where the host is a part of it."""
    module = host.module
    symbols: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    symbols.update(module.named_buffers(remove_duplicate=False))
    inputs = []
    for spec in traced.signature.inputs:
        origin = symbols[spec.target].origin if spec.kind in ("weight", "buffer") else None
        inputs.append(spec if origin is None else replace(spec, target=origin.target, tied=origin.tied))
    return replace(traced, signature=Signature(tuple(inputs), traced.signature.outputs))
