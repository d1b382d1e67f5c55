"""What a distributed tensor offers beside torch's own methods: where it lies, moving it, reading it.

In: eager symbols, whose recorder knows the mesh and the graph (`recorder.home`). Out: placements, new symbols, values
on the host. On symbols of a captured module, which have no devices, these raise and say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtorch.errors import CaptureError, PlacementError, UnsupportedError
from dtorch.ir.spec import from_spec, tensor_text, to_spec
from dtorch.mesh import DeviceMesh
from dtorch.placements import Placements, normalize

if TYPE_CHECKING:
    from dtorch.capture.symbol import Tensor

MODES = ("raise_error", "replicate", "keep")


class Placed:
    """The methods of `dtorch.Tensor` that torch.Tensor has not."""

    __slots__ = ()

    # --- where it lies --------------------------------------------------------------------------------------------

    @property
    def device_mesh(self: Any) -> DeviceMesh:
        """The mesh whose devices hold the tensor."""
        return _home(self, "device_mesh", AttributeError).mesh

    @property
    def placements(self: Any) -> Placements:
        """One placement for each mesh axis, in mesh order: a tuple that also equals the list of the same items."""
        _home(self, "placements", AttributeError)
        return Placements(from_spec(self.spec))

    def check_placement(self: Any, placements: Iterable[Any] | Mapping[str, Any]) -> None:
        """Raise PlacementError unless the tensor is placed as `placements`."""
        mesh = _home(self, "check_placement()").mesh
        wanted = normalize(placements, mesh, self.dim())
        if self.placements != wanted:
            raise PlacementError(
                f"{self.recorder.line()}: {self.summary} is placed as {self.placements!r}, and {list(wanted)} was "
                f"asked for. x.redistribute(placements={list(wanted)}) brings it there."
            )

    @property
    def summary(self: Any) -> str:
        """The tensor in one line, without its values: `f32[4,3][S(0)] on mesh(tp=4)`."""
        text = tensor_text(self.meta.dtype, self.meta.shape, self.spec)
        return text if self.spec is None else f"{text} on {self.recorder.home.mesh_text}"

    # --- moving ---------------------------------------------------------------------------------------------------

    def redistribute(
        self: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Iterable[Any] | Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The same values placed otherwise, on the same or on another mesh.

        The result belongs to the graph of the innermost `with graph:`, else to the tensor's own. Nothing waits: between
        meshes and graphs the value is brought over in the background.

        Args:
            device_mesh: the mesh to go to; the tensor's own when left out.
            placements: a list with one placement an axis, or a dict by axis name. Left out: the present ones if the
                mesh has as many axes, else replicated.

        Raises:
            PlacementError: placements that do not fit the mesh or the tensor.
        """
        home = _home(self, "redistribute()")
        mesh = home.mesh if device_mesh is None else device_mesh
        if placements is None and mesh.ndim == home.mesh.ndim:
            placements = self.placements
            if mesh == home.mesh:
                return home.redistribute(self, mesh, self.spec)
        wanted = normalize(placements, mesh, self.dim())
        return home.redistribute(self, mesh, to_spec(wanted))

    def redistribute_like(self: Any, other: Tensor) -> Tensor:
        """The same values on the mesh, in the graph and with the placements of another tensor."""
        home = _home(self, "redistribute_like()")
        like = _home(other, "redistribute_like()")
        target = like.mesh
        spec = other.spec if other.dim() == self.dim() and other.shape == self.shape else None
        wanted = normalize(other.placements, target, self.dim())
        return home.redistribute(self, target, to_spec(wanted) if spec is None else spec, like)

    def redistribute_by_dict(
        self: Any,
        placements: Mapping[str, Any],
        default_placement_mode: str = "raise_error",
        device_mesh: DeviceMesh | None = None,
    ) -> Tensor:
        """The same values placed by the names of mesh axes; names that the target mesh has not are ignored.

        Args:
            placements: `{"tp": Shard(0)}`.
            default_placement_mode: for axes of the target mesh that are not named: "raise_error", "replicate", or
                "keep" (as the tensor is on its own axis of that name, replicated where it has none).
            device_mesh: the mesh to go to; the tensor's own when left out.

        Raises:
            PlacementError: an axis without a placement, under "raise_error"; a mesh without names; a misfit.
        """
        from dtorch.placements import Replicate

        home = _home(self, "redistribute_by_dict()")
        mesh = home.mesh if device_mesh is None else device_mesh
        if default_placement_mode not in MODES:
            raise PlacementError(
                f"default_placement_mode={default_placement_mode!r} is not known; there are: {', '.join(MODES)}."
            )
        if mesh.mesh_dim_names is None:
            raise PlacementError(
                f"{self.recorder.line()}: redistribute_by_dict needs a mesh with names, and {mesh!r} has none. Make it "
                "with mesh_dim_names=, or use x.redistribute(placements=[...])."
            )
        given = {mesh.find_axis(name): placed for name, placed in placements.items()}
        wanted: list[Any] = []
        for axis, name in enumerate(mesh.mesh_dim_names):
            own = home.mesh.find_axis(name)
            if axis in given:
                wanted.append(given[axis])
            elif default_placement_mode == "raise_error":
                named = ", ".join(map(repr, placements)) or "no axis"
                raise PlacementError(
                    f"{self.recorder.line()}: redistribute_by_dict names {named}, and {mesh.summary} also has "
                    f"{name!r}. Name it, or give default_placement_mode='replicate' or 'keep'."
                )
            elif default_placement_mode == "keep" and own is not None:
                wanted.append(self.placements[own])
            else:
                wanted.append(Replicate())
        return self.redistribute(mesh, wanted)

    # --- reading --------------------------------------------------------------------------------------------------

    def to_torch(self: Any) -> torch.Tensor:
        """The whole value as a plain torch tensor of its own; waits for it."""
        _home(self, "to_torch()")
        value = self.recorder.host_value(self)
        return value.requires_grad_() if self.requires_grad else value

    full_tensor = to_torch

    def to_torch_async(self: Any) -> Any:
        """A `TensorFuture` of the whole value; hands the work on and does not wait."""
        home = _home(self, "to_torch_async()")
        return home.future(self.recorder.remote_of(self))

    def to_local(self: Any, coordinate: Sequence[int] | int | None = None) -> torch.Tensor:
        """What the device at a mesh coordinate holds (default: the first), as a plain tensor; for debugging."""
        home = _home(self, "to_local()")
        mesh = home.mesh
        if coordinate is None:
            coordinate = (0,) * mesh.ndim
        place = (coordinate,) if isinstance(coordinate, int) else tuple(coordinate)
        if len(place) != mesh.ndim or not all(0 <= at < size for at, size in zip(place, mesh.shape)):
            raise PlacementError(f"coordinate {place} is not in {mesh.summary}, of shape {mesh.shape}.")
        return home.part(self.recorder.remote_of(self), place)


def _home(tensor: Any, what: str, kind: type[Exception] = CaptureError) -> Any:
    home = getattr(tensor.recorder, "home", None) if tensor.spec is not None else None
    if home is None:
        raise kind(
            f"{what} on {tensor_text(tensor.meta.dtype, tensor.meta.shape, None)}: while a module is captured its "
            "tensors lie on no devices. Ask for placements with dtorch.compile(..., placements=, inputs=)."
        )
    return home


def no_gradients(what: str) -> UnsupportedError:
    """The error of everything that needs gradients."""
    return UnsupportedError(
        f"{what}: dtorch runs forwards only; gradients are not there yet (requires_grad is stored, nothing is recorded "
        "for it). Train with plain torch tensors: x.to_torch() gives one."
    )
