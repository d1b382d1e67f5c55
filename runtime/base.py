"""What every runtime offers: keep values on a mesh's devices, load plans, run them, fetch results.

The simulated runtime (`simulate.py`) and, on real devices, the cluster of workers implement the same interface;
nothing above it knows which one it talks to. A runtime decides nothing: order, streams and buffers are the plan's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.errors import UnsupportedError
from dtorch.ir.layout import Spec
from dtorch.ir.plan import Plan
from dtorch.torch_private import storage_id


class RemoteValue:
    """A tensor that lives on the devices of one mesh: metadata here, bytes there. Freed with its last reference."""

    __slots__ = ("shape", "dtype", "spec", "data", "runtime", "requires_grad", "__weakref__")

    def __init__(
        self,
        runtime: Runtime,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        spec: Spec,
        data: Any,
        requires_grad: bool = False,
    ) -> None:
        self.runtime, self.shape, self.dtype, self.spec, self.data = runtime, shape, dtype, spec, data
        self.requires_grad = requires_grad

    def fetch(self) -> torch.Tensor:
        """The logical value as one host tensor (a copy)."""
        return self.runtime.fetch(self)

    def __repr__(self) -> str:
        return f"RemoteValue({self.shape}, {str(self.dtype).removeprefix('torch.')}, {list(self.spec)})"


class LoadedPlan(ABC):
    """A plan that the devices know; `run` takes data in input order and gives data in output order."""

    plan: Plan

    @abstractmethod
    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run once. `inputs[i]` is data placed as the plan's input i says: of a RemoteValue, or what `place` gave."""


class Runtime(ABC):
    """The devices of one mesh."""

    mesh_shape: tuple[int, ...]

    @abstractmethod
    def load(self, plan: Plan) -> LoadedPlan:
        """Make a plan known to the devices; once for each plan."""

    @abstractmethod
    def place(self, tensor: torch.Tensor, spec: Spec, copy: bool = True) -> Any:
        """Data for a RemoteValue: the parts of a full host tensor. Without `copy` it may share the tensor's bytes."""

    @abstractmethod
    def place_parts(self, spec: Spec, read: Callable[[tuple[int, ...]], torch.Tensor]) -> Any:
        """Data for a RemoteValue whose part at a coordinate is what `read` gives; asked once for each distinct part."""

    @abstractmethod
    def gather(self, data: Any, shape: tuple[int, ...], dtype: torch.dtype, spec: Spec) -> torch.Tensor:
        """One host tensor from data placed as `spec`; shares bytes only where the data is one whole tensor."""

    def lend(self, tensor: torch.Tensor, spec: Spec) -> Any:
        """Data for one run alone: what may travel with it, or share the tensor's bytes."""
        return self.place(tensor, spec, False)

    def is_done(self, data: Any) -> bool:
        """Whether data that `run` gave is there (or never will be); where runs are waited for, always."""
        return True

    def wait(self, data: Any, timeout_s: float | None = None) -> bool:
        """Wait until data is there or never will be; False if that takes longer than `timeout_s`."""
        return True

    def when_done(self, data: Any, callback: Callable[[], None]) -> None:
        """Call back when data is there or never will be."""
        callback()

    def storages(self, data: Any) -> list[tuple[Any, int]]:
        """Each piece of memory that data is in: something that tells it from others, and its bytes."""
        parts = data if isinstance(data, (list, tuple)) else (data,)
        return [(storage_id(part), part.untyped_storage().nbytes()) for part in parts]

    def mark(self) -> Any:
        """Data to wait for that is there once everything sent so far has run; None where nothing is to wait for."""
        return None

    def drain(self) -> None:  # noqa: B027  (where runs are waited for, there is nothing to do)
        """Wait until everything sent so far has run; raises what made the devices fail."""

    def part(self, data: Any, spec: Spec, coordinate: tuple[int, ...]) -> torch.Tensor:
        """What the device at a mesh coordinate holds, copied to the host; for debugging."""
        raise UnsupportedError(f"{type(self).__name__} cannot show the parts of single devices yet.")

    @abstractmethod
    def close(self) -> None:
        """Free everything."""

    def put(self, tensor: torch.Tensor, spec: Spec, copy: bool = True) -> RemoteValue:
        """Place a host tensor and hold it as a RemoteValue."""
        data = self.place(tensor, spec, copy)
        return RemoteValue(self, tuple(tensor.shape), tensor.dtype, spec, data, tensor.requires_grad)

    def fetch(self, value: RemoteValue) -> torch.Tensor:
        """The logical value of a RemoteValue as a host tensor of its own."""
        result = self.gather(value.data, value.shape, value.dtype, value.spec)
        shares = isinstance(value.data, torch.Tensor) and result.data_ptr() == value.data.data_ptr()
        return result.clone(memory_format=torch.preserve_format) if shares else result
