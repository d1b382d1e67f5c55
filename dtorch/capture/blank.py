"""A copy of a host with real tensors that hold no values, for `torch.export`, which looks at metadata alone.

In: a `Host`. Out: a module. Its tensors are allocated but never written, so they take no resident memory on a CPU.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from dtorch.capture.host import Host


def blank_module(host: Host) -> torch.nn.Module:
    """The module with an empty tensor for every symbol; ties stay ties, flags and hooks stay."""
    memo: dict[int, Any] = {}
    for symbol in host.symbols:
        meta = symbol.meta
        empty = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
        if symbol.origin.kind == "weight":
            empty = torch.nn.Parameter(empty, requires_grad=symbol.requires_grad)
        memo[id(symbol)] = empty
    for module in host.module.modules():
        for name in ("config", "generation_config"):
            config = module.__dict__.get(name)
            if config is not None:
                memo[id(config)] = config
    return copy.deepcopy(host.module, memo)
