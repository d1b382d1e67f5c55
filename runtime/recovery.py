"""Mending a cluster after workers were lost: new workers, their values again, and the steps that had not ended.

In: a cluster with a failure. Out: the same cluster at work. A value comes back from a worker that holds the same part,
else from where it was first read (weights in files); what cannot be rebuilt raises ValueLostError when it is read.
Steps that were sent and had not ended everywhere are sent again in their order.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from dtorch.errors import DeviceError, ValueLostError
from dtorch.ir.layout import local_shape
from dtorch.options import logger
from dtorch.runtime.cluster import Cluster
from dtorch.runtime.parts import Coordinate, coordinates, varying_axes
from dtorch.runtime.protocol import Kind
from dtorch.runtime.remote import ClusterRuntime, Handle, Lent, Step

SETTLE_S = 5.0  # how long survivors may take to give up what they wait for


def recover(cluster: Cluster) -> dict[str, int]:
    """Restart lost workers. Gives counts: workers restarted, values rebuilt, values lost, steps sent again."""
    if cluster.closed:
        raise DeviceError("the workers were shut down: dtorch.init() starts new ones")
    if cluster.failure is None:
        return {"workers": 0, "rebuilt": 0, "lost": 0, "steps": 0}
    _settle(cluster)
    dead = [device for device, record in cluster.workers.items() if record.state == "dead"]
    cluster.replace(dead)
    steps, sent, whole = cluster.begin_again(), 0, False
    try:
        rebuilt, lost = _rebuild_all(cluster, dead, steps)
        while not whole:
            sent += _send_all_again(cluster, steps)
            whole = cluster.mended(steps)
    finally:
        if not whole:
            cluster.failure = cluster.failure or DeviceError("the recovery failed: dtorch.shutdown() ends the workers")
            cluster.mended(steps)
    counts = {"workers": len(dead), "rebuilt": rebuilt, "lost": lost, "steps": sent}
    logger("workers").warning("recovered: %s", ", ".join(f"{count} {name}" for name, count in counts.items()))
    return counts


def _send_all_again(cluster: Cluster, steps: list[Step]) -> int:
    """Send what had not ended, then what other threads asked for meanwhile; how many were sent."""
    sent = 0
    with cluster.board.sending:
        steps += [step for step in cluster.steps if not step.sent]
        for step in steps:
            if step in cluster.steps:
                cluster.steps.remove(step)
    while steps:
        sent += _send_again(cluster, steps[0])
        steps.pop(0)
    return sent


def _rebuild_all(cluster: Cluster, dead: list[int], steps: list[Step]) -> tuple[int, int]:
    """Values of new workers that no step will make again: how many are back, and how many are lost."""
    remade = {id(output) for step in steps for reference in step.outputs if (output := reference()) is not None}
    rebuilt = lost = 0
    for runtime in list(cluster.lines):
        missing = [device for device in runtime.device_ids if device in dead]
        for handle in list(runtime.handles.values()) if missing else ():
            if id(handle) in remade or handle.id in cluster.failed:
                continue
            if all([_rebuild(cluster, runtime, handle, device, dead) for device in missing]):
                rebuilt += 1
            else:
                lost += 1
                cluster.failed[handle.id] = ValueLostError(
                    f"a value of shape {handle.shape} had parts on device {', '.join(map(str, missing))}, whose worker "
                    "was lost; no other device holds the same part and it was not read from a file. Compute it again."
                )
    return rebuilt, lost


def _settle(cluster: Cluster) -> None:
    """Wait until the survivors have done all they were sent; one that hangs is lost too."""
    deadline = time.monotonic() + SETTLE_S
    marks: dict[int, int] = {}
    for device, record in list(cluster.workers.items()):
        if record.state == "up":
            try:
                marks[device] = cluster.send((device,), Kind.FREE)
            except DeviceError:  # it is lost as well
                continue
    while time.monotonic() < deadline:
        marks = {device: number for device, number in marks.items() if cluster.workers[device].state == "up"}
        if all(cluster.lanes.passed((device,), number) for device, number in marks.items()):
            return
        time.sleep(0.01)
    for device, number in marks.items():
        record = cluster.workers[device]
        if record.state == "up" and not cluster.lanes.passed((device,), number):
            cluster.fail(DeviceError(f"the worker of device {device} hangs after a loss: it was ended"), [record])


def _rebuild(cluster: Cluster, runtime: ClusterRuntime, handle: Handle, device: int, dead: list[int]) -> bool:
    """Give a new worker its part of a value."""
    axes = varying_axes(handle.spec, runtime.mesh_shape)
    position = runtime.device_ids.index(device)
    everywhere = coordinates(range(len(runtime.mesh_shape)), runtime.mesh_shape)
    own: Coordinate = tuple(at if axis in axes else 0 for axis, at in enumerate(everywhere[position]))
    others = [other for other in runtime.holders(own, axes) if other not in dead]
    if others:
        shape = local_shape(handle.shape, handle.spec, runtime.mesh_shape, own)
        (part,) = cluster.ferry.get([(others[0], handle.id, handle.dtype, shape)])
    elif handle.rebuild is not None:
        part = handle.rebuild(own)
    else:
        return False
    cluster.ferry.put(handle.id, {(device,): part})
    return True


def _send_again(cluster: Cluster, step: Step) -> bool:
    """Run a step once more, into the same handles, if all it needs is there."""
    outputs: list[Any] = [reference() for reference in step.outputs]
    inputs = [item for item in step.inputs if not isinstance(item, (Lent, torch.Tensor))]
    error: BaseException | None = next((cluster.failed[i.id] for i in inputs if i.id in cluster.failed), None)
    if error is None and any(item.inplace for item in step.plan.plan.outputs):
        error = ValueLostError(
            "a step that writes into its arguments (a cache) was under way when a worker was lost: what it wrote "
            "cannot be told from what was there. Start again from values that are there."
        )
    for output in outputs:
        if output is not None:
            cluster.failed.pop(output.id, None)
            if error is not None:
                cluster.failed[output.id] = error
    if error is not None:
        return False
    if all(output is None for output in outputs):
        return False  # nobody is left to read it
    step.plan.send_again(step, outputs)
    return True
