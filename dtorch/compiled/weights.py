"""The tensors a compiled module owns: where each weight and buffer is, on the host or placed on the devices.

In: a snapshot of a model's tensors, a state dict, or safetensors files. Out: data placed as a plan wants it, full
tensors on request. A weight is placed once, when the first plan that uses it is loaded; after that its host copy is
gone. Tied names share one entry.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtorch.compiled.weight_files import StoredTensor
from dtorch.errors import WeightsError, nearest
from dtorch.ir.layout import Spec
from dtorch.runtime.base import RemoteValue, Runtime
from dtorch.torch_private import tensor_stores, transient_buffers


@dataclass
class Entry:
    """One tensor, whatever its names: `host` (a tensor or a slot in a file) until it is placed, then `remote`."""

    names: tuple[str, ...]
    kind: str  # "weight" or "buffer"
    persistent: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    host: torch.Tensor | StoredTensor | None
    remote: RemoteValue | None = None


class WeightStore:
    """All tensors of one compiled module. `version` counts changes, so that callers can keep what they looked up."""

    def __init__(self, runtime: Runtime, entries: list[Entry], order: tuple[str, ...]) -> None:
        self.runtime = runtime
        self.entries = entries
        self.order = order  # the model's own state_dict keys
        self.by_name = {name: entry for entry in entries for name in entry.names}
        self.version = 0
        self.lock = threading.RLock()  # held while tensors are placed or changed

    # --- for plans ------------------------------------------------------------------------------------------------

    def spec(self, name: str) -> Spec | None:
        """How a tensor is placed; None while it is not."""
        remote = self.by_name[name].remote
        return None if remote is None else remote.spec

    def data(self, name: str, spec: Spec) -> Any:
        """A tensor's data placed as `spec`; places it if it is not on the devices yet."""
        entry = self.by_name[name]
        with self.lock:
            if entry.remote is None:
                entry.remote = self._place(entry, spec)
                entry.host = None
            elif entry.remote.spec != spec:
                entry.remote = self.runtime.put(_with_grad(entry.remote.fetch(), entry), spec, copy=False)
                self.version += 1
            return entry.remote.data

    def set_data(self, name: str, data: Any) -> None:
        """Take the new data that a plan computed for a buffer; same shape, dtype and placement as before."""
        entry = self.by_name[name]
        assert entry.remote is not None, "a plan gave a new value to a buffer that was never placed"
        entry.remote.data = data
        self.version += 1

    def _place(self, entry: Entry, spec: Spec) -> RemoteValue:
        host = entry.host
        if isinstance(host, StoredTensor):
            parts = host.place(self.runtime, spec, entry.dtype, entry.requires_grad)
            return RemoteValue(self.runtime, entry.shape, entry.dtype, spec, parts, entry.requires_grad)
        assert host is not None
        return self.runtime.put(_with_grad(host, entry), spec, copy=False)

    # --- for users ------------------------------------------------------------------------------------------------

    def full(self, name: str) -> torch.Tensor:
        """A tensor's logical value, as a host tensor of its own."""
        entry = self.by_name[name]
        if entry.remote is not None:
            return entry.remote.fetch()
        assert entry.host is not None
        if isinstance(entry.host, StoredTensor):
            return entry.host.read().to(entry.dtype)
        return entry.host.detach().clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Full tensors under the model's own keys, in its order; tied keys share one tensor."""
        made: dict[int, torch.Tensor] = {}
        result = {}
        for name in self.order:
            entry = self.by_name[name]
            if id(entry) not in made:
                made[id(entry)] = self.full(name)
            result[name] = made[id(entry)]
        return result

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Replace one tensor. Raises WeightsError for an unknown name or another shape; the dtype is kept."""
        self._check({name: tensor}, complete=False, known=True)
        with self.lock:
            self._write(name, tensor)

    def load(self, tensors: Mapping[str, torch.Tensor], strict: bool = True) -> tuple[list[str], list[str]]:
        """Replace all tensors; gives (missing, unexpected) keys. Nothing is changed when something does not fit."""
        missing, unexpected = self._check(tensors, complete=strict, known=strict)
        with self.lock:
            for name, tensor in tensors.items():
                if name in self.by_name:
                    self._write(name, tensor)
        return missing, unexpected

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        entry = self.by_name[name]
        value = _with_grad(tensor.detach().to("cpu" if entry.remote is None else tensor.device).to(entry.dtype), entry)
        if entry.remote is None:
            entry.host = _with_grad(value.detach().clone(), entry)
        else:
            entry.remote = self.runtime.put(value, entry.remote.spec, copy=True)
        self.version += 1

    def _check(
        self, tensors: Mapping[str, torch.Tensor], *, complete: bool, known: bool
    ) -> tuple[list[str], list[str]]:
        """(missing, unexpected) keys. `complete`: none may be missing; `known`: none may be unexpected."""
        unexpected = [name for name in tensors if name not in self.by_name]
        given = {id(self.by_name[name]) for name in tensors if name in self.by_name}
        missing = [name for name in self.order if id(self.by_name[name]) not in given]
        misshapen = [
            f"{name}: {tuple(tensor.shape)} instead of {self.by_name[name].shape}"
            for name, tensor in tensors.items()
            if name in self.by_name and tuple(tensor.shape) != self.by_name[name].shape
        ]
        problems = []
        if complete and missing:
            problems.append(f"missing: {', '.join(missing)}")
        if unexpected and known:
            problems.append("unexpected: " + ", ".join(_with_nearest(name, self.by_name) for name in unexpected))
        if misshapen:
            problems.append(f"of another shape: {'; '.join(misshapen)}")
        if problems:
            raise WeightsError("These tensors do not fit the model.\n  " + "\n  ".join(problems))
        return missing, unexpected

    def convert(self, dtype: torch.dtype) -> None:
        """Change the dtype of all floating point tensors."""
        for entry in self.entries:
            if not entry.dtype.is_floating_point:
                continue
            entry.dtype = dtype
            if entry.remote is not None:
                value = _with_grad(entry.remote.fetch().to(dtype), entry)
                entry.remote = self.runtime.put(value, entry.remote.spec, copy=False)
            elif isinstance(entry.host, torch.Tensor):
                entry.host = _with_grad(entry.host.detach().to(dtype), entry)
        self.version += 1


def _with_grad(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor with the flag that `linear` and `matmul` look at when they choose a kernel."""
    tensor = tensor.detach()
    return tensor.requires_grad_() if entry.requires_grad else tensor


