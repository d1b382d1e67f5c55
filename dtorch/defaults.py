"""What new tensors get when the call does not say: a mesh, placements, a floating dtype. Set for a block of code.

In: `device_mesh_guard(mesh, placements)` and `dtype_guard(dtype)` blocks, each thread's own. Out: what factories ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch

from dtorch.errors import InputError, MeshError
from dtorch.mesh import DEVICE_TYPES, DeviceMesh
from dtorch.placements import normalize

_MESH: ContextVar[tuple[DeviceMesh, Any] | None] = ContextVar("dtorch_device_mesh", default=None)
_DTYPE: ContextVar[torch.dtype | None] = ContextVar("dtorch_dtype", default=None)


@contextmanager
def device_mesh_guard(
    device_mesh: DeviceMesh, placements: Iterable[Any] | Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Inside, tensors made without `device=` or `device_mesh=` are on this mesh, placed so (default: replicated)."""
    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(f"device_mesh_guard takes a dtorch.DeviceMesh, not {type(device_mesh).__name__}.")
    token = _MESH.set((device_mesh, None if placements is None else normalize(placements, device_mesh)))
    try:
        yield
    finally:
        _MESH.reset(token)


@contextmanager
def dtype_guard(dtype: torch.dtype) -> Iterator[None]:
    """Inside, dtorch's factories make floating tensors of this dtype where the call names none."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"dtype_guard takes a floating point dtype, such as torch.bfloat16; got {dtype!r}.")
    token = _DTYPE.set(dtype)
    try:
        yield
    finally:
        _DTYPE.reset(token)


def default_device_mesh() -> DeviceMesh:
    """The mesh of the innermost `device_mesh_guard`, else the one CPU device."""
    guarded = _MESH.get()
    return guarded[0] if guarded else one_device("cpu")


def default_dtype() -> torch.dtype | None:
    """The dtype of the innermost `dtype_guard`, or None."""
    return _DTYPE.get()


def target(device: Any, device_mesh: DeviceMesh | None, placements: Any) -> tuple[DeviceMesh, Any]:
    """The mesh and placements that a call's `device=`, `device_mesh=` and `placements=` ask for.

    Raises:
        InputError: both a device and a mesh. MeshError: something that is no mesh, or a device that is not there.
    """
    if device is not None and device_mesh is not None:
        raise InputError(
            f"device={device!r} and device_mesh={device_mesh!r} exclude each other: a mesh names its devices already. "
            "Leave one out."
        )
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh):
            raise MeshError(
                f"device_mesh={device_mesh!r} is not a dtorch.DeviceMesh: dtorch.init_device_mesh('cpu', (2,)) makes "
                "one."
            )
        return device_mesh, placements
    if device is not None:
        return one_device(str(torch.device(device))), placements
    guarded = _MESH.get()
    if guarded is None:
        return one_device("cpu"), placements
    return guarded[0], guarded[1] if placements is None else placements


@lru_cache(maxsize=64)
def one_device(device: str) -> DeviceMesh:
    """The mesh of one device: "cuda:1", or "cpu" for its first."""
    kind, _, index = device.partition(":")
    if kind not in DEVICE_TYPES:
        raise MeshError(f"device {device!r} is not one that dtorch runs on: {', '.join(DEVICE_TYPES)}.")
    return DeviceMesh(kind, [int(index or 0)])
