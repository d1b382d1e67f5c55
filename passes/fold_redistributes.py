"""Merges, cancels and shortens changes of placement before they are lowered to collectives.

In: a propagated global graph. Out: the same values with fewer or cheaper `redistribute` nodes.

    %a = redistribute(%x, [S(0)], [R])           drop     [R] → [R]
    %b = redistribute(%a, [R], [S(0)])    →      merge    equal redistributes of one value
                                                 cancel   [S(0)] → [R] → [S(0)]:   %x itself
                                                 compose  [S(0)] → [R] → [S(1)]:   [S(0)] → [S(1)], if not dearer

Contract of `fold_redistributes`: bitwise. A pending sum is reduced by the same collective on the same shards as
before, so P → R → S stays on more than two coordinates (a reduce-scatter may add in another order than an
all-reduce) and so does P → R → P. Those are `fold_reductions`, which reassociates. A change between pending
reductions (sum → max) is never folded away. A → B → C is composed only if nothing else reads B and the cost model
(`context.cost_model`, a `dtorch.ir.cost.CostModel`) finds it no dearer. Complexity: one walk, constant work a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from dtorch.ir.cost import CostModel
from dtorch.ir.layout import Pending, Spec, Split
from dtorch.ir.ops import redistribute
from dtorch.ir.schema import tensor_bytes, value
from dtorch.passes.base import Pass, PassContext, register_pass
from dtorch.sharding.redistribute import Hop, plan_hops


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
        self.cost = context.cost_model or CostModel()
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
        operand: Any = node.args[0]
        node.replace_all_uses_with(other)
        self.graph.erase_node(node)
        self.counts[what] += 1
        if operand.target is redistribute and not operand.users:
            self.forget(operand)

    def forget(self, node: Node) -> None:
        """Erase a redistribute that nothing reads any more."""
        key: Any = (node.args[0], node.args[2])
        if self.made.get(key) is node:
            del self.made[key]
        self.graph.erase_node(node)

    def keeps_bits(self, first: Spec, middle: Spec, last: Spec) -> bool:
        """Whether going straight from `first` to `last` gives the bits of going through `middle`."""
        axes = zip(first, middle, last, strict=True)
        if any(len({placed for placed in axis if type(placed) is Pending}) > 1 for axis in axes):
            return False
        if self.may_reassociate:
            return True
        chained = self.reductions((*plan_hops(first, middle), *plan_hops(middle, last)), first, last)
        return chained == self.reductions(plan_hops(first, last), first, last)

    def reductions(self, hops: tuple[Hop, ...], first: Spec, last: Spec) -> list[Hop]:
        """The steps whose order of additions shows in the bits.

        What was not pending at first is reduced exactly (all but one coordinate hold zeros), and so is a sum of two
        terms, unless it stays pending: then other operations may come between.
        """
        shape = self.context.mesh_shape
        return [
            hop
            for hop in hops
            if hop.kind in ("all_reduce", "reduce_scatter")
            and type(first[hop.axis]) is Pending
            and shape[hop.axis] > (2 if type(last[hop.axis]) is not Pending else 1)
        ]

    def is_no_dearer(self, node: Node, first: Spec, middle: Spec, last: Spec) -> bool:
        """Whether the direct way costs no more seconds than the two steps."""
        size = tensor_bytes(value(node))
        chained = self.seconds(size, first, middle) + self.seconds(size, middle, last)
        return self.seconds(size, first, last) <= chained * (1 + 1e-9)

    def seconds(self, size_bytes: int, source: Spec, target: Spec) -> float:
        shape, total = self.context.mesh_shape, 0.0
        for hop in plan_hops(source, target):
            local = float(size_bytes)
            for axis, placed in enumerate(hop.before):
                if axis != hop.axis and type(placed) is Split:
                    local /= shape[axis]
            total += self.cost.convert(hop.before[hop.axis], hop.after[hop.axis], local, shape[hop.axis])
        return total
