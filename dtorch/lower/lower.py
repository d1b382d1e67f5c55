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

from dtorch.errors import UnsupportedError
from dtorch.ir import ops
from dtorch.ir.layout import Spec, Split, local_shape
from dtorch.ir.strides import may_overlap, memory_order, reach
from dtorch.lower.collectives import lower_hop
from dtorch.lower.context import CallContext, LocalBuilder
from dtorch.sharding.localize import OpCall, localize
from dtorch.sharding.problem import tensor_arguments
from dtorch.sharding.redistribute import plan_hops
from dtorch.torch_private import VIEWS, fake_tensor

aten = torch.ops.aten


def lower(graph: GraphModule, mesh_shape: tuple[int, ...], axis_names: tuple[str, ...]) -> GraphModule:
    """Lower a propagated global graph; the input graph is left as it is."""
    lowering = _Lowering(graph, mesh_shape, axis_names)
    for node in graph.graph.nodes:
        lowering.visit(node)
    return GraphModule(graph, lowering.builder.graph)


_READ_MEMORY = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
_READ_AS_OTHER_DTYPE = (
    aten.view_as_complex.default,
    aten.view_as_complex_copy.default,
    aten.view.dtype,
    aten.view_copy.dtype,
)
_LOOK_AT_STRIDES = frozenset((aten.kron.default, *VIEWS, *_READ_MEMORY, *_READ_AS_OTHER_DTYPE))


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

    def _by_strides(self, node: Node, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Op and arguments for an op that looks at its operand's strides: a redistribution may have left others."""
        if node.target is aten.kron.default:
            return aten.reshape.default, (self._outer_product(*args), list(node.meta["val"].shape))
        source = node.args[0]
        local, meta = self.env[source].meta["val"], source.meta["val"]
        if node.target in VIEWS:
            same = local.stride() == meta.stride()
            return (node.target, args) if same else (aten.reshape.default, args[:2])
        if node.target in _READ_MEMORY:
            self._refuse_gaps(node)
            return node.target, (self._with_logical_strides(source), *args[1:])
        wanted, held = node.meta["val"].dtype.itemsize, meta.dtype.itemsize
        if wanted == held or _is_innermost(local, max(1, wanted // held)):
            return node.target, args
        if local.shape == meta.shape:
            return node.target, (self._with_logical_strides(source), *args[1:])
        order = memory_order(meta.stride())
        moved = self.builder.emit(aten.permute.default, args[0], order)
        moved = self.builder.emit(aten.clone.default, moved, memory_format=torch.contiguous_format)
        back = [order.index(dim) for dim in range(len(order))]
        return node.target, (self.builder.emit(aten.permute.default, moved, back), *args[1:])

    def _outer_product(self, first: Node, second: Node) -> Node:
        """What kron views as its result; the view would need the strides that the logical operands have."""
        sizes = [list(value.meta["val"].shape) for value in (first, second)]
        rank = max(map(len, sizes))
        left, right = ([1] * (rank - len(shape)) + shape for shape in sizes)
        one = self.builder.emit(aten.reshape.default, first, [size for own in left for size in (own, 1)])
        other = self.builder.emit(aten.reshape.default, second, [size for own in right for size in (1, own)])
        return self.builder.emit(aten.mul.Tensor, one, other)

    def _refuse_gaps(self, node: Node) -> None:
        """as_strided may not read between the elements of its operand: on a device nothing may be there."""
        meta, at = node.args[0].meta["val"], 2 if node.target is aten.as_strided_scatter.default else 1
        layout = (tuple(meta.shape), meta.stride())
        places = reach(*layout)
        if places <= meta.numel():
            return
        held = torch.zeros(places, dtype=torch.bool)
        held.as_strided(*layout).fill_(True)
        sizes, strides = node.args[at : at + 2]
        offset = (node.args[at + 2] if len(node.args) > at + 2 else 0) or 0
        if offset + reach(sizes, strides) > places or not held.as_strided(sizes, strides, offset).all():
            raise UnsupportedError(
                f"{self.builder.where}: as_strided({sizes}, {strides}) on a tensor of shape {list(meta.shape)} and "
                f"strides {list(meta.stride())} reads between the tensor's elements, where the devices hold nothing. "
                "Take it from the base, or from view.clone()."
            )

    def _with_logical_strides(self, source: Node) -> Node:
        """A whole value in memory as the global graph has it."""
        local, meta = self.env[source], source.meta["val"]
        if local.meta["val"].stride() == meta.stride():
            return local
        emit, layout = self.builder.emit, (list(meta.shape), list(meta.stride()))
        options = {"dtype": meta.dtype, "device": meta.device}
        if not may_overlap(tuple(meta.shape), meta.stride()):
            return emit(aten.copy.default, emit(aten.empty_strided.default, *layout, **options), local)
        # Expanded dims or windows: places that several elements share are written by each of them, with one value.
        count = reach(*layout)
        places = emit(aten.arange.default, count, dtype=torch.int64, device=meta.device)
        places = emit(aten.reshape.default, emit(aten.as_strided.default, places, *layout), [-1])
        memory = emit(aten.full.default, [count], 0, **options)
        memory = emit(aten.scatter.src, memory, 0, places, emit(aten.reshape.default, local, [-1]))
        return emit(aten.as_strided.default, memory, *layout)

    def _call(self, node: Node) -> Any:
        builder = self.builder
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
        leaves = tensor_arguments(node)
        spec = node.meta["spec"]
        many = isinstance(node.meta["val"], (list, tuple))
        specs = tuple(spec) if many else (spec,)
        cut = any(type(placed) is Split for s in (*specs, *(leaf.meta["spec"] for leaf in leaves)) for placed in s)
        target = node.target
        if target in _LOOK_AT_STRIDES and not (cut and target is aten.kron.default):
            target, args = self._by_strides(node, args)
        if not cut:
            return builder.emit(target, *args, **kwargs)
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
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(memory_order(meta.stride())):
        strides[dim] = step
        step *= max(1, shape[dim])
    return fake_tensor(shape, tuple(strides), meta.dtype, meta.device)


def _is_innermost(value: torch.Tensor, count: int) -> bool:
    """Whether runs of `count` elements of the last dim are consecutive, each beginning at a multiple of `count`."""
    return value.stride(-1) == 1 and all(stride % count == 0 for stride in value.stride()[:-1])
