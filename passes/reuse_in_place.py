"""Lets an element-wise operation write into the memory of an operand that nothing needs any more.

In: a scheduled graph. Out: the same graph with in-place operations where their operand's last reader they are.

    %a = aten.mm.default(%x, %w)          %a = aten.mm.default(%x, %w)
    %b = aten.add.Tensor(%a, %y)      →   %b = aten.add_.Tensor(%a, %y)
    %c = aten.relu.default(%b)            %c = aten.relu_.default(%b)

Contract: only operations of `IN_PLACE`, and only where their first operand has the result's shape, dtype and
strides on every device and lies in memory that an operation of `OWN_MEMORY` made in this plan. All readers of that
memory, through whatever view, are known not to keep it and stand earlier on the same stream; none is a collective,
which may still be under way or hand its operand on. Arguments, results and values whose views live are left alone.
A register that several coordinates share is the executor's affair (`dtorch.runtime.lockstep`).
Complexity: each operation looks at the readers of one storage; linear but for storages with very many readers.
Numerics: bitwise, since the in-place overload runs the same kernel over the same strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dtorch.ir.schema import alias_source, same_sizes, stream, tensor_bytes, value
from dtorch.passes.base import Pass, PassContext, register_pass

aten = torch.ops.aten

IN_PLACE: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.neg.default: aten.neg_.default,
    aten.abs.default: aten.abs_.default,
    aten.exp.default: aten.exp_.default,
    aten.log.default: aten.log_.default,
    aten.sqrt.default: aten.sqrt_.default,
    aten.rsqrt.default: aten.rsqrt_.default,
    aten.cos.default: aten.cos_.default,
    aten.sin.default: aten.sin_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.relu.default: aten.relu_.default,
    aten.silu.default: aten.silu_.default,
    aten.gelu.default: aten.gelu_.default,
    aten.clamp.default: aten.clamp_.default,
    aten.clamp_min.default: aten.clamp_min_.default,
}
"""Element-wise operations, and the overloads that run the same kernel into the first operand."""

OWN_MEMORY = frozenset(
    (
        *IN_PLACE,
        *IN_PLACE.values(),
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.matmul.default,
        aten.linear.default,
        aten.layer_norm.default,
        aten.rms_norm.default,
        aten.group_norm.default,
        aten.softmax.int,
        aten.log_softmax.int,
        aten.scaled_dot_product_attention.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.convolution.default,
        aten.embedding.default,
        aten.cat.default,
        aten.stack.default,
        aten.clone.default,
        aten.where.self,
        aten.maximum.default,
        aten.minimum.default,
        aten.pow.Tensor_Scalar,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.index_select.default,
        aten.masked_fill.Scalar,
    )
)
"""Operations whose result is never in an operand's memory: schemas of composites and of some views do not say it."""


@register_pass(level="scheduled", numerics="bitwise")
@dataclass(frozen=True, kw_only=True)
class ReuseInPlace(Pass):
    """Element-wise operations overwrite an operand that they read last."""

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Rewrite; returns how many operations are now in place."""
        order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
        several = prod(context.mesh_shape) > 1
        made, saved_bytes = 0, 0
        for node in order:
            if node.target not in IN_PLACE or not node.args or not isinstance(node.args[0], Node):
                continue
            operand = node.args[0]
            if not _alike(node, operand) or several and _may_broadcast(node, operand):
                continue
            root = _root(operand)
            if root is None or tensor_bytes(value(root)) != tensor_bytes(value(operand)):
                continue  # a result in a part of a larger value would keep all of it alive
            if not _is_last_reader(node, root, order):
                continue
            node.target = IN_PLACE[node.target]
            node.meta["storage"] = "inplace"
            node.meta["storage_of"] = operand
            made += 1
            saved_bytes += tensor_bytes(value(node))
        if made:
            context.log(f"{made} operations write into a dead operand: {saved_bytes} bytes are not allocated")
        return made


def _alike(node: Node, operand: Node) -> bool:
    """Whether the operand has exactly the result's dtype, sizes and strides."""
    result, old = value(node), value(operand)
    if not isinstance(result, torch.Tensor) or not isinstance(old, torch.Tensor) or result.dtype != old.dtype:
        return False
    return same_sizes(result.shape, old.shape) and same_sizes(result.stride(), old.stride())


def _may_broadcast(node: Node, operand: Node) -> bool:
    """Whether another device might hold less of the result than of the operand.

    Values are known at the first coordinate alone. A dimension of one element that is cut has none elsewhere: where
    the operand is whole there and another one is cut, the result is smaller than the operand on those devices.
    """
    sizes = value(operand).shape
    for other in node.all_input_nodes:
        if other is operand or not isinstance(value(other), torch.Tensor):
            continue
        shared = min(len(sizes), value(other).dim())
        if any(sizes[-dim] == 1 == value(other).shape[-dim] for dim in range(1, shared + 1)):
            return True
    return False


def _root(operand: Node) -> Node | None:
    """The node that allocated the operand's memory, if it is known to be of this plan and equal for all its views."""
    while (source := alias_source(operand)) is not None:
        if len(operand.all_input_nodes) > 1 and operand.target not in OWN_MEMORY:
            return None  # a view whose place depends on the mesh coordinate
        operand = source
    fresh = operand.op == "call_function" and operand.target in OWN_MEMORY
    return operand if fresh and isinstance(value(operand), torch.Tensor) else None


def _is_last_reader(node: Node, root: Node, order: dict[Node, int]) -> bool:
    """Whether all other readers of the root's memory come before `node`, on its stream, and keep nothing of it."""
    position, operand = order[node], node.args[0]
    stack = [root]
    while stack:
        shared = stack.pop()
        if shared is not operand and shared in node.all_input_nodes:
            return False  # the same bytes in another layout would be read while they are written
        for reader in shared.users:
            if reader is node:
                continue
            if reader.op == "output" or order[reader] > position or stream(reader) != stream(node):
                return False
            if alias_source(reader) is shared:
                stack.append(reader)
            elif reader.target not in OWN_MEMORY:
                return False
    return True
