"""The device mesh: an array of device ids whose axes have names. A description only; it starts nothing.

In: a device type and ids as a list, nested lists, a range, a tensor or an array (or just a shape).
Out: `DeviceMesh`, immutable and hashable, with sub-meshes by name. Cheap for hundreds of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch

from dtorch.errors import MeshError, nearest
from dtorch.options import current

DEVICE_TYPES = ("cpu", "cuda")

# A spelling that is in use elsewhere and stays accepted: it finds the same axis.
_SAME_NAME = {"ulysess_cp": "ulysses_cp"}
# What other libraries call an axis (before _size, _degree or _world_size): the name that our layers look for.
_FOREIGN_STEMS = {
    "tp": "tp", "tensor_parallel": "tp", "tensor_model_parallel": "tp",
    "dp": "dp", "data_parallel": "dp", "fsdp": "dp", "ddp": "dp",
    "pp": "pp", "pipeline_parallel": "pp", "pipeline_model_parallel": "pp", "pipefusion_parallel": "pp",
    "cp": "cp", "context_parallel": "cp", "sp": "cp", "sequence_parallel": "cp",
    "ulysses": "ulysses_cp", "ulysses_cp": "ulysses_cp", "ulysess": "ulysses_cp",
    "ring": "ring_cp", "ring_cp": "ring_cp",
    "ep": "ep", "expert_parallel": "ep", "expert_model_parallel": "ep", "cfg": "cfg", "cfg_parallel": "cfg",
    "zero": "zero",
}  # fmt: skip
_FOREIGN_ENDINGS = ("_world_size", "_parallel_size", "_size", "_degree")
_MOST_IDS_PRINTED = 64


class DeviceMesh:
    """Devices in an n-dimensional array; `Shard`, `Replicate` and `Partial` are given one for each of its axes.

    Args:
        device_type: "cpu" (always there) or "cuda".
        mesh: device ids: `[0, 1]`, `[[0, 1], [2, 3]]`, `range(8)`, an integer tensor or array.
        mesh_dim_names: one name for each axis, e.g. `("dp", "tp")`; any names, each once.

    Attributes:
        device_type, shape, device_ids (flat, row-major), mesh_dim_names (tuple or None).

    Raises:
        MeshError: ids that repeat, are negative, ragged or none; names that do not fit; a device that is not there.
    """

    __slots__ = ("device_type", "device_ids", "shape", "mesh_dim_names", "_hash")

    device_type: str
    device_ids: tuple[int, ...]
    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    _hash: int

    def __init__(
        self, device_type: str | torch.device, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None
    ) -> None:
        ids, shape = _read_ids(mesh)
        names = _read_names(mesh_dim_names, shape)
        kind = _read_type(device_type)
        _check_present(kind, ids)
        self._fill(kind, ids, shape, names)

    @classmethod
    def _make(
        cls, kind: str, ids: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...] | None
    ) -> DeviceMesh:
        """A mesh of parts that are known to be good: sub-meshes, copies, and meshes of another machine."""
        mesh = cls.__new__(cls)
        mesh._fill(kind, ids, shape, names)
        return mesh

    def _fill(self, kind: str, ids: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
        fields = (kind, ids, shape, names)
        for field, value in zip(self.__slots__, (*fields, hash(fields)), strict=True):
            object.__setattr__(self, field, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a DeviceMesh cannot be changed ({name!r}); make a new one")

    def __reduce__(self) -> tuple[Callable[..., DeviceMesh], tuple[Any, ...]]:
        return DeviceMesh._make, (self.device_type, self.device_ids, self.shape, self.mesh_dim_names)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._hash == other._hash and self.__reduce__()[1] == other.__reduce__()[1]

    def __hash__(self) -> int:
        return self._hash

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def mesh(self) -> torch.Tensor:
        """The ids as an int64 CPU tensor of the mesh's shape (a new one each time)."""
        return torch.tensor(self.device_ids, dtype=torch.int64, device="cpu").reshape(self.shape)

    def size(self, dim: int | str | None = None) -> int:
        """Number of devices, or the size of one axis, given by name or index."""
        return len(self.device_ids) if dim is None else self.shape[self.axis(dim)]

    def find_axis(self, name: str) -> int | None:
        """Index of the axis called `name`, or None if the mesh has none such."""
        wanted = _SAME_NAME.get(name, name)
        for index, each in enumerate(self.mesh_dim_names or ()):
            if _SAME_NAME.get(each, each) == wanted:
                return index
        return None

    def axis(self, dim: int | str) -> int:
        """Index of an axis given by name or by (possibly negative) index; MeshError if there is none."""
        if isinstance(dim, str):
            index = self.find_axis(dim)
            if index is not None:
                return index
            if self.mesh_dim_names is None:
                raise MeshError(f"{self!r} has no names, so no axis {dim!r}: make it with mesh_dim_names=")
            raise MeshError(f"no axis {dim!r} in {self.summary}; {_suggest(dim, self.mesh_dim_names)}")
        if isinstance(dim, bool) or not isinstance(dim, int) or not -self.ndim <= dim < self.ndim:
            raise MeshError(f"no axis {dim!r} in {self.summary}, which has {self.ndim} axes: give a name or an index")
        return dim % self.ndim

    @property
    def axis_names(self) -> tuple[str, ...]:
        """A name for every axis, as groups and streams are called: its own, or "axis" with its index."""
        return self.mesh_dim_names or tuple(f"axis{index}" for index in range(self.ndim))

    def axis_label(self, index: int) -> str:
        """How messages call an axis: its name in quotes, or its index."""
        return f'"{self.mesh_dim_names[index]}"' if self.mesh_dim_names else str(index)

    def coordinate(self, position: int) -> tuple[int, ...]:
        """Mesh coordinate of the device at flat (row-major) `position`, which is an index, not a device id."""
        if not 0 <= position < len(self.device_ids):
            raise MeshError(f"position {position} is not within {self.summary} of {len(self.device_ids)} devices")
        found = []
        for count in reversed(self.shape):
            position, index = divmod(position, count)
            found.append(index)
        return tuple(reversed(found))

    def position(self, coordinate: Sequence[int]) -> int:
        """Flat position of a coordinate: the inverse of `coordinate`."""
        flat = 0
        for index, count in zip(coordinate, self.shape, strict=True):
            flat = flat * count + index
        return flat

    def coordinates(self) -> list[tuple[int, ...]]:
        """Every coordinate, in the order of `device_ids`."""
        return list(product(*map(range, self.shape)))

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh of the named axes, in the order given, at coordinate 0 of all other axes."""
        if not isinstance(names, (str, tuple)) or names == ():
            raise MeshError(f'a sub-mesh is taken by axis name, as in mesh["tp"]; got {names!r}')
        wanted = [self.axis(name) for name in ((names,) if isinstance(names, str) else names)]
        if len(set(wanted)) != len(wanted):
            raise MeshError(f"an axis is named twice in {names!r}")
        return self._slice(wanted, dict.fromkeys(range(self.ndim), 0))

    def unbind(self, dim: int | str) -> list[DeviceMesh]:
        """The sub-meshes at each coordinate of one axis, without that axis: pipeline stages are `mesh.unbind("pp")`.

        Unbinding the only axis gives meshes of shape (1,) without names.
        """
        taken = self.axis(dim)
        rest = [axis for axis in range(self.ndim) if axis != taken]
        return [self._slice(rest, {taken: index}) for index in range(self.shape[taken])]

    def _slice(self, keep: list[int], fixed: dict[int, int]) -> DeviceMesh:
        coordinate = [fixed.get(axis, 0) for axis in range(self.ndim)]
        ids = []
        for kept in product(*(range(self.shape[axis]) for axis in keep)):
            for axis, index in zip(keep, kept, strict=True):
                coordinate[axis] = index
            ids.append(self.device_ids[self.position(coordinate)])
        shape = tuple(self.shape[axis] for axis in keep) or (1,)
        names = tuple(self.mesh_dim_names[axis] for axis in keep) if self.mesh_dim_names and keep else None
        return DeviceMesh._make(self.device_type, tuple(ids), shape, names)

    @property
    def summary(self) -> str:
        """The mesh in short, as messages name it: `mesh(dp=2, tp=4)`, or `mesh(2, 4)` without names."""
        if self.mesh_dim_names is None:
            return f"mesh({', '.join(map(str, self.shape))})"
        axes = zip(self.mesh_dim_names, self.shape, strict=True)
        return f"mesh({', '.join(f'{name}={count}' for name, count in axes)})"

    def __repr__(self) -> str:
        if len(self.device_ids) > _MOST_IDS_PRINTED:
            ids = f"<{len(self.device_ids)} ids {self.device_ids[0]}..{self.device_ids[-1]}, shape {self.shape}>"
        else:
            ids = str(self.mesh.tolist())
        names = f", mesh_dim_names={self.mesh_dim_names}" if self.mesh_dim_names else ""
        return f"DeviceMesh({self.device_type!r}, {ids}{names})"


def init_device_mesh(
    device_type: str | torch.device, mesh_shape: int | Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh of the devices 0, 1, 2, ... in the given shape, as torch's function of that name.

    Example: `init_device_mesh("cpu", (2, 4), mesh_dim_names=["dp", "tp"])`. Errors are those of `DeviceMesh`.
    """
    shape: tuple[Any, ...] = tuple(mesh_shape) if isinstance(mesh_shape, Iterable) else (mesh_shape,)
    if not shape or not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in shape):
        raise MeshError(f"mesh_shape must be positive integers, such as (2, 4); got {mesh_shape!r}")
    names = _read_names(mesh_dim_names, shape)
    kind = _read_type(device_type)
    ids = tuple(range(math.prod(shape)))
    _check_present(kind, ids)
    return DeviceMesh._make(kind, ids, shape, names)


