"""The workers of this process, for users: start them, look at them, mend them, end them.

In: how devices are to be run. Out: nothing to hold; meshes made afterwards use the workers. Without a call to `init`
the option `workers` decides, and workers start when the first mesh needs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dtorch.errors import DeviceError, OptionError, nearest
from dtorch.options import WORKERS
from dtorch.runtime.curve import SECRET_VARIABLE
from dtorch.runtime.joining import WAIT_S, JoinLauncher
from dtorch.runtime.profiler import Timeline
from dtorch.runtime.profiler import begin as begin_profile
from dtorch.runtime.profiler import end as end_profile
from dtorch.runtime.recovery import recover as recover_cluster
from dtorch.runtime.session import SESSION


def init(
    workers: str = "process",
    devices: int | Iterable[int] | None = None,
    device_type: str = "cpu",
    *,
    cluster: str = "local",
    address: str | None = None,
    secret: str | None = None,
    wait_s: float = WAIT_S,
) -> None:
    """Choose how the devices of meshes are run, and start workers now instead of at the first use.

    Args:
        workers: "process" (a worker process for each device), "simulated" (all devices in this process), or "auto"
            (processes for meshes of several GPUs, else simulated).
        devices: ids, or how many, of workers to start now; None starts each when a mesh first needs it.
        device_type: "cpu" or "cuda", of these devices.
        cluster: "local" (workers are started here) or "external" (`dtorch worker` on this or other hosts joins).
        address: for "external": "tcp://HOST:PORT" to bind; PORT + 1 and PORT + 2 are used too. 0: what is free.
        secret: what hosts must know to join, at least 16 characters; None takes DTORCH_SECRET. Needed unless HOST is
            this machine's loopback.
        wait_s: for "external": how long to wait for hosts with all the devices.

    Raises:
        OptionError: an unknown way, or an address without a secret. DeviceError: a worker does not come up (the
            message has its last lines), or devices have not joined in time (it has the command to type).
    """
    if workers not in WORKERS:
        hint = f" Did you mean {', '.join(nearest(workers, WORKERS))}?" if nearest(workers, WORKERS) else ""
        raise OptionError(f"workers={workers!r} is not known; there is: {', '.join(WORKERS)}.{hint}")
    if device_type not in ("cpu", "cuda"):
        raise OptionError(f"device_type={device_type!r} is not known; there is: cpu, cuda.")
    if cluster not in ("local", "external"):
        raise OptionError(f"cluster={cluster!r} is not known; there is: local, external.")
    if cluster == "external":
        _init_external(workers, _ids(devices), device_type, address, secret, wait_s)
        return
    if address is not None:
        raise OptionError('address= is for cluster="external": local workers are reached without one.')
    SESSION.workers = workers
    if devices is None or workers == "simulated":
        return
    SESSION.cluster(device_type).start(_ids(devices))


def _ids(devices: int | Iterable[int] | None) -> list[int]:
    if devices is None:
        raise OptionError('cluster="external" needs devices=: how many, or their ids, so that it knows whom to await.')
    ids = list(range(devices)) if isinstance(devices, int) else list(devices)
    if not ids or not all(isinstance(each, int) and each >= 0 for each in ids) or len(set(ids)) < len(ids):
        raise OptionError(f"devices={devices!r}: give how many, or ids that are different and not negative.")
    return ids


def _init_external(
    workers: str, ids: list[int], device_type: str, address: str | None, secret: str | None, wait_s: float
) -> None:
    if workers != "process":
        raise OptionError(f'cluster="external" is for workers="process", not {workers!r}.')
    if address is None:
        raise OptionError('cluster="external" needs address="tcp://HOST:PORT" to bind, such as "tcp://0.0.0.0:7077".')
    launcher = JoinLauncher(address, ids, secret or os.environ.get(SECRET_VARIABLE), device_type, wait_s)
    SESSION.open_cluster(device_type, launcher)
    try:
        SESSION.cluster(device_type).start(ids)
    except BaseException:
        SESSION.shutdown()
        raise
    SESSION.workers = workers


def shutdown() -> None:
    """End all workers and forget what `init` chose. Values on workers are gone; reading one raises DeviceError."""
    SESSION.shutdown()


def recover() -> dict[str, int]:
    """Mend the workers after one was lost, and go on.

    Lost workers are restarted. Values come back from a device that holds the same part, or from the files that weights
    were read from; the others raise ValueLostError when they are read. Steps that were sent and had not ended are run
    again, so futures and tensors of theirs can be read.

    Returns:
        Counts: `workers` restarted, values `rebuilt` and `lost`, `steps` sent again. All zero if nothing was wrong.
    """
    counts = {"workers": 0, "rebuilt": 0, "lost": 0, "steps": 0}
    clusters = SESSION.clusters()
    if not clusters:
        raise DeviceError("there are no workers to recover: dtorch.init() or a mesh starts them.")
    for cluster in clusters:
        for name, count in recover_cluster(cluster).items():
            counts[name] += count
    return counts


def status() -> list[dict[str, Any]]:
    """What each worker does now; empty where devices are simulated. `dtorch status` prints it from another shell.

    Each entry has worker, host, device, pid, state ("starting", "idle", "busy", "dead"), doing (kernel, plan and line,
    if it has been at it for a while), queue (commands it was sent and has not told to be done), values (kept),
    memory_bytes (of the process; on CUDA allocated on the GPU) and heard_s (seconds since its last sign of life).
    """
    return SESSION.status()


@contextmanager
def profile() -> Iterator[Timeline]:
    """Measure what workers do within the block: `with dtorch.profile() as timeline: ...`.

    The timeline is filled when the block ends: `events` (device, plan, kernel, stream, line, begin_us, end_us; all on
    one clock), `totals()`, `save(path)` for Perfetto. Kernels run one at a time while they are measured (on CUDA each
    is waited for, in an NVTX range with its name), so what overlaps without profiling does not overlap here.

    Raises:
        DeviceError: there are no workers, or one was lost.
    """
    clusters = SESSION.clusters()
    if not clusters:
        raise DeviceError("there are no workers to measure: dtorch.init() or a mesh starts them.")
    timeline = Timeline()
    for cluster in clusters:
        begin_profile(cluster)
    try:
        yield timeline
    finally:
        for cluster in clusters:
            end_profile(cluster, timeline)
