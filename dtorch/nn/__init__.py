"""Parallel layers over torch.nn, whose parameters are distributed tensors; every other name is torch.nn's own.

In: what torch.nn's layers take, and `device_mesh=`, `axis=`. Out: modules that run eagerly on the mesh's devices, with
the state_dict of their plain counterparts.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.nn import functional
from dtorch.nn.distribute import distribute_module
from dtorch.nn.embedding import ParallelEmbedding, VocabParallelEmbedding
from dtorch.nn.linear import (
    ColumnParallelLinear,
    ColumnParallelLinearWithReplicateOutput,
    RowParallelLinear,
    RowParallelLinearWithReplicateOutput,
)

__all__ = [
    "ColumnParallelLinear",
    "ColumnParallelLinearWithReplicateOutput",
    "ParallelEmbedding",
    "RowParallelLinear",
    "RowParallelLinearWithReplicateOutput",
    "VocabParallelEmbedding",
    "distribute_module",
    "functional",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(torch.nn, name):
        raise AttributeError(f"module 'dtorch.nn' has no attribute {name!r}, nor has torch.nn")
    return getattr(torch.nn, name)