def _suggest(name: str, names: Iterable[str]) -> str:
    close = nearest(name, names)
    guess = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{guess}There are: {', '.join(map(repr, names))}"


def _read_type(device_type: str | torch.device) -> str:
    kind = str(device_type)
    if kind in DEVICE_TYPES:
        return kind
    bare = kind.partition(":")[0]
    if bare in DEVICE_TYPES:
        raise MeshError(f"device type {kind!r} names one device: write {bare!r} and put ids in the mesh")
    raise MeshError(f"unknown device type {kind!r}; {_suggest(kind, DEVICE_TYPES)}")


def _read_ids(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Flat ids and shape of nested sequences or anything with `tolist`."""
    nested = mesh.tolist() if hasattr(mesh, "tolist") else mesh
    if not isinstance(nested, (list, tuple, range)):
        raise MeshError(f"a mesh is a list of device ids, such as [0, 1] or [[0, 1], [2, 3]]; got {mesh!r}")
    level: list[Any] = [nested]
    shape: list[int] = []
    while level and isinstance(level[0], (list, tuple, range)):
        counts = {len(part) if isinstance(part, (list, tuple, range)) else None for part in level}
        if len(counts) != 1:
            raise MeshError(f"the mesh {mesh!r} is ragged: all rows of an axis must have the same length")
        shape.append(len(level[0]))
        level = [entry for part in level for entry in part]
    if not level:
        raise MeshError(f"the mesh {mesh!r} is empty: it needs at least one device id")
    for entry in level:
        if isinstance(entry, (list, tuple, range)):
            raise MeshError(f"the mesh {mesh!r} is ragged: all rows of an axis must have the same length")
        if isinstance(entry, bool) or not hasattr(entry, "__index__") or entry < 0:
            raise MeshError(f"device ids must be integers of at least 0; the mesh has {entry!r}")
    ids = tuple(int(entry) for entry in level)
    if len(set(ids)) != len(ids):
        repeated = sorted({each for each in ids if ids.count(each) > 1})
        raise MeshError(f"device ids {repeated} stand more than once in the mesh: every device has one place")
    return ids, tuple(shape)


def _read_names(names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    if names is None:
        return None
    found = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    for name in found:
        if not isinstance(name, str) or not name:
            raise MeshError(f"mesh_dim_names must be strings, such as ('dp', 'tp'); got {names!r}")
        for ending in _FOREIGN_ENDINGS:
            ours = _FOREIGN_STEMS.get(name.removesuffix(ending)) if name.endswith(ending) else None
            if ours is not None:
                raise MeshError(
                    f"axis name {name!r}: DTorch calls this axis {ours!r}, and its size is in the mesh's shape"
                )
    if len(found) != len(shape):
        raise MeshError(f"{len(found)} mesh_dim_names {found} for a mesh of shape {shape}: give one for each axis")
    same = [_SAME_NAME.get(name, name) for name in found]
    for name in same:
        if same.count(name) > 1:
            raise MeshError(f"axis name {name!r} stands more than once in mesh_dim_names {found}: give each its own")
    return found


def _check_present(kind: str, ids: tuple[int, ...]) -> None:
    if kind == "cpu":
        return
    if not torch.cuda.is_available():
        build = "torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise MeshError(
            f"there is no {kind!r} device on this machine ({build}). Use DeviceMesh('cpu', ...), which simulates any "
            "number of devices, or install a CUDA build of torch and check that nvidia-smi lists a GPU"
        )
    options = current()
    count = options.virtual_devices if options.same_device else torch.cuda.device_count()
    beyond = [each for each in ids if each >= count]
    if beyond:
        what_next = (
            "raise DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE"
            if options.same_device
            else "use ids that exist, or set DTORCH_DTENSOR_IN_SAME_DEVICE=1 to run virtual devices on one GPU"
        )
        raise MeshError(f"cuda device ids {beyond} are not there: ids go from 0 to {count - 1}. {what_next}")
