"""One mesh axis of a layer: which it is, and bringing an input to a placement on it alone.

In: the mesh and `axis=` of a layer, tensors given to its forward. Out: the axis's index, or None on a mesh without it;
tensors placed so on that axis and as before on the others.
"""

from __future__ import annotations

from typing import Any

from dtorch.capture.symbol import Tensor
from dtorch.ir.layout import Placed, Split
from dtorch.mesh import DeviceMesh


def axis_index(mesh: DeviceMesh, axis: str | int) -> int | None:
    """The index of a layer's axis. None: the mesh has names and this is none of them, so the layer is whole there.

    The only axis of a mesh without names is found by any name.

    Raises:
        MeshError: an index beyond the mesh, or a name for a mesh of several axes without names.
    """
    if isinstance(axis, str) and mesh.mesh_dim_names is not None:
        return mesh.find_axis(axis)
    return 0 if isinstance(axis, str) and mesh.ndim == 1 else mesh.axis(axis)


def axis_text(mesh: DeviceMesh, axis: int | None) -> str:
    """Mesh and axis of a layer, as its repr shows them."""
    return f"device_mesh={mesh.summary}, axis={None if axis is None else mesh.axis_label(axis)}"


def on_axis(value: Any, mesh: DeviceMesh, axis: int | None, wanted: Placed) -> Any:
    """A distributed tensor placed as `wanted` on one axis; anything else, and captured tensors, as they are.

    A Split counts dims from the end when negative. A cut of the wanted dim in other units stays.
    """
    if axis is None or not isinstance(value, Tensor) or value.spec is None or value.device_mesh != mesh:
        return value
    recorder: Any = value.recorder  # an eager one, since the tensor is placed
    here = value.spec[axis]
    if type(wanted) is Split:
        wanted = Split(wanted.dim % len(value.meta.shape))
        if type(here) is Split and here.dim == wanted.dim:
            return value
    if here == wanted:
        return value
    spec = tuple(wanted if index == axis else placed for index, placed in enumerate(value.spec))
    return recorder.redistribute(value, spec)
