"""Linear layers whose weight is cut over one mesh axis: by its outputs (column) or by its inputs (row).

In: torch.nn.Linear's arguments, a mesh and an axis. Out: modules with torch.nn.Linear's names, initial values and
results; a column layer followed by a row layer needs one all-reduce (Megatron-LM, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dtorch.capture.symbol import Tensor
from dtorch.defaults import default_dtype, target
from dtorch.ir.layout import WHOLE, Placed, Split
from dtorch.mesh import DeviceMesh
from dtorch.nn.axis import axis_index, axis_text, on_axis
from dtorch.nn.distribute import distribute_module


class _ParallelLinear(torch.nn.Linear):
    """A linear layer on a mesh. Subclasses say how the weight is cut, and where inputs and outputs lie on the axis."""

    weight_dim: int
    bias_is_cut: bool
    takes: Placed
    gives: Placed | None = None  # as it comes

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device_mesh: DeviceMesh | None = None,
        axis: str | int = "tp",
        dtype: torch.dtype | None = None,
    ) -> None:
        mesh, _ = target(None, device_mesh, None)
        index = axis_index(mesh, axis)
        super().__init__(in_features, out_features, bias, device="cpu", dtype=dtype or default_dtype())
        self.device_mesh, self.axis = mesh, index
        distribute_module(self, mesh, self._placements())

    def _placements(self) -> dict[str, list[Any]]:
        from dtorch.placements import Replicate, Shard

        def cut(dim: int) -> list[Any]:
            return [Shard(dim) if each == self.axis else Replicate() for each in range(self.device_mesh.ndim)]

        found = {"weight": cut(self.weight_dim)}
        if self.bias is not None and self.bias_is_cut:
            found["bias"] = cut(0)
        return found

    def forward(self, input: Any) -> Tensor:  # noqa: A002  (torch's name)
        """`input` (..., in_features), distributed or plain; gives (..., out_features)."""
        output = F.linear(on_axis(input, self.device_mesh, self.axis, self.takes), self.weight, self.bias)
        return output if self.gives is None else on_axis(output, self.device_mesh, self.axis, self.gives)

    def extra_repr(self) -> str:
        """torch.nn.Linear's, with the mesh and the axis."""
        return f"{super().extra_repr()}, {axis_text(self.device_mesh, self.axis)}"


class ColumnParallelLinear(_ParallelLinear):
    """Every device computes some of the outputs: weight and bias are Shard(0) on the axis.

    An input that is cut on the axis is gathered; the output is Shard(-1) there, as `RowParallelLinear` takes it.

    Args:
        in_features, out_features, bias, dtype: as in torch.nn.Linear; the values are initialised as there, so that a
            seed gives the same ones on every mesh.
        device_mesh: the mesh; that of `device_mesh_guard`, else one CPU device, when left out.
        axis: the mesh axis that cuts the weight, by name or index. A mesh whose names do not include it keeps the
            weight whole, so that one model fits every mesh.
    """

    weight_dim, bias_is_cut, takes = 0, True, WHOLE


class ColumnParallelLinearWithReplicateOutput(ColumnParallelLinear):
    """`ColumnParallelLinear` whose output is gathered on the axis."""

    gives = WHOLE


class RowParallelLinear(_ParallelLinear):
    """Every device takes some of the input features: the weight is Shard(1) on the axis, the bias Replicate.

    The input is cut to Shard(-1) on the axis. The output is Partial there: it is summed where it is next needed whole.
    Arguments as in `ColumnParallelLinear`.
    """

    weight_dim, bias_is_cut, takes = 1, False, Split(-1)


class RowParallelLinearWithReplicateOutput(RowParallelLinear):
    """`RowParallelLinear` whose output is summed over the axis."""

    gives = WHOLE
