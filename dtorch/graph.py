"""`Graph`: an independent stream of eager work, with its recorders (one a mesh), its queue and its runtimes.

In: tensors made on it and operations on them. Out: values, segments that can be looked at. A default graph serves
everybody who makes none.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from dtorch import options, torch_private, watch
from dtorch.capture.eager import EagerRecorder, Trace
from dtorch.capture.symbol import Tensor, TensorMeta, meta_of, tensor_meta
from dtorch.compiler import Settings
from dtorch.controller import Controller
from dtorch.future import READY, TensorFuture
from dtorch.ir.layout import Pending, Spec, Split, Whole
from dtorch.jobs import Arrival, PendingValue, data_of
from dtorch.mesh import DeviceMesh
from dtorch.passes.pipeline import default_passes
from dtorch.report.segments import CompiledSegment, SegmentJournal
from dtorch.runtime.base import RemoteValue, Runtime
from dtorch.runtime.session import SESSION

SEGMENTS_KEPT = 64


@contextmanager
def explicit_redistribution(enabled: bool = True) -> Iterator[None]:
    """Inside, an operation whose inputs are not placed as it needs raises ShardingError instead of moving them.

    DTORCH_EXPLICIT_REDISTRIBUTION=1 does so everywhere; `explicit_redistribution(False)` makes an exception to it.
    """
    with options.override(explicit_redistribution=enabled):
        yield


class _Home:
    """What the recorder of one mesh asks of its graph."""

    def __init__(self, graph: Graph, mesh: DeviceMesh) -> None:
        self.graph, self.mesh = graph, mesh
        self.mesh_shape = mesh.shape
        self.mesh_text = mesh.summary
        self.runtime: Runtime = SESSION.runtime(mesh.device_type, mesh.device_ids, mesh.shape)
        self._names = mesh.axis_names

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
        return options.current().explicit_redistribution

    def future(self, remote: RemoteValue) -> TensorFuture:
        """A future of a value."""
        job = remote.job if isinstance(remote, PendingValue) else None
        return TensorFuture(Arrival(job, self.runtime, lambda: remote.data), lambda: self.fetch(remote))

    def part(self, remote: RemoteValue, coordinate: tuple[int, ...]) -> torch.Tensor:
        """What one device holds of a value, copied to the host."""
        return self.runtime.part(data_of(remote), remote.spec, coordinate)

    def redistribute(self, tensor: Tensor, mesh: DeviceMesh, spec: Spec, like: _Home | None = None) -> Tensor:
        """The tensor placed as `spec` on a mesh, of the graph of `like` or of the innermost `with graph:`, if any."""
        entered = _ENTERED.get()
        graph = like.graph if like is not None else entered[-1] if entered else self.graph
        if mesh == self.mesh and graph is self.graph:
            return tensor.recorder.redistribute(tensor, spec)
        return graph.take_over(tensor, mesh, spec)

    def saved(self, tensor: Tensor) -> tuple:
        """How a tensor is pickled: its value, and its mesh and placements as plain data."""
        mesh = (self.mesh.device_type, self.mesh.device_ids, self.mesh.shape, self.mesh.mesh_dim_names)
        placed = tuple((type(each).__name__, *vars(each).values()) for each in tensor.spec)
        value = tensor.to_torch().detach().cpu()
        return restore, (value, mesh, placed, tensor.requires_grad, torch_private.is_parameter(tensor))


class Graph:
    """An independent stream of work. Tensors made under `with graph:` belong to it; graphs run beside each other."""

    def __init__(self) -> None:
        self._journal = SegmentJournal(SEGMENTS_KEPT)
        self.controller = Controller(Settings(default_passes(), title="segment"), self._journal)
        self._recorders: dict[DeviceMesh, EagerRecorder] = {}
        self._lock = threading.RLock()

    def recorder(self, mesh: DeviceMesh) -> EagerRecorder:
        """The recorder of a mesh, made when it is first needed."""
        with self._lock:
            found = self._recorders.get(mesh)
            if found is None or not SESSION.serves(found.home.runtime, mesh.device_type, mesh.device_ids):
                found = self._recorders[mesh] = EagerRecorder(_Home(self, mesh), mesh.device_type)
            return found

    def place(self, tensor: torch.Tensor, mesh: DeviceMesh, spec: Spec) -> Tensor:
        """A distributed tensor from a host tensor."""
        recorder = self.recorder(mesh)
        grad = tensor.requires_grad
        remote = recorder.home.put(tensor.detach(), spec)
        return recorder.symbol(meta_of(tensor.detach(), recorder.device), spec, remote, grad)

    def take_over(self, tensor: Tensor, mesh: DeviceMesh, spec: Spec) -> Tensor:
        """The value of a tensor of another mesh or graph, on a mesh of this one. Hands its trace on; does not wait."""
        recorder, where = self.recorder(mesh), tensor.recorder.line()
        meta = tensor_meta(tensor.meta.shape, _dense(tensor.meta), tensor.meta.dtype, recorder.device)
        source = tensor.recorder.remote_of(tensor)
        remote = self.controller.transfer(source, meta, recorder.home.runtime, spec, where)
        return recorder.symbol(meta, spec, remote, tensor.requires_grad)

    def flush(self) -> None:
        """Hand on everything recorded so far, without waiting."""
        for recorder in list(self._recorders.values()):
            recorder.flush()

    def sync(self) -> None:
        """Wait until everything recorded so far has run."""
        self.flush()
        self.controller.drain()
        for recorder in list(self._recorders.values()):
            recorder.home.runtime.drain()

    def sync_future(self) -> TensorFuture:
        """A future that is ready (its value is None) once everything recorded so far has run."""
        self.flush()
        job = self.controller.newest()
        if job is None:
            return TensorFuture(READY, lambda: None)
        return TensorFuture(Arrival(job, job.runtime, job.runtime.mark), lambda: None)

    def segments(self) -> list[CompiledSegment]:
        """The segments compiled last, oldest first; look at each as at a compiled module."""
        return self._journal.segments()

    def __enter__(self) -> Graph:
        _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _ENTERED.set(_ENTERED.get()[:-1])

    def __del__(self) -> None:
        controller = getattr(self, "controller", None)
        if controller is not None:
            controller.close()


def _dense(meta: TensorMeta) -> tuple[int, ...]:
    """The strides of a copy: of an expanded tensor every element has its own memory then."""
    if meta.contiguous:
        return meta.stride
    with torch_private.without_torch_function():
        return torch.empty_like(meta.base).stride()


_ENTERED: ContextVar[tuple[Graph, ...]] = ContextVar("dtorch_graph", default=())  # each thread's own, innermost last
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
    entered = _ENTERED.get()
    return entered[-1] if entered else default_graph()


def sync() -> None:
    """Wait until everything recorded on the current graph has run."""
    current_graph().sync()


watch.SETTLE.append(sync)


def sync_future() -> TensorFuture:
    """A future that is ready once everything recorded so far on the current graph has run."""
    return current_graph().sync_future()


_PLACED = {kind.__name__: kind for kind in (Whole, Pending, Split)}


def restore(value: torch.Tensor, mesh: tuple, placed: tuple, requires_grad: bool, parameter: bool) -> Tensor:
    """A tensor from its pickle, on the current graph."""
    spec = tuple(_PLACED[name](*fields) for name, *fields in placed)
    kind, ids, shape, names = mesh
    placed_on = DeviceMesh(kind, torch.tensor(ids).reshape(shape), mesh_dim_names=names)
    tensor = current_graph().place(value, placed_on, spec)
    if parameter:
        torch_private.mark_parameter(tensor)
    return tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([restore])  # so that torch.load reads tensors with weights_only=True


def memory_stats() -> dict[str, Any]:
    """Bytes of the values that devices hold now, over all graphs and compiled modules of the process.

    Gives `bytes` (each part counted where it is kept: simulated devices share equal parts), `values` (how many
    tensors) and `by_mesh_shape`. Walks the objects of the process: for looking, not for every step.
    """
    seen: set[Any] = set()
    values = 0
    by_mesh: dict[tuple[int, ...], int] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), RemoteValue) or each.data is None:  # isinstance would wake lazy proxies
            continue
        values += 1
        for storage, size in each.runtime.storages(each.data):
            if storage not in seen:
                seen.add(storage)
                shape = each.runtime.mesh_shape
                by_mesh[shape] = by_mesh.get(shape, 0) + size
    return {"bytes": sum(by_mesh.values()), "values": values, "by_mesh_shape": by_mesh}
