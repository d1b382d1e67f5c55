"""torch.nn.functional for distributed tensors: attention that knows context parallel axes; the rest is torch's own.

In: distributed (or plain) tensors. Out: distributed ones, as from torch.nn.functional.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dtorch.capture.symbol import Tensor
from dtorch.ir.layout import Split
from dtorch.nn.axis import on_axis


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """As torch's: query (..., heads, length, head_dim), key and value alike.

    On a mesh axis called ulysses_cp over which the query's length is cut, heads and length change places around the
    attention (DeepSpeed-Ulysses, arXiv:2309.14509): two all-to-alls instead of gathered keys. The output is placed
    as the query. On other axes keys and values are gathered when lengths are cut; heads and batch stay cut.
    """
    where = _ulysses_axis(query)
    if where is not None and query.shape[-3] == key.shape[-3]:
        mesh = query.device_mesh
        query, key, value = (on_axis(each, mesh, where, Split(-3)) for each in (query, key, value))
        if isinstance(attn_mask, Tensor) and attn_mask.dim() >= 3 and attn_mask.shape[-3] != 1:
            attn_mask = on_axis(attn_mask, mesh, where, Split(-3))
    options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    output = F.scaled_dot_product_attention(query, key, value, **options, enable_gqa=enable_gqa)
    return output if where is None else on_axis(output, query.device_mesh, where, Split(-2))


def _ulysses_axis(query: Any) -> int | None:
    if not isinstance(query, Tensor) or query.spec is None or query.dim() < 3:
        return None
    axis = query.device_mesh.find_axis("ulysses_cp")
    placed = None if axis is None else query.spec[axis]
    return axis if type(placed) is Split and placed.dim == query.dim() - 2 else None


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(torch.nn.functional, name):
        raise AttributeError(f"module 'dtorch.nn.functional' has no attribute {name!r}, nor has torch.nn.functional")
    return getattr(torch.nn.functional, name)
