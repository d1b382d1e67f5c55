"""Writes the new value of a donated state into the bytes of the old one, so that a decode step copies no cache.

In: a scheduled graph and its signature. Out: the same graph with functional updates replaced by in-place ones.

    %k1 = aten.index_copy.default(%k, 2, %pos, %new)   →   %k1 = aten.index_copy_.default(%k, 2, %pos, %new)

Contract: only the last reader of a donated input (or of a value already written in place), when nothing else reads
its bytes afterwards and the values written do not come from those bytes. Required: a step that copied its cache
would be correct, but its cost would grow with the cache. The context's log says how many bytes a step still copies.
Complexity: one walk. Numerics: bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dtorch.ir import ops
from dtorch.ir.schema import alias_source, tensor_bytes
from dtorch.ir.signature import Signature
from dtorch.passes.base import Pass, PassContext, register_pass

aten = torch.ops.aten


@register_pass(level="scheduled", numerics="bitwise", required=True)
@dataclass(frozen=True, kw_only=True)
class PutInPlace(Pass):
    """Update donated state in its own bytes."""

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Rewrite; returns how many updates are now in place."""
        if context.signature is None:
            return 0
        nodes = list(graph_module.graph.nodes)
        order = {node: index for index, node in enumerate(nodes)}
        owners = {node: node for node in nodes if node.name in donated_inputs(context.signature)}
        results = set(nodes[-1].all_input_nodes)
        made, copied = 0, 0
        for node in nodes:
            replace = _IN_PLACE.get(node.target)
            if replace is None:
                continue
            base = node.args[0]
            owner = owners.get(base)
            free = owner is not None and base not in results and _is_last_reader(node, base, order)
            if not free or _reads_own_bytes(node, base):
                copied += tensor_bytes(node.meta["val"])
                continue
            if not replace(node):
                copied += tensor_bytes(node.meta["val"])
                continue
            node.meta["storage"] = "inplace"
            node.meta["storage_of"] = base
            owners[node] = owner
            made += 1
        if made or copied:
            context.log(f"{made} updates in place; {copied} bytes are copied by the others")
        return made


def donated_inputs(signature: Signature) -> set[str]:
    """Inputs whose bytes the program owns: state and buffers that it gives a new value to."""
    mutated = {spec.mutates for spec in signature.outputs}
    return {spec.name for spec in signature.inputs if spec.kind in ("state", "buffer") and spec.name in mutated}


def _is_last_reader(node: Node, base: Node, order: dict[Node, int]) -> bool:
    """Whether no node after `node` reads `base` or a view of it (views of the new value are of `node` itself)."""
    position = order[node]
    stack = [base]
    while stack:
        shared = stack.pop()
        for reader in shared.users:
            if reader is node:
                continue
            if order[reader] > position or reader.op == "output":
                return False
            if alias_source(reader) is shared:
                stack.append(reader)
    return True


def _reads_own_bytes(node: Node, base: Node) -> bool:
    root = _root(base)
    return any(_root(operand) is root for operand in node.all_input_nodes if operand is not base)


def _root(node: Node) -> Node:
    while (source := alias_source(node) or node.meta.get("storage_of")) is not None:
        node = source
    return node


def _rename(target: Any) -> Callable[[Node], bool]:
    def replace(node: Node) -> bool:
        node.target = target
        return True

    return replace


def _slice_scatter(node: Node) -> bool:
    """`slice_scatter(base, source, dim=0, start=None, end=None, step=1)` → our in-place form with all arguments."""
    defaults = dict(zip(("dim", "start", "end", "step"), (0, None, None, 1))) | dict(node.kwargs)
    given = dict(zip(("dim", "start", "end", "step"), node.args[2:]))
    values = defaults | given
    node.target = ops.slice_scatter_in_place
    node.args = (*node.args[:2], values["dim"], values["start"], values["end"], values["step"])
    node.kwargs = {}
    return True


def _copy(node: Node) -> bool:
    """`copy(base, source)` may change dtype but not the shape it broadcasts to: the same holds for `copy_`."""
    node.target = aten.copy_.default
    return True


_IN_PLACE: dict[Any, Callable[[Node], bool]] = {
    aten.index_copy.default: _rename(aten.index_copy_.default),
    aten.index_put.default: _rename(aten.index_put_.default),
    aten.copy.default: _copy,
    aten.slice_scatter.default: _slice_scatter,
}
