"""Placements: for each mesh axis, how a tensor lies on it. The classes are torch's own, so they mean the same there.

In: what a user writes, `[Shard(0), Replicate()]` or `{"tp": Shard(0)}`. Out: `normalize`'s tuple, one a mesh axis.
Shard, Replicate and Partial load when first named: torch.distributed.tensor costs half a second to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dtorch.errors import PlacementError, nearest
from dtorch.mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import Partial as Partial
    from torch.distributed.tensor import Replicate as Replicate
    from torch.distributed.tensor import Shard as Shard

_CLASSES = ("Shard", "Replicate", "Partial")
REDUCTIONS = ("sum", "avg", "max", "min")


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch.distributed.tensor as tensor

    globals().update({each: getattr(tensor, each) for each in _CLASSES})
    return globals()[name]


class Placements(tuple):
    """Placements of a tensor: a tuple that also equals the list of the same items, and prints like one."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, tuple(other)) if isinstance(other, (tuple, list)) else NotImplemented

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return repr(list(self))


def normalize(
    placements: Iterable[Any] | Mapping[str, Any] | None, mesh: DeviceMesh, ndim: int | None = None
) -> tuple[Any, ...]:
    """One placement for each axis of `mesh`, in mesh order.

    Args:
        placements: a list or tuple, one an axis; a dict by axis name, whose missing axes are Replicate; or None,
            all Replicate.
        mesh: the mesh that the placements are for.
        ndim: the tensor's number of dimensions; if given, negative Shard dims are resolved and all are checked.

    Raises:
        PlacementError: too many or too few, an axis that the mesh has not, Shard beyond the tensor's dimensions,
            or something that is no placement.
    """
    from torch.distributed.tensor import Replicate

    if placements is None:
        found = [Replicate()] * mesh.ndim
    elif isinstance(placements, Mapping):
        found = [Replicate()] * mesh.ndim
        for name, placement in placements.items():
            found[_axis(name, mesh)] = placement
    elif isinstance(placements, Iterable) and not isinstance(placements, str):
        found = list(placements)
    else:
        raise PlacementError(
            f"placements must be a list with one of Shard, Replicate or Partial for each of the {mesh.ndim} axes of "
            f"{mesh.summary}, or a dict by axis name; got {placements!r}"
        )
    if len(found) != mesh.ndim:
        raise PlacementError(
            f"{len(found)} placements {found} for {mesh.summary}, which has {mesh.ndim} "
            f"{'axis' if mesh.ndim == 1 else 'axes'}: give one for each, in mesh order, Replicate() where it is whole"
        )
    return tuple(_checked(placement, index, mesh, ndim) for index, placement in enumerate(found))


def _axis(name: object, mesh: DeviceMesh) -> int:
    if mesh.mesh_dim_names is None:
        raise PlacementError(
            f"placements by axis name ({name!r}) need a mesh with names: make it with mesh_dim_names=, "
            f"or give a list of {mesh.ndim} placements"
        )
    index = mesh.find_axis(name) if isinstance(name, str) else None
    if index is None:
        close = nearest(str(name), mesh.mesh_dim_names)
        raise PlacementError(
            f"no axis {name!r} in {mesh.summary}; "
            + (f"did you mean {' or '.join(map(repr, close))}? " if close else "")
            + f"Its axes are: {', '.join(map(repr, mesh.mesh_dim_names))}"
        )
    return index


def _checked(placement: Any, index: int, mesh: DeviceMesh, ndim: int | None) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    where = f"axis {mesh.axis_label(index)} of {mesh.summary}"
    if type(placement) is Partial and placement.reduce_op not in REDUCTIONS:
        raise PlacementError(
            f"{placement!r} on {where}: partial values are reduced by {', '.join(REDUCTIONS)}, not by "
            f"{placement.reduce_op!r}. Use one of them, or Replicate()."
        )
    if type(placement) in (Replicate, Partial):
        return placement
    if type(placement) is not Shard:
        hint = " (write Shard(0) for a dimension)" if isinstance(placement, int) else ""
        hint = " (write it with parentheses)" if isinstance(placement, type) else hint
        raise PlacementError(
            f"{placement!r} on {where} is not a placement: use Shard(dim), Replicate() or Partial(){hint}"
        )
    dim = placement.dim
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise PlacementError(f"{placement!r} on {where}: the dimension must be an integer")
    if ndim is None:
        return placement
    if not -ndim <= dim < ndim:
        legal = f"Legal: Shard(0) to Shard({ndim - 1}), or Replicate()" if ndim else "A scalar can only be Replicate()"
        raise PlacementError(f"Shard({dim}) on {where} is beyond the tensor's {ndim} dimensions. {legal}")
    return placement if dim >= 0 else Shard(dim + ndim)
