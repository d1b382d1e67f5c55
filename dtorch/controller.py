"""Between the client and the devices: takes segments in order, compiles what the cache lacks, runs, hands values on.

In: jobs (jobs.py): traces with remote values as inputs, values of other meshes. Out: remote values that fill in when
their job has run. One thread for each graph works through the queue; a client that reads while the queue is empty runs
the job itself, since a thread that waits for the interpreter lock starts milliseconds late.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from dtorch import watch
from dtorch.capture.eager import Called, Trace
from dtorch.capture.symbol import TensorMeta
from dtorch.compiler import Compiled, Settings
from dtorch.errors import PlanError
from dtorch.ir.layout import Spec
from dtorch.jobs import Job, PendingValue, Segment, Transfer, data_of
from dtorch.runtime.base import LoadedPlan, RemoteValue, Runtime
from dtorch.segment import compile_segment
from dtorch.torch_private import dispatcher_is_bypassed

EXIT_S = 10.0  # how long the end of Python waits for a segment that is being compiled or run
QUEUE_JOBS = 64  # a client that is further ahead than this waits: memory stays bounded


class Journal(Protocol):
    """Is told of every trace that is compiled, so that people can look at it."""

    def announce(self, trace: Trace) -> None:
        """A trace is compiled next."""

    def add(self, trace: Trace, compiled: Compiled) -> None:
        """A trace was compiled."""


class Controller:
    """The queue of one graph and the thread that works it off."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self.settings, self.journal = settings, journal
        self.compiled = 0
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._newest: weakref.ref[Job] | None = None

    def submit(
        self,
        trace: Trace,
        runtime: Runtime,
        axis_names: tuple[str, ...],
        metas: Sequence[tuple[TensorMeta, Spec]],
        wait: bool = False,
    ) -> list[PendingValue]:
        """Queue a trace; its values, pending. Waits only when the queue is full.

        wait: the caller reads one of them next and will run the segment itself, so the thread is left asleep.
        """
        return self._enqueue(Segment(trace, runtime, axis_names), metas, wait)

    def transfer(self, source: RemoteValue, meta: TensorMeta, runtime: Runtime, spec: Spec, where: str) -> PendingValue:
        """Queue bringing a value of another mesh or graph to `runtime`, placed as `spec`; the value there, pending.

        meta: shape, stride and dtype that it has there. where: the user's line, for errors.
        """
        return self._enqueue(Transfer(source, meta, runtime, spec, where), [(meta, spec)], False)[0]

    def _enqueue(self, job: Job, metas: Sequence[tuple[TensorMeta, Spec]], wait: bool) -> list[PendingValue]:
        job.controller = self
        values = job.promise(metas)
        with self._changed:
            while len(self._queue) >= QUEUE_JOBS:
                self._changed.wait()
            self._queue.append(job)
            self._newest = weakref.ref(job)
            if not wait:
                self._wake()
        return values

    def _wake(self) -> None:
        if self._thread is None:
            me = weakref.ref(self)
            self._thread = threading.Thread(target=_work, args=(me,), name="dtorch-controller", daemon=True)
            _THREADS[self._thread] = me
            self._thread.start()
        self._changed.notify_all()

    def help_with(self, wanted: Job) -> None:
        """Work the queue off here, up to a job, unless the thread is at it."""
        if dispatcher_is_bypassed():  # nothing can be compiled here
            with self._changed:
                self._wake()
            return
        while not wanted.done:
            if not self._busy.acquire(blocking=False):
                with self._changed:  # who is at it may stop before the job that is wanted here
                    self._wake()
                return
            try:
                job = self._take()
                if job is None:
                    return
                self._process(job)
            finally:
                self._busy.release()

    def work_once(self, timeout_s: float) -> bool:
        """One round of the thread; whether it should go on."""
        with self._changed:
            if not self._queue and not self._closed:
                self._changed.wait(timeout_s)
            if self._closed and not self._queue:
                return False
        with self._busy:
            job = self._take()
            if job is not None:
                self._process(job)
        return True

    def newest(self) -> Job | None:
        """The job that was handed on last, unless it has run and is gone."""
        return self._newest() if self._newest is not None else None

    def drain(self) -> None:
        """Wait until everything queued has run."""
        with self._changed:
            last = self._queue[-1] if self._queue else None
        if last is not None:
            last.wait()
        with self._busy:
            pass

    def close(self, drop: bool = False) -> None:
        """End the thread once the queue is empty. `drop`: empty it now; values of what it held never come."""
        with self._changed:
            self._closed = True
            while drop and self._queue:
                self._queue.popleft().finish(PlanError("the program ended before this was run"))
            self._changed.notify_all()

    def _take(self) -> Job | None:
        with self._changed:
            job = self._queue.popleft() if self._queue else None
            self._changed.notify_all()
            return job

    def _process(self, job: Job) -> None:
        if isinstance(job, Segment):
            self._run_segment(job)
        elif isinstance(job, Transfer):
            try:
                job.run()
                job.finish()
            except BaseException as error:  # reaches the read that needs the value
                error.from_devices = True  # type: ignore[attr-defined]  # its message names operation and line already
                job.finish(error)

    def _run_segment(self, segment: Segment) -> None:
        try:
            inputs = [data_of(value) for value in segment.inputs]
            plan = self._plan(segment.trace, segment)
            if watch.WATCHES:
                watch.ran(plan.plan.instructions)
            results = plan.run(inputs)
            del inputs
            for reference, data in zip(segment.outputs, results, strict=True):
                value = reference()
                if value is not None:
                    value.data = data
            segment.finish()
        except Exception as error:
            segment.finish(self._one_by_one(segment, error))
        except BaseException as error:  # every kind reaches the read that needs the value
            segment.finish(error)

    def _one_by_one(self, segment: Segment, error: Exception) -> BaseException | None:
        """After a failure: every value for itself, so that only those that need the failing operation fail."""
        error.from_devices = True  # type: ignore[attr-defined]  # its message names operation and line already
        wanted = segment.trace.wanted
        if len(wanted) == 1:
            return error
        for reference, index in zip(segment.outputs, wanted, strict=True):
            value = reference()
            if value is None:
                continue
            needed = segment.trace.needed(index)
            try:
                inputs = [data_of(each) if i in needed else None for i, each in enumerate(segment.inputs)]
                part = Trace(segment.trace.state, segment.trace.inputs, (index,))
                (value.data,) = self._plan(part, segment).run(inputs)
            except Exception as failure:
                failure.from_devices = True  # type: ignore[attr-defined]  # as above
                value.failure = failure
        return None

    def _plan(self, trace: Trace, segment: Segment) -> LoadedPlan:
        plans = trace.state.plans
        found = plans.get(trace.wanted)
        if found is None:
            try:
                compiled = segment.context.run(self._compile, trace, segment)
                self.compiled += 1
                found = plans[trace.wanted] = segment.runtime.load(compiled.plan)
            except Exception as error:
                _add_lines(error, trace)
                raise
        return found

    def _compile(self, trace: Trace, segment: Segment) -> Compiled:
        self.journal.announce(trace)
        compiled = compile_segment(trace, segment.runtime.mesh_shape, segment.axis_names, self.settings)
        self.journal.add(trace, compiled)
        return compiled


