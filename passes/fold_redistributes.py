"""Merges, cancels and shortens changes of placement before they are lowered to collectives.

In: a propagated global graph. Out: the same values with fewer or cheaper `redistribute` nodes.

    %a = redistribute(%x, [S(0)], [R])           drop     [R] → [R]
    %b = redistribute(%a, [R], [S(0)])    →      merge    equal redistributes of one value
                                                 cancel   [S(0)] → [R] → [S(0)]:   %x itself
                                                 compose  [S(0)] → [R] → [S(1)]:   [S(0)] → [S(1)], if not dearer

Contract of `fold_redistributes`: bitwise. A pending sum is reduced by the same kind of collective as before, so
P → R → S stays (its reduce-scatter may add in another order than an all-reduce) and so does P → R → P. Those two are
`fold_reductions`, which reassociates. A change between pending reductions (sum → max) is never folded away.
A → B → C is composed only if nothing else reads B. Complexity: one walk, constant work a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from dtorch.ir.layout import Pending, Placed, Spec, Split, Whole
from dtorch.ir.ops import redistribute
from dtorch.ir.schema import tensor_bytes, value
from dtorch.passes.base import Pass, PassContext, register_pass


@register_pass(level="global", numerics="bitwise")
@dataclass(frozen=True, kw_only=True)
class FoldRedistributes(Pass):
    """Fold chains of redistributes where that keeps every bit."""

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Fold; returns how many rewrites were made."""
        return _Folder(graph_module, context, may_reassociate=False).run()


@register_pass(level="global", numerics="reassociates")
@dataclass(frozen=True, kw_only=True)
class FoldReductions(Pass):
    """Fold chains that begin at a pending sum too: an all-reduce and a slice become one reduce-scatter."""

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Fold; returns how many rewrites were made."""
        return _Folder(graph_module, context, may_reassociate=True).run()


class _Folder:
    """One walk in list order; `made` finds the redistribute of a value to a placement that exists already."""

    def __init__(self, graph_module: GraphModule, context: PassContext, may_reassociate: bool) -> None:
        self.graph, self.context, self.may_reassociate = graph_module.graph, context, may_reassociate
        self.made: dict[tuple[Node, Spec], Node] = {}
        self.counts = {"dropped": 0, "merged": 0, "cancelled": 0, "composed": 0}

    def run(self) -> int:
        for node in list(self.graph.nodes):
            if node.target is redistribute:
                self.fold(node)
        total = sum(self.counts.values())
        if total:
            self.context.log("redistributes: " + ", ".join(f"{n} {what}" for what, n in self.counts.items() if n))
        return total

    def fold(self, node: Node) -> None:
        """Shorten the chain that ends in `node` as far as it goes."""
        while True:
            operand, source, target = node.args
            if source == target:
                return self.replace(node, operand, "dropped")
            if operand.target is not redistribute:
                break
            origin, first, middle = operand.args
            if first == target and self.keeps_bits(first, middle, target):
                return self.replace(node, origin, "cancelled")
            if len(operand.users) > 1 or not self.keeps_bits(first, middle, target):
                break
            if not self.is_no_dearer(node, first, middle, target):
                break
            node.args = (origin, first, target)
            self.forget(operand)
            self.counts["composed"] += 1
        kept = self.made.setdefault((node.args[0], node.args[2]), node)
        if kept is not node:
            self.replace(node, kept, "merged")

    def replace(self, node: Node, other: Node, what: str) -> None:
        operand = node.args[0]
        node.replace_all_uses_with(other)
        self.graph.erase_node(node)
        self.counts[what] += 1
        if operand.target is redistribute and not operand.users:
            self.forget(operand)

    def forget(self, node: Node) -> None:
        """Erase a redistribute that nothing reads any more."""
        if self.made.get((node.args[0], node.args[2])) is node:
            del self.made[node.args[0], node.args[2]]
        self.graph.erase_node(node)

    def keeps_bits(self, first: Spec, middle: Spec, last: Spec) -> bool:
        """Whether going straight from `first` to `last` gives the bits, on every axis, of going through `middle`."""
        return all(
            _is_exact(a, b, c, size, self.may_reassociate)
            for a, b, c, size in zip(first, middle, last, self.context.mesh_shape, strict=True)
        )

    def is_no_dearer(self, node: Node, first: Spec, middle: Spec, last: Spec) -> bool:
        cost = getattr(self.context.cost_model, "redistribute_cost", None)
        if cost is None:
            size = tensor_bytes(value(node))
            return _bytes_moved(size, first, last, self.context.mesh_shape) <= (
                _bytes_moved(size, first, middle, self.context.mesh_shape)
                + _bytes_moved(size, middle, last, self.context.mesh_shape)
            )
        tensor = value(node)
        return cost(tensor, first, last) <= cost(tensor, first, middle) + cost(tensor, middle, last)


def _is_exact(a: Placed, b: Placed, c: Placed, size: int, may_reassociate: bool) -> bool:
    """One axis. Only what begins pending can lose bits: a reduction of another kind, or none at all, in its place."""
    pending = [placed for placed in (a, b, c) if type(placed) is Pending]
    if len(set(pending)) > 1:
        return False
    if type(a) is not Pending or a == b or size == 1:
        return True
    if type(c) is Pending:
        return may_reassociate
    return b == c or may_reassociate or (size == 2 and a.op in ("sum", "max", "min"))


def _bytes_moved(size_bytes: int, source: Spec, target: Spec, mesh_shape: tuple[int, ...]) -> float:
    """Bytes that a device sends, ring algorithms assumed, one axis after another; slicing is free.

    Source: the usual ring costs (Thakur et al., 2005): gather and reduce-scatter (k-1)/k, all-reduce twice that.
    """
    moved = 0.0
    for axis, (a, b) in enumerate(zip(source, target, strict=True)):
        if a == b:
            continue
        local = float(size_bytes)
        for other, count in enumerate(mesh_shape):
            if other != axis and type(source[other]) is Split and type(target[other]) is Split:
                local /= count
        count = mesh_shape[axis]
        moved += local * (count - 1) / count * _weight(a, b, count)
    return moved


def _weight(a: Any, b: Any, count: int) -> float:
    if type(a) is Whole or type(b) is Pending and type(a) is not Pending:
        return 0.0
    if type(a) is Pending:
        return 1.0 if type(b) is Split else 2.0
    return 1.0 if type(b) is Whole else 1.0 / count
