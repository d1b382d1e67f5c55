"""What waits in a graph's queue: segments to compile and run, and values to bring from one mesh to another.

In: traces, or remote values of other meshes and graphs. Out: `PendingValue`s, which fill in when their job has run, or
say why they never will. Who runs the jobs, and when, is the controller's affair.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from typing import Any, Protocol

import torch

from dtorch.capture.eager import Trace
from dtorch.capture.symbol import TensorMeta
from dtorch.ir.layout import Spec
from dtorch.runtime.base import RemoteValue, Runtime


class Helper(Protocol):
    """Who may run jobs on the thread of whoever waits for one: the controller."""

    def help_with(self, wanted: Job) -> None:
        """Run what is queued up to a job, unless somebody is at it."""


class Job:
    """One piece of queued work. `done` once its values are there, or `error` says why they never will be."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.outputs: list[weakref.ref[PendingValue]] = []
        self.error: BaseException | None = None
        self._event = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.controller: Helper | None = None

    def promise(self, metas: Sequence[tuple[TensorMeta, Spec]]) -> list[PendingValue]:
        """The values that the job will fill in."""
        values = [PendingValue(self, tuple(meta.shape), meta.dtype, spec) for meta, spec in metas]
        self.outputs = [weakref.ref(value) for value in values]
        return values

    @property
    def done(self) -> bool:
        """Whether the job has run or failed."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the job; runs it here when it is next and nobody else is at it."""
        if self._event.is_set():
            return True
        if timeout_s is None and self.controller is not None:
            self.controller.help_with(self)
        return self._event.wait(timeout_s)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once done, at once if it is."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def finish(self, error: BaseException | None = None) -> None:
        """Note the outcome and wake who waits."""
        with self._lock:
            self.error = error
            self._forget()
            callbacks, self._callbacks = self._callbacks, []
            self._event.set()
        for callback in callbacks:
            callback()

    def _forget(self) -> None:
        """Let go of what only running the job needed."""


class Segment(Job):
    """One trace that was handed on."""

    def __init__(self, trace: Trace, runtime: Runtime, axis_names: tuple[str, ...]) -> None:
        super().__init__(runtime)
        self.trace, self.axis_names = trace, axis_names
        self.context = copy_context()  # the options in force where it was recorded hold where it is compiled
        self.inputs: list[Any] = trace.inputs

    def _forget(self) -> None:
        self.inputs = []
        self.context = Context()  # the old one may hold what the user is done with


class Transfer(Job):
    """A value on its way from the devices of one mesh to those of another, perhaps of another graph.

    It runs in the queue of the graph it goes to and waits there for its source, which was queued before it: every job
    waits for older ones only, so graphs that give values to each other never wait in a circle.
    """

    def __init__(self, source: RemoteValue, meta: TensorMeta, runtime: Runtime, spec: Spec, where: str) -> None:
        super().__init__(runtime)
        self.source: RemoteValue | None = source
        self.meta, self.spec, self.where = meta, spec, where

    def run(self) -> None:
        """Gather the source and cut it for the target; nothing is done for a value that nobody holds any more."""
        (reference,) = self.outputs
        source, value = self.source, reference()
        if value is None or source is None:
            return
        data = data_of(source)
        try:
            whole = source.runtime.gather(data, source.shape, source.dtype, source.spec)
            if whole.stride() != self.meta.stride:
                shape, stride = self.meta.shape, self.meta.stride
                whole = torch.empty_strided(shape, stride, dtype=whole.dtype, device=whole.device).copy_(whole)
            value.data = self.runtime.place(whole, self.spec)
        except Exception as error:
            if len(error.args) <= 1:
                error.args = (f"{error}\n  in redistribute to another mesh or graph, from {self.where}",)
            raise

    def _forget(self) -> None:
        self.source = None


class PendingValue(RemoteValue):
    """A remote value that its job fills in."""

    __slots__ = ("job", "failure")

    def __init__(self, job: Job, shape: tuple[int, ...], dtype: Any, spec: Spec) -> None:
        super().__init__(job.runtime, shape, dtype, spec, None)
        self.job: Job | None = job
        self.failure: BaseException | None = None

    def ready(self) -> Any:
        """The data, waited for; raises what computing it raised."""
        job = self.job
        if job is not None:
            job.wait()
            if job.error is not None:
                raise job.error
            self.job = None
        if self.failure is not None:
            raise self.failure
        return self.data


def data_of(value: RemoteValue) -> Any:
    """The data of a remote value, waited for if it is pending."""
    return value.ready() if isinstance(value, PendingValue) else value.data


class Arrival:
    """What a future waits for: the job that makes the values, then the devices on which they are made."""

    def __init__(self, job: Job | None, runtime: Runtime, data: Callable[[], Any]) -> None:
        """`data` gives what the devices are waited for by; it is asked once the job has run."""
        self._job, self._runtime, self._data = job, runtime, data

    @property
    def done(self) -> bool:
        """Whether the values are there, or never will be."""
        if self._job is not None and not self._job.done:
            return False
        data = self._data()
        return data is None or self._runtime.is_done(data)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for them."""
        began = time.monotonic()
        if self._job is not None and not self._job.wait(timeout_s):
            return False
        data = self._data()
        left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
        return data is None or self._runtime.wait(data, left)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once they are there."""

        def on_devices() -> None:
            data = self._data()
            if data is None:
                callback()
            else:
                self._runtime.when_done(data, callback)

        if self._job is None:
            on_devices()
        else:
            self._job.when_done(on_devices)