def _add_lines(error: Exception, trace: Trace) -> None:
    """Say in an error of a stage which lines recorded the values that were wanted."""
    wanted = set(trace.wanted)
    made = [state.entry for state in trace.state.path() if any(slot.index in wanted for slot in state.outputs)]
    lines = dict.fromkeys(entry.where for entry in made if isinstance(entry, Called) and entry.where)
    if lines and len(error.args) <= 1:
        shown = [*lines][-3:]
        more = f" and {len(lines) - len(shown)} other lines" if len(lines) > len(shown) else ""
        error.args = (f"{error}\n  in a segment for values of {'; '.join(shown)}{more}",)


_THREADS: weakref.WeakKeyDictionary[threading.Thread, weakref.ref[Controller]] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    """When Python ends: what is queued is dropped, since nobody reads it; no thread is inside torch by then."""
    running = [(thread, controller()) for thread, controller in _THREADS.items()]
    for _, controller in running:
        if controller is not None:
            controller.close(drop=True)
    for thread, _ in running:
        if thread is not threading.current_thread():
            thread.join(EXIT_S)


def _work(reference: weakref.ref[Controller]) -> None:
    """The thread: holds its controller only while it works, so that a graph nobody holds goes."""
    while True:
        controller = reference()
        if controller is None or not controller.work_once(0.2):
            return
        del controller
