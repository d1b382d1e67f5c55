"""Removes nodes that return their operand as it is: identity views, casts to the same dtype, alias, detach, copies.

In: a global graph. Out: the same graph in which their readers read the operand.

    %v = aten.view.default(%x, [2, 8])   # f32[2, 8] of f32[2, 8]          %y = aten.relu.default(%x)
    %d = aten.detach.default(%v)                                     →
    %y = aten.relu.default(%d)

Contract: shape, strides, dtype and placement of every value that is read stay equal, so every kernel sees the same
memory layout. Values of a global graph are immutable, so sharing memory is safe; a copy (`clone`) whose memory the
caller gets stays, because he may write to it. Complexity: one walk. Numerics: bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dtorch.ir.schema import alias_source, is_random, same_sizes, value
from dtorch.passes.base import Pass, PassContext, register_pass
from dtorch.torch_private import OpOverload

_COPIES = ("clone", "_to_copy", "contiguous", "to", "lift_fresh_copy")
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_OPAQUE = ("as_strided", "_conj", "_neg_view", "conj")


@register_pass(level="global", numerics="bitwise")
@dataclass(frozen=True, kw_only=True)
class RemoveNoops(Pass):
    """Let readers of a node that does nothing read its operand."""

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Remove them; returns how many."""
        returned = _returned(graph_module)
        removed = 0
        for node in list(graph_module.graph.nodes):
            source = _unchanged_operand(node, returned)
            if source is not None:
                node.replace_all_uses_with(source)
                graph_module.graph.erase_node(node)
                removed += 1
        return removed


def _returned(graph_module: GraphModule) -> set[Node]:
    """The nodes whose memory the caller may get: the results and what they are views of."""
    found: set[Node] = set()
    for node in reversed(graph_module.graph.nodes):
        if node.op == "output":
            found.update(node.all_input_nodes)
        elif node in found:
            source = alias_source(node)
            if source is not None:
                found.add(source)
    return found


def _unchanged_operand(node: Node, returned: set[Node]) -> Node | None:
    """The operand that a node returns as it is, or None if it does something."""
    if node.op != "call_function" or type(node.target) is not OpOverload or not node.args:
        return None
    source = node.args[0]
    namespace, _, name = node.target.name().partition(".")[0].partition("::")
    if namespace != "aten" or not isinstance(source, Node) or name in _OPAQUE:
        return None
    if name in _DROPOUTS:
        does_nothing = len(node.args) == 3 and node.args[2] is False
    elif name in _COPIES:
        does_nothing = node not in returned or (alias_source(node) is not None and not _asks_for_copy(node))
    else:
        does_nothing = alias_source(node) is source
    if not does_nothing or is_random(node) or node.meta.get("spec") != source.meta.get("spec"):
        return None
    return source if _same_layout(value(source), value(node)) else None


def _asks_for_copy(node: Node) -> bool:
    names = [argument.name for argument in node.target._schema.arguments]
    position = names.index("copy") if "copy" in names else len(node.args)
    return bool(node.args[position] if position < len(node.args) else node.kwargs.get("copy", False))


def _same_layout(one: Any, other: Any) -> bool:
    """Whether two fakes agree in all that a kernel can see of them, symbolic sizes by their expression."""
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.dtype == other.dtype
        and one.device == other.device
        and one.layout == other.layout
        and same_sizes(one.shape, other.shape)
        and same_sizes(one.stride(), other.stride())
        and same_sizes((one.storage_offset(),), (other.storage_offset(),))
    )
