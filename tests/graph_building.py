"""Small graphs of any level for tests, node by node, with the metadata that the compiler's stages would give.

In: shapes, ops, operands, placements. Out: GraphModules, and their results on real tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from dtorch.ir.infer import infer_value
from dtorch.ir.layout import Spec
from dtorch.ir.ops import redistribute
from dtorch.torch_private import fake_tensor, functional_collectives

aten = torch.ops.aten
collectives = functional_collectives()


class GraphBuilder:
    """Adds nodes in order; every node gets `val`, and `where` naming an imagined line of `model.py`."""

    def __init__(self, axis_sizes: Mapping[str, int] | None = None) -> None:
        self.graph, self.axis_sizes, self.line = Graph(), axis_sizes, 0

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, **meta: Any) -> Node:
        strides, step = [], 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
        node = self.graph.placeholder(name)
        return self._annotate(node, fake_tensor(shape, tuple(strides), dtype, "cpu"), meta)

    def call(self, target: Any, *args: Any, meta: Mapping[str, Any] | None = None, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        return self._annotate(node, infer_value(node, self.axis_sizes), meta or {})

    def item(self, source: Node, index: int, **meta: Any) -> Node:
        return self.call(operator.getitem, source, index, meta=meta)

    def place(self, value: Node, target: Spec) -> Node:
        return self.call(redistribute, value, value.meta["spec"], target, meta={"spec": target})

    def collect(self, name: str, *args: Any, started: Mapping | None = None, waited: Mapping | None = None) -> Node:
        """A collective and its wait."""
        return self.call(collectives["wait_tensor"], self.call(collectives[name], *args, meta=started), meta=waited)

    def done(self, *results: Any) -> GraphModule:
        self.graph.output(tuple(results))
        return GraphModule({}, self.graph)

    def _annotate(self, node: Node, value: Any, meta: Mapping[str, Any]) -> Node:
        self.line += 1
        node.meta.update(val=value, where=f"/home/user/model.py:{self.line} in forward: line {self.line}", **meta)
        return node


def run_graph(graph_module: GraphModule, *inputs: Any) -> tuple[Any, ...]:
    """The results of a global graph on real tensors, on one device."""
    with torch.no_grad():
        return Interpreter(graph_module).run(*inputs)


def nodes_of(graph_module: GraphModule, target: Any) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.target is target]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in shape, strides, dtype and every bit (NaNs and signed zeros too)."""
    if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
        return False
    return one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
