"""The import path that programs written for DTorch use for meshes and placements.

In: nothing. Out: DeviceMesh, init_device_mesh, Shard, Replicate and Partial, the very ones of `dtorch`.
"""

from __future__ import annotations

from dtorch.mesh import DeviceMesh, init_device_mesh
from dtorch.placements import Partial, Replicate, Shard

__all__ = ["DeviceMesh", "Partial", "Replicate", "Shard", "init_device_mesh"]
