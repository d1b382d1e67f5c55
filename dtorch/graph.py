"""`Graph`: an independent stream of eager work, with its recorders (one a mesh), its queue and its runtimes.

In: tensors made on it and operations on them. Out: values, segments that can be looked at. A default graph serves
everybody who makes none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from dtorch.capture.eager import EagerRecorder, Trace
from dtorch.capture.symbol import Tensor, TensorMeta, meta_of
from dtorch.compiled import axis_names
from dtorch.compiler import Settings
from dtorch.controller import Controller, PendingValue
from dtorch.future import TensorFuture
from dtorch.ir.layout import Spec
from dtorch.mesh import DeviceMesh
from dtorch.passes.pipeline import default_passes
from dtorch.runtime.base import RemoteValue, Runtime
from dtorch.runtime.simulate import SimulatedRuntime

SEGMENTS_KEPT = 64
_EXPLICIT: ContextVar[bool] = ContextVar("dtorch_explicit_redistribution", default=False)


@contextmanager
def explicit_redistribution(enabled: bool = True) -> Iterator[None]:
    """Inside, an operation whose inputs are not placed as it needs raises ShardingError instead of moving them."""
    token = _EXPLICIT.set(enabled)
    try:
        yield
    finally:
        _EXPLICIT.reset(token)


class _Home:
    """What the recorder of one mesh asks of its graph."""

    def __init__(self, graph: Graph, mesh: DeviceMesh) -> None:
        self.graph, self.mesh = graph, mesh
        self.mesh_shape = mesh.shape
        self.mesh_text = mesh.summary
        self.runtime: Runtime = SimulatedRuntime(mesh.shape, torch.device(mesh.device_type))
        self._names = axis_names(mesh)

    def put(self, tensor: torch.Tensor, spec: Spec) -> RemoteValue:
        """Place a host tensor (copied)."""
        return self.runtime.put(tensor, spec, copy=True)

    def submit(self, trace: Trace, metas: Sequence[tuple[TensorMeta, Spec]], wait: bool) -> list[PendingValue]:
        """Hand a trace to the controller."""
        return self.graph.controller.submit(trace, self.runtime, self._names, metas, wait)

    def fetch(self, remote: RemoteValue) -> torch.Tensor:
        """The value on the host."""
        if isinstance(remote, PendingValue):
            remote.ready()
        return remote.fetch()

    def explicit(self) -> bool:
        """Whether `explicit_redistribution` is on."""
        return _EXPLICIT.get()


class Graph:
    """An independent stream of work. Tensors made under `with graph:` belong to it; graphs run beside each other."""

    def __init__(self) -> None:
        self.controller = Controller(Settings(default_passes(), title="segment"), SEGMENTS_KEPT)
        self._recorders: dict[DeviceMesh, EagerRecorder] = {}
        self._lock = threading.RLock()
        self._tokens: list[Any] = []

    def recorder(self, mesh: DeviceMesh) -> EagerRecorder:
        """The recorder of a mesh, made when it is first needed."""
        with self._lock:
            found = self._recorders.get(mesh)
            if found is None:
                found = self._recorders[mesh] = EagerRecorder(_Home(self, mesh), mesh.device_type)
                found.mesh = mesh
            return found

    def place(self, tensor: torch.Tensor, mesh: DeviceMesh, spec: Spec) -> Tensor:
        """A distributed tensor from a host tensor."""
        recorder = self.recorder(mesh)
        grad = tensor.requires_grad
        remote = recorder.home.put(tensor.detach(), spec)
        return recorder.symbol(meta_of(tensor.detach(), recorder.device), spec, remote, grad)

    def flush(self) -> None:
        """Hand on everything recorded so far, without waiting."""
        for recorder in list(self._recorders.values()):
            recorder.flush()

    def sync(self) -> None:
        """Wait until everything recorded so far has run."""
        self.flush()
        self.controller.drain()

    def segments(self) -> list[Any]:
        """The segments compiled last, oldest first: `.snapshots`, `.records`, `.plan` of each."""
        return [compiled for compiled, _ in self.controller.segments]

    def __enter__(self) -> Graph:
        self._tokens.append(_CURRENT.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._tokens.pop())

    def __del__(self) -> None:
        controller = getattr(self, "controller", None)
        if controller is not None:
            controller.close()


_CURRENT: ContextVar[Graph | None] = ContextVar("dtorch_graph", default=None)
_DEFAULT: list[Graph] = []
_DEFAULT_LOCK = threading.Lock()


def default_graph() -> Graph:
    """The graph that work goes to outside any `with graph:`."""
    with _DEFAULT_LOCK:
        if not _DEFAULT:
            _DEFAULT.append(Graph())
        return _DEFAULT[0]


def current_graph() -> Graph:
    """The graph of the innermost `with graph:`, or the default one."""
    return _CURRENT.get() or default_graph()


def sync() -> None:
    """Wait until everything recorded on the current graph has run."""
    current_graph().sync()


def future_of(tensor: Tensor) -> TensorFuture:
    """A future of a tensor's value; hands the pending work on and does not wait."""
    recorder = tensor.recorder
    remote = recorder.remote_of(tensor)
    pending = remote.segment if isinstance(remote, PendingValue) and remote.segment is not None else _Ready()
    return TensorFuture(pending, lambda: recorder.home.fetch(remote))


class _Ready:
    """What a future waits for when the value is there already."""

    done = True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def when_done(self, callback: Any) -> None:
        callback()
