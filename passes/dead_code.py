"""Removes nodes that nothing reads, and at the local level collectives whose result nothing reads, with their wait.

In: a graph of any level. Out: the same graph without them.

    %a = aten.relu.default(%x)                               %b = aten.neg.default(%x)
    %r = all_reduce(%a, "sum", "tp")             →           return (%b,)
    %w = wait_tensor(%r)
    %b = aten.neg.default(%x)
    return (%b,)

Contract: inputs stay; what writes, draws random numbers or only checks (returns nothing) stays. A local graph is one
SPMD program of all ranks, so all ranks drop the same collectives and their order of launches stays equal.
Complexity: one walk backwards. Numerics: bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, GraphModule

from dtorch.ir.schema import has_effects
from dtorch.passes.base import Pass, PassContext, register_pass


@register_pass(level="global", numerics="bitwise")
@dataclass(frozen=True, kw_only=True)
class DeadCode(Pass):
    """Dead nodes of global graphs."""

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Remove them; returns how many."""
        return remove_dead_nodes(graph_module.graph)


@register_pass(level="local", numerics="bitwise")
@dataclass(frozen=True, kw_only=True)
class DeadCollectives(Pass):
    """Dead nodes of local graphs, collectives among them."""

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Remove them; returns how many."""
        return remove_dead_nodes(graph_module.graph)


def remove_dead_nodes(graph: Graph) -> int:
    """Erase the nodes without readers and effects; a reader that goes leaves its operands to be looked at next."""
    removed = 0
    for node in reversed(graph.nodes):
        if not node.users and not has_effects(node):
            graph.erase_node(node)
            removed += 1
    return removed
