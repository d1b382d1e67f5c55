"""Embeddings whose table is cut over one mesh axis: by entries of the vocabulary, or by features.

In: torch.nn.Embedding's arguments, a mesh and an axis. Out: modules with torch.nn.Embedding's names, initial values and
results.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.capture.symbol import Tensor
from dtorch.defaults import default_dtype, target
from dtorch.ir.layout import WHOLE
from dtorch.mesh import DeviceMesh
from dtorch.nn.axis import axis_index, axis_text, on_axis
from dtorch.nn.distribute import distribute_module


class _CutEmbedding(torch.nn.Embedding):
    """An embedding on a mesh. Subclasses say which dim of the table is cut, and where the output lies on the axis."""

    weight_dim: int
    gathers: bool

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device_mesh: DeviceMesh | None = None,
        axis: str | int = "tp",
        dtype: torch.dtype | None = None,
    ) -> None:
        from dtorch.placements import Replicate, Shard

        mesh, _ = target(None, device_mesh, None)
        index = axis_index(mesh, axis)
        super().__init__(num_embeddings, embedding_dim, padding_idx, device="cpu", dtype=dtype or default_dtype())
        self.device_mesh, self.axis = mesh, index
        cut = [Shard(self.weight_dim) if each == index else Replicate() for each in range(mesh.ndim)]
        distribute_module(self, mesh, {"weight": cut})

    def forward(self, input: Any) -> Tensor:  # noqa: A002  (torch's name)
        """`input`: integers of any shape (...), distributed or plain; gives (..., embedding_dim)."""
        output = super().forward(on_axis(input, self.device_mesh, self.axis, WHOLE))
        return on_axis(output, self.device_mesh, self.axis, WHOLE) if self.gathers else output

    def extra_repr(self) -> str:
        """torch.nn.Embedding's, with the mesh and the axis."""
        return f"{super().extra_repr()}, {axis_text(self.device_mesh, self.axis)}"


class VocabParallelEmbedding(_CutEmbedding):
    """Every device holds some entries: the table is Shard(0) on the axis, and the output is summed over it.

    Args:
        num_embeddings, embedding_dim, padding_idx, dtype: as in torch.nn.Embedding, with its initial values.
        device_mesh: the mesh; that of `device_mesh_guard`, else one CPU device, when left out.
        axis: the mesh axis that cuts the table, by name or index; a mesh whose names do not include it keeps it whole.
    """

    weight_dim, gathers = 0, True


class ParallelEmbedding(_CutEmbedding):
    """Every device holds some features of all entries: the table is Shard(1) on the axis, the output Shard(-1).

    Arguments as in `VocabParallelEmbedding`.
    """

    weight_dim, gathers = 1, False
