"""What a node's result would be, found by calling its target on the fake values of its operands.

In: a node whose operands have `meta["val"]`. Out: a FakeTensor, a tuple of them, or an int: integers that depend
on the mesh coordinate are those of coordinate 0, as everywhere in local graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node, map_arg

from dtorch.ir.layout import local_bounds
from dtorch.ir.ops import (
    INTEGER_FUNCTIONS,
    integer,
    keep_first,
    local_begin,
    local_size,
    redistribute,
    slice_scatter_in_place,
)
from dtorch.ir.schema import value
from dtorch.torch_private import fake_execution, fakes_in_turn


def infer_value(node: Node, axis_sizes: Mapping[str, int] | None = None) -> Any:
    """Call the node's target on fakes. Raises what the target raises if the operands do not fit it."""
    args, kwargs = map_arg((node.args, node.kwargs), value)
    if node.target in (redistribute, keep_first):
        with fakes_in_turn():
            return torch.empty_like(args[0])
    if node.target is slice_scatter_in_place:
        return args[0]
    if node.target is integer:
        return INTEGER_FUNCTIONS[args[0]](*args[1:])
    if node.target in (local_size, local_begin):
        return _coordinate_zero(node.target, args, list((axis_sizes or {}).values()))
    mode = next((v.fake_mode for v in map(value, node.all_input_nodes) if hasattr(v, "fake_mode")), None)
    if mode is None:
        mode = next((value(n).fake_mode for n in node.graph.nodes if hasattr(value(n), "fake_mode")), None)
    with fakes_in_turn(), mode if mode is not None else fake_execution(), torch.no_grad():
        return node.target(*args, **kwargs)


def _coordinate_zero(target: Any, args: Any, sizes: list[int]) -> int:
    """`local_size` and `local_begin` at coordinate 0 of every axis: the first piece, which begins at 0."""
    if target is local_begin:
        return 0
    size, cuts = args
    local = size
    for outer, unit, begin, end in local_bounds(size, tuple((o, u, sizes[axis], 0) for o, u, axis in cuts)):
        whole = size // (outer * unit)
        local = local // whole * (end - begin) if whole else 0
    return local
