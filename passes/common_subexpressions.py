"""Computes a value once that the graph computes twice.

In: a global graph. Out: the same graph in which equal nodes (same op, same operands, same constants) are one.

    %a = aten.cos.default(%x)                    %a = aten.cos.default(%x)
    %b = aten.cos.default(%x)             →      %c = aten.mul.Tensor(%a, %a)
    %c = aten.mul.Tensor(%a, %b)

Contract: never merges what draws random numbers, writes, checks or leaves memory uninitialised. Constants are equal
only if no op could tell them apart: 0.0 is not -0.0, 1 is not 1.0 or True, a NaN equals the NaN of the same bits.
Nodes with different placements stay apart. Two results of the graph may become one value.
Complexity: one walk, one hash a node. Numerics: bitwise.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dtorch.ir.schema import has_effects
from dtorch.passes.base import Pass, PassContext, register_pass


class _Unkeyed(Exception):
    """A constant whose equality cannot be decided: its node is left alone."""


@register_pass(level="global", numerics="bitwise")
@dataclass(frozen=True, kw_only=True)
class CommonSubexpressions(Pass):
    """Merge equal nodes into the first of them."""

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Merge; returns how many nodes went."""
        first: dict[Any, Node] = {}
        merged = 0
        for node in list(graph_module.graph.nodes):
            if node.op != "call_function" or has_effects(node) or _is_uninitialised(node):
                continue
            try:
                key = (node.target, _key(node.args), _key(node.kwargs), _key(node.meta.get("spec")))
                kept = first.setdefault(key, node)
            except _Unkeyed:
                continue
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph_module.graph.erase_node(node)
                merged += 1
        return merged


def _key(value: Any) -> Any:
    """A hashable form of an operand that is equal exactly for operands that no op can tell apart."""
    if isinstance(value, Node):
        return value
    kind = type(value)
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if isinstance(value, (tuple, list)):
        return tuple if isinstance(value, tuple) else list, tuple(map(_key, value))
    if isinstance(value, dict):
        return dict, tuple((name, _key(value[name])) for name in sorted(value))
    if isinstance(value, slice):
        return slice, _key((value.start, value.stop, value.step))
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise _Unkeyed
    try:
        hash(value)
    except TypeError:
        raise _Unkeyed from None
    return kind, value


def _is_uninitialised(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return name.startswith(("empty", "new_empty"))