def _with_nearest(name: str, names: Mapping[str, Any]) -> str:
    close = nearest(name, list(names), 2)
    return f"{name} (nearest: {', '.join(close)})" if close else name


def snapshot(model: torch.nn.Module, release: bool) -> tuple[list[Entry], tuple[str, ...]]:
    """Entries for all tensors of a model, copied, or taken over with `release`. Tensors on "meta" have no value yet."""
    entries: dict[int, Entry] = {}
    non_persistent = set()
    for prefix, module in model.named_modules():
        for name in transient_buffers(module):
            non_persistent.add(f"{prefix}.{name}" if prefix else name)
    found = [("weight", item) for item in model.named_parameters(remove_duplicate=False)]
    found += [("buffer", item) for item in model.named_buffers(remove_duplicate=False)]
    for kind, (name, tensor) in found:
        entry = entries.get(id(tensor))
        if entry is not None:
            entry.names = (*entry.names, name)
            entry.persistent = entry.persistent or name not in non_persistent
            continue
        host = None
        if tensor.device.type != "meta":
            host = tensor.detach() if release else tensor.detach().clone(memory_format=torch.preserve_format)
        entries[id(tensor)] = Entry(
            (name,), kind, name not in non_persistent, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, host
        )
    return list(entries.values()), tuple(model.state_dict(keep_vars=True))


def release_memory(model: torch.nn.Module) -> None:
    """Replace a model's tensors by ones on the meta device, ties kept: the compiled module owns the values now."""
    empty: dict[int, Any] = {}
    for module in model.modules():
        for store in tensor_stores(module):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in empty:
                    meta = torch.empty_like(tensor, device="meta")
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    empty[id(tensor)] = (
                        torch.nn.Parameter(meta, requires_grad=tensor.requires_grad) if is_parameter else meta
                    )
                store[name] = empty[id(tensor)]
