"""From the global graph to one local graph for all devices: local shapes, collectives, coordinate arithmetic.

In: a propagated global graph (specs on every node, redistribute nodes). Out: a local graph whose placeholders
and outputs are those of the global one, in order. One graph serves every coordinate of the mesh: sizes that
differ between devices are nodes, not constants.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dtorch.ir import ops
from dtorch.ir.layout import Spec, Split, local_shape
from dtorch.lower.collectives import lower_hop
from dtorch.lower.context import CallContext, LocalBuilder
from dtorch.sharding.localize import OpCall, localize
from dtorch.sharding.problem import tensor_arguments
from dtorch.sharding.redistribute import plan_hops
from dtorch.torch_private import VIEWS, fake_tensor


def lower(graph: GraphModule, mesh_shape: tuple[int, ...], axis_names: tuple[str, ...]) -> GraphModule:
    """Lower a propagated global graph; the input graph is left as it is."""
    lowering = _Lowering(graph, mesh_shape, axis_names)
    for node in graph.graph.nodes:
        lowering.visit(node)
    return GraphModule(graph, lowering.builder.graph)


class _Lowering:
    def __init__(self, graph: GraphModule, mesh_shape: tuple[int, ...], axis_names: tuple[str, ...]) -> None:
        self.graph = graph
        self.builder = LocalBuilder(mesh_shape, axis_names)
        self.env: dict[Node, Any] = {}
        self.hops: dict[tuple[Node, Spec], Node] = {}

    def visit(self, node: Node) -> None:
        self.builder.where = node.meta.get("where", "")
        if node.op in ("placeholder", "get_attr"):
            self.env[node] = self._input(node)
        elif node.op == "output":
            output = self.builder.graph.output(torch.fx.map_arg(node.args[0], self.env.__getitem__))
            output.meta["logical_shapes"] = tuple(tuple(leaf.meta["val"].shape) for leaf in node.args[0])
        elif node.target is operator.getitem:
            self.env[node] = self._element(node)
        elif node.target is ops.redistribute:
            self.env[node] = self._redistribute(node)
        else:
            self.env[node] = self._call(node)

    def _input(self, node: Node) -> Node:
        graph = self.builder.graph
        new = graph.placeholder(node.name) if node.op == "placeholder" else graph.get_attr(node.target)
        meta, spec = node.meta["val"], node.meta["spec"]
        new.meta["val"] = local_fake(meta, spec, self.builder.mesh_shape)
        new.meta["where"] = node.meta.get("where", "")
        return new

    def _element(self, node: Node) -> Any:
        source = self.env[node.args[0]]
        if isinstance(source, (list, tuple)):
            return source[node.args[1]]
        value = source.meta["val"][node.args[1]]
        return self.builder.emit_known(operator.getitem, value, source, node.args[1])

    def _redistribute(self, node: Node) -> Node:
        source, before, after = node.args
        value, shape = self.env[source], tuple(node.meta["val"].shape)
        for hop in plan_hops(before, after):
            key = (value, hop.after)
            if key not in self.hops:
                self.hops[key] = lower_hop(self.builder, value, shape, hop)
            value = self.hops[key]
        return value

    def _stride_proof(self, node: Node) -> Any:
        """A view that was legal for the logical strides may need a copy for what a redistribution left."""
        if node.target in VIEWS:
            source = node.args[0]
            if self.env[source].meta["val"].stride() != source.meta["val"].stride():
                return torch.ops.aten.reshape.default
        return node.target

    def _with_logical_strides(self, source: Node) -> Node:
        """A whole value in memory as the global graph has it: a redistribution may have left other strides."""
        local, meta, aten = self.env[source], source.meta["val"], torch.ops.aten
        if local.meta["val"].stride() == meta.stride() or local.meta["val"].shape != meta.shape:
            return local
        options = {"dtype": meta.dtype, "device": meta.device}
        empty = self.builder.emit(aten.empty_strided.default, list(meta.shape), list(meta.stride()), **options)
        return self.builder.emit(aten.copy.default, empty, local)

    def _call(self, node: Node) -> Any:
        builder = self.builder
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
        if node.target is torch.ops.aten.as_strided.default:
            args = (self._with_logical_strides(node.args[0]), *args[1:])
        leaves = tensor_arguments(node)
        spec = node.meta["spec"]
        many = isinstance(node.meta["val"], (list, tuple))
        specs = tuple(spec) if many else (spec,)
        cut = any(type(placed) is Split for s in (*specs, *(leaf.meta["spec"] for leaf in leaves)) for placed in s)
        if not cut:
            return builder.emit(self._stride_proof(node), *args, **kwargs)
        metas = list(node.meta["val"]) if many else [node.meta["val"]]
        read = lambda leaf: leaf.meta["val"]  # noqa: E731
        call = OpCall(
            node.target,
            args,
            kwargs,
            torch.fx.map_arg(node.args, read),
            torch.fx.map_arg(node.kwargs, read),
            tuple(metas),
        )
        return localize(CallContext(builder, [leaf.meta["spec"] for leaf in leaves], specs), call)


def local_fake(meta: torch.Tensor, spec: Spec, mesh_shape: tuple[int, ...]) -> torch.Tensor:
    """What coordinate 0 holds of a value: same dims in memory order as the logical tensor, dense."""
    shape = local_shape(tuple(meta.shape), spec, mesh_shape, (0,) * len(mesh_shape))
    if shape == tuple(meta.shape):
        return meta
    order = sorted(range(len(shape)), key=lambda dim: (-meta.stride(dim), dim))
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return fake_tensor(shape, tuple(strides), meta.dtype, meta.device)
