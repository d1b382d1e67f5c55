"""The host copy of a model: its modules with symbols in place of parameters and buffers, to be run for capture.

In: the user's model, which is not touched. Out: a `Host` that captures of any number of input shapes reuse.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.record import Origin, Recorder
from dtorch.capture.symbol import Tensor, make, meta_of, tensor_meta
from dtorch.errors import CaptureError, UnsupportedError

PLAIN = (int, float, str, bool, tuple, torch.Size, torch.dtype)


@dataclass
class Slot:
    """Where a module holds an input: under `name` in its parameters or its buffers."""

    module: torch.nn.Module
    store: dict[str, Any]
    name: str
    symbol: Tensor


@dataclass
class Host:
    """A copy of a model that holds symbols. `names`: qualified names of its modules, by id."""

    module: torch.nn.Module
    device: torch.device | None
    symbols: list[Tensor]
    slots: list[Slot] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    overlaps: dict[str, str] = field(default_factory=dict)  # a buffer → another one of the model's in its memory
    left: dict[str, tuple[torch.nn.Module, str, Any]] = field(default_factory=dict)
    """What the last captured forward assigned to attributes of modules, by path: put back afterwards."""

    def bind(self, recorder: Recorder) -> None:
        """Make the weights inputs of a new capture."""
        for symbol in self.symbols:
            recorder.adopt(symbol)

    @contextmanager
    def restored(self, recorder: Recorder) -> Iterator[None]:
        """Afterwards, attributes, parameters, buffers and hooks are what they were: a capture leaves nothing behind."""
        modules = list(self.module.modules())
        before = [(module, dict(module.__dict__)) for module in modules]
        versions = {
            id(value): torch_private.version_of(value)
            for _, attributes in before
            for value in attributes.values()
            if isinstance(value, torch.Tensor) and not isinstance(value, Tensor)
        }
        stored = [
            (store, dict(store))
            for module in modules
            for store in (*torch_private.tensor_stores(module), *torch_private.hook_stores(module))
        ]
        try:
            yield
            self.left = {}
            for module, attributes in before:
                self._refuse_hidden_state(module, attributes, versions, recorder)
                self._note_assigned(module, attributes)
        finally:
            for module, attributes in before:
                if not _is_as_before(module, attributes):
                    module.__dict__.clear()
                    module.__dict__.update(attributes)
            for store, tensors in stored:
                store.clear()
                store.update(tensors)

    def _refuse_hidden_state(
        self, module: torch.nn.Module, before: dict[str, Any], versions: dict[int, int], recorder: Recorder
    ) -> None:
        for name, value in before.items():
            if not isinstance(value, torch.Tensor) or not recorder.lifted(value):
                continue
            replaced = module.__dict__.get(name) is not value
            if replaced or torch_private.version_of(value) != versions.get(id(value)):
                path = f"{self.names.get(id(module), '')}.{name}".removeprefix(".")
                raise CaptureError(
                    f"the forward reads the plain tensor attribute {path} and "
                    f"{'replaces it' if replaced else 'writes into it'}: state that lives from call "
                    f'to call has to be a buffer. Register it: self.register_buffer("{name}", ..., persistent=False).'
                )

    def _note_assigned(self, module: torch.nn.Module, before: dict[str, Any]) -> None:
        missing = object()
        for name, value in module.__dict__.items():
            old = before.get(name, missing)
            if old is not value and not (type(old) is type(value) and type(value) in PLAIN and old == value):
                self.left[f"{self.names.get(id(module), '')}.{name}".removeprefix(".")] = (module, name, value)

    @contextmanager
    def as_left(self) -> Iterator[None]:
        """Inside, the attributes are as the last captured forward left them."""
        left = list(self.left.values())
        before = [(module, dict(module.__dict__)) for module in {id(module): module for module, _, _ in left}.values()]
        try:
            for module, name, value in left:
                module.__dict__[name] = value
            yield
        finally:
            for module, attributes in before:
                module.__dict__.clear()
                module.__dict__.update(attributes)

    def reassigned(self) -> list[tuple[Tensor, torch.Tensor]]:
        """Inputs whose place in the module now holds another tensor, with that tensor."""
        found = []
        for slot in self.slots:
            now = slot.store.get(slot.name)
            if now is not slot.symbol:
                if now is None:
                    raise CaptureError(
                        f"the forward removes {slot.symbol.origin.target}; a captured model keeps its buffers "
                        f"and parameters."
                    )
                found.append((slot.symbol, now))
        return found


def _is_as_before(module: torch.nn.Module, attributes: dict[str, Any]) -> bool:
    now = module.__dict__
    return len(now) == len(attributes) and all(now.get(key) is value for key, value in attributes.items())


def make_host(model: torch.nn.Module, device: torch.device | str | None = None) -> Host:
    """Copy a model's modules with symbols for parameters and buffers: ties stay ties, hooks stay.

    device: where the symbols say they are (a mesh's device type); None: where the model's tensors are.
    """
    device = torch.device(device) if device is not None else None
    for path, each in model.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{path or 'the model'} is a {type(each).__name__} of torch.jit: it runs outside Python and cannot be "
                f"captured. Compile the module that it was scripted from."
            )
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[torch.Tensor, str]] = {}
    for kind, found in (
        ("weight", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in found:
            names.setdefault(id(tensor), []).append(name)
            tensors.setdefault(id(tensor), (tensor, kind))
    memo: dict[int, Any] = {}
    symbols: list[Tensor] = []
    for key, (tensor, kind) in tensors.items():
        target, *tied = names[key]
        memo[key] = symbol = _weight_symbol(tensor, kind, target, tuple(tied), device)
        symbols.append(symbol)
    _share_configs(model, memo)
    host = Host(_copied(model, memo), device, symbols)
    host.overlaps = _overlaps([(names[key][0], tensor) for key, (tensor, _) in tensors.items()])
    host.names = {id(module): name for name, module in host.module.named_modules()}
    for module in host.module.modules():
        for store in torch_private.tensor_stores(module):
            host.slots += [
                Slot(module, store, name, value) for name, value in store.items() if isinstance(value, Tensor)
            ]
    return host


def _overlaps(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """For each tensor whose memory another one reaches into, the name of that one."""
    extents: dict[int, list[tuple[str, int, int]]] = {}
    for name, tensor in tensors:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and tensor.numel():
            begin, size = tensor.data_ptr(), tensor.element_size()
            reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            if begin:  # 0: no memory, on the meta device
                memory = tensor.untyped_storage().data_ptr()
                extents.setdefault(memory, []).append((name, begin, begin + (reach + 1) * size))
    return {
        name: other
        for found in extents.values()
        for name, begin, end in found
        for other, first, last in found
        if name != other and begin < last and first < end
    }


def shared_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Copy a model's modules around its own parameters and buffers, so that tracing the copy leaves the model
    alone.
    """
    memo: dict[int, Any] = {id(each): each for each in [*model.parameters(), *model.buffers()]}
    _share_configs(model, memo)
    return _copied(model, memo)


def _weight_symbol(
    tensor: torch.Tensor, kind: Any, target: str, tied: tuple[str, ...], device: torch.device | None
) -> Tensor:
    symbol = make(meta_of(tensor, device), None, requires_grad=tensor.requires_grad)
    symbol.origin = Origin(kind, target, target, tensor.requires_grad, tied)
    symbol.__dict__.update(getattr(tensor, "__dict__", {}))
    if isinstance(tensor, torch.nn.Parameter):
        torch_private.mark_parameter(symbol)
    return symbol


def _share_configs(model: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Configurations are read, not changed: the copy refers to the same ones."""
    for module in model.modules():
        for name in ("config", "generation_config"):
            config = module.__dict__.get(name)
            if config is not None:
                memo[id(config)] = config


def _copied(model: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """A deep copy, but for what `memo` maps."""
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(max(limit, 10_000))
        return copy.deepcopy(model, dict(memo))
    except Exception:  # some attribute refuses, with an error of its own kind
        return _copied_by_attribute(model, dict(memo))
    finally:
        sys.setrecursionlimit(limit)


def _copied_by_attribute(model: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """As `_copied`, sharing the attributes that cannot be copied (locks, scripted functions)."""
    modules = list(model.modules())
    for module in modules:
        memo[id(module)] = object.__new__(type(module))
    for module in modules:
        attributes = memo[id(module)].__dict__
        for name, value in module.__dict__.items():
            try:
                attributes[name] = copy.deepcopy(value, memo)
            except Exception:  # the one that refuses is shared with the user's model
                attributes[name] = value
    return memo[id(model)]


def convert_host(host: Host, dtype: torch.dtype) -> None:
    """Give every floating point symbol of a host another dtype, in place; ties stay ties."""
    made: dict[int, Tensor] = {}
    for index, symbol in enumerate(host.symbols):
        if not symbol.dtype.is_floating_point:
            continue
        meta = tensor_meta(symbol.meta.shape, symbol.meta.stride, dtype, symbol.meta.device)
        new = make(meta, None, requires_grad=symbol.requires_grad)
        new.origin = symbol.origin
        new.__dict__.update(symbol.__dict__)
        made[id(symbol)] = host.symbols[index] = new
    for slot in host.slots:
        slot.symbol = made.get(id(slot.symbol), slot.symbol)
        slot.store[slot.name] = slot.symbol
