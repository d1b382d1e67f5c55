"""Which runtime a mesh gets, and the life of the process's workers: init, shutdown.

In: the option `workers` or what `init` was told, and a mesh's devices. Out: a `Runtime` for each mesh. Simulated
devices need nothing; real workers are started when the first mesh needs them and end with the process.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from typing import Any

import torch

from dtorch.errors import DeviceError, MeshError, UnsupportedError
from dtorch.options import current
from dtorch.runtime.base import Runtime
from dtorch.runtime.cluster import Cluster
from dtorch.runtime.launch import Launcher
from dtorch.runtime.remote import ClusterRuntime
from dtorch.runtime.simulate import SimulatedRuntime

PROCESSES_A_CORE = 16  # more CPU workers than this are a slip: each is a Python process with torch


class Session:
    """The workers of this process, by device type."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clusters: dict[str, Cluster] = {}
        self._runtimes: weakref.WeakValueDictionary[tuple, ClusterRuntime] = weakref.WeakValueDictionary()
        self.workers: str | None = None  # what init asked for, before the option

    def kind(self, device_type: str, device_ids: tuple[int, ...]) -> str:
        """What devices a mesh has: "process" for real workers, or "simulated"."""
        options = current()
        wanted = self.workers or options.workers
        if wanted != "auto":
            return wanted
        several_gpus = device_type == "cuda" and len(device_ids) > 1 and not options.same_device
        return "process" if several_gpus else "simulated"

    def runtime(self, device_type: str, device_ids: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Runtime:
        """The runtime of a mesh; one for all meshes of the same devices and shape."""
        if self.kind(device_type, device_ids) == "simulated":
            return SimulatedRuntime(mesh_shape, torch.device(device_type))
        if sys.platform != "linux":
            raise UnsupportedError(
                f"workers run on Linux, and this is {sys.platform}: use simulated devices, dtorch.init(workers="
                '"simulated"), or unset DTORCH_PER_DEVICE_PER_PROCESS.'
            )
        most = PROCESSES_A_CORE * (os.cpu_count() or 1)
        here = self.cluster(device_type).joining is None
        if here and device_type == "cpu" and len(device_ids) > most:
            raise MeshError(
                f"a mesh of {len(device_ids)} CPU devices would start as many processes on this machine, which has "
                f'{os.cpu_count()} cores (at most {most}). Use dtorch.init(workers="simulated") for it.'
            )
        with self._lock:
            cluster = self.cluster(device_type)
            key = (id(cluster), device_ids, mesh_shape)
            found = self._runtimes.get(key)
            if found is None:
                found = self._runtimes[key] = ClusterRuntime(cluster, mesh_shape, device_ids)
            return found

    def serves(self, runtime: Runtime, device_type: str, device_ids: tuple[int, ...]) -> bool:
        """Whether a runtime that was handed out is still the one for its mesh: not shut down, not of another kind."""
        if isinstance(runtime, ClusterRuntime):
            return not runtime.cluster.closed and self.kind(device_type, device_ids) == "process"
        return self.kind(device_type, device_ids) == "simulated"

    def cluster(self, device_type: str) -> Cluster:
        """The cluster of a device type, made when it is first needed."""
        with self._lock:
            found = self._clusters.get(device_type)
            if found is None or found.closed:
                found = self._clusters[device_type] = Cluster(device_type)
            return found

    def open_cluster(self, device_type: str, launcher: Launcher) -> Cluster:
        """A cluster with a launcher of its own. Raises DeviceError where there is one of that type already."""
        with self._lock:
            found = self._clusters.get(device_type)
            if found is not None and not found.closed:
                raise DeviceError(f"there are {device_type} workers already; dtorch.shutdown() ends them")
            made = self._clusters[device_type] = Cluster(device_type, launcher)
            return made

    def clusters(self) -> list[Cluster]:
        """All that are running."""
        with self._lock:
            return [cluster for cluster in self._clusters.values() if not cluster.closed]

    def shutdown(self) -> None:
        """End all workers."""
        with self._lock:
            clusters, self._clusters = list(self._clusters.values()), {}
            self._runtimes.clear()
            self.workers = None
        for cluster in clusters:
            cluster.close()


    def status(self) -> list[dict[str, Any]]:
        """What is known of each worker: see `dtorch.status`."""
        found = []
        for cluster in self.clusters():
            found.extend(cluster.status())
        return found


SESSION = Session()
atexit.register(SESSION.shutdown)
