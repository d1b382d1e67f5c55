"""Makes a number that several operations take one tensor of the plan, so that it is wrapped once and not each time.

In: a local graph. Out: the same graph, with a `scalar_tensor` node for each such number and dtype.

    %a = aten.mul.Tensor(%x, 0.5)         %half = aten.scalar_tensor.default(0.5, dtype=torch.float32)
    %b = aten.mul.Tensor(%y, 0.5)     →   %a = aten.mul.Tensor(%x, %half)
                                          %b = aten.mul.Tensor(%y, %half)

Contract: second operands of `add`, `sub`, `mul` and `div` whose first one is a float32 or float64 tensor, used at
least twice. Torch makes a 0-d float64 tensor of such a number and casts it at every call, which takes longer
than a small operation itself. Half precision is left alone: there torch computes with the number in float32.
Complexity: one walk. Numerics: bitwise; the number is rounded to the tensor's dtype as torch does it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dtorch.ir.schema import value
from dtorch.passes.base import Pass, PassContext, register_pass

aten = torch.ops.aten

OPERATIONS = frozenset((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor))
LARGEST_INTEGER = {torch.float32: 2**24, torch.float64: 2**53}  # beyond them the way of rounding might matter
LEAST_USES = 2  # making the tensor takes about as long as one call saves
LARGEST = {dtype: torch.finfo(dtype).max for dtype in LARGEST_INTEGER}


@register_pass(level="local", numerics="bitwise")
@dataclass(frozen=True, kw_only=True)
class ShareScalars(Pass):
    """Numbers that come again are made tensors once."""

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Rewrite; returns how many operations take a shared tensor now."""
        readers: dict[Any, list[Node]] = {}
        for node in graph_module.graph.nodes:
            if node.target in OPERATIONS and len(node.args) == 2 and isinstance(node.args[0], Node):
                number, operand = node.args[1], value(node.args[0])
                if isinstance(operand, torch.Tensor) and _exact(number, operand.dtype):
                    readers.setdefault((operand.dtype, float(number).hex()), []).append(node)
        made = 0
        for (dtype, _), nodes in readers.items():
            if len(nodes) < LEAST_USES:
                continue
            with graph_module.graph.inserting_before(nodes[0]):
                number = float(nodes[0].args[1])
                shared = graph_module.graph.call_function(aten.scalar_tensor.default, (number,), {"dtype": dtype})
                shared.meta["where"] = nodes[0].meta.get("where", "")
            for node in nodes:
                node.args = (node.args[0], shared)
            made += len(nodes)
        return made


def _exact(number: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor of `dtype` holds what torch would compute with."""
    if type(number) is int:
        return abs(number) <= LARGEST_INTEGER.get(dtype, -1)
    return type(number) is float and math.isfinite(number) and abs(number) <= LARGEST.get(dtype, -1.0)
