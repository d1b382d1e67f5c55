"""A global graph read as a placement problem: numbered values and steps, each step with the factors of its op.

In: a global graph and its signature. Out: a `Problem`. Steps of the same op on the same metadata share one
`Template`, so repeated blocks of a model cost little.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from dtorch.ir.signature import Signature
from dtorch.recent import Recent
from dtorch.sharding.factors import Alternatives, Mapping
from dtorch.sharding.rules import mappings_of
from dtorch.sharding.rules.registry import when_registered
from dtorch.torch_private import schema_facts


@dataclass(eq=False)
class Value:
    """One tensor of the graph. `units`: for each dim the strides at which its readers split it (divisor chains)."""

    index: int
    node: Node
    shape: tuple[int, ...]
    size_bytes: int
    uses: int = 0
    units: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(eq=False)
class Template:
    """What steps of one op on the same metadata have in common."""

    op: Any
    mappings: tuple[Mapping, ...]
    alternatives: Alternatives | None
    source: str
    flops: float
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    splits_dims: bool  # some dim is a product of factors
    is_view: bool


@dataclass(eq=False)
class Step:
    """One op of the graph: which values it reads (flattened tensor arguments) and makes."""

    node: Node
    template: Template
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    units: tuple[tuple[str, tuple[int, ...]], ...] = ()  # factor → strides inside it, where there are any


@dataclass(eq=False)
class Problem:
    """Everything the search needs; `of_node` finds the value of a node (several for multi-output ops)."""

    values: list[Value]
    steps: list[Step]
    inputs: dict[str, int]
    outputs: tuple[int | None, ...]
    of_node: dict[Node, tuple[int, ...]]
    resident: frozenset[int] = frozenset()  # results that stay on the devices, such as a new cache
    open_results: bool = False  # results are left as they come: they cost nothing to hand out


_TEMPLATES: Recent[Template] = Recent()
_TEMPLATES_MAX = 20_000


class HasGraph(Protocol):
    """A GraphModule, or whatever else holds a graph."""

    @property
    def graph(self) -> Graph:
        """The graph."""


def read_problem(graph: HasGraph, signature: Signature) -> Problem:
    """Number the tensors of a global graph and look up the factors of each op."""
    values: list[Value] = []
    steps: list[Step] = []
    of_node: dict[Node, tuple[int, ...]] = {}
    inputs: dict[str, int] = {}

    def new_value(node: Node, meta: torch.Tensor) -> int:
        shape = tuple(meta.shape)
        values.append(Value(len(values), node, shape, meta.numel() * meta.element_size()))
        values[-1].units = [()] * len(shape)
        return len(values) - 1

    outputs: tuple[int | None, ...] = ()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or node.op == "get_attr":
            of_node[node] = (new_value(node, node.meta["val"]),)
            inputs[node.name] = of_node[node][0]
        elif node.op == "output":
            outputs = tuple(of_node[leaf][0] if isinstance(leaf, Node) else None for leaf in node.args[0])
            for index in outputs:
                if index is not None:
                    values[index].uses += 1
        elif node.target is operator.getitem:
            of_node[node] = (of_node[node.args[0]][node.args[1]],)
        else:
            metas = node.meta["val"]
            results = list(metas) if isinstance(metas, (list, tuple)) else [metas]
            read = tuple(of_node[leaf][0] for leaf in tensor_arguments(node))
            made = tuple(new_value(node, meta) for meta in results if isinstance(meta, torch.Tensor))
            for index in read:
                values[index].uses += 1
            of_node[node] = made
            steps.append(Step(node, template_of(node, results), read, made))
    return Problem(values, steps, inputs, outputs, of_node)


def tensor_arguments(node: Node) -> list[Node]:
    """The tensor arguments of a call in flattened order, repeats kept."""
    found: list[Node] = []

    def visit(argument: Any) -> None:
        if isinstance(argument, Node):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            for item in argument:
                visit(item)

    for argument in node.args:
        visit(argument)
    for argument in node.kwargs.values():
        visit(argument)
    return found


def template_of(node: Node, results: list[Any]) -> Template:
    """The shared template of a node, from the cache where the op and its metadata were seen before."""
    key = (node.target, _key(node.args), _key(tuple(node.kwargs.items())) if node.kwargs else ())
    found = _TEMPLATES.get(key)
    if found is None:
        found = _TEMPLATES.put(key, _make_template(node, results), _TEMPLATES_MAX)
    return found


def forget_templates() -> None:
    """Drop cached templates: after a rule was registered, or to time a cold propagation."""
    _TEMPLATES.clear()


when_registered(forget_templates)


def _key(argument: Any) -> Any:
    kind = type(argument)
    if kind is Node:
        meta = argument.meta["val"]
        return (meta.shape, meta.stride(), meta.dtype) if isinstance(meta, torch.Tensor) else (kind, str(meta))
    if isinstance(argument, (list, tuple)):
        return tuple([_key(item) for item in argument])
    return (kind, argument) if kind is not float else (kind, repr(argument))


def _make_template(node: Node, results: list[Any]) -> Template:
    metas = [leaf.meta["val"] for leaf in tensor_arguments(node)]
    made = [meta for meta in results if isinstance(meta, torch.Tensor)]
    read = lambda leaf: leaf.meta["val"]  # noqa: E731
    args = torch.fx.map_arg(node.args, read)
    kwargs = torch.fx.map_arg(node.kwargs, read)
    found, source = mappings_of(node.target, args, kwargs, made)
    alternatives = found if isinstance(found, Alternatives) else None
    mappings = () if isinstance(found, Alternatives) else tuple(found)
    return Template(
        op=node.target,
        mappings=mappings,
        alternatives=alternatives,
        source=source,
        flops=op_flops(node.target, metas, made),
        input_shapes=tuple(tuple(meta.shape) for meta in metas),
        output_shapes=tuple(tuple(meta.shape) for meta in made),
        input_bytes=tuple(meta.numel() * meta.element_size() for meta in metas),
        output_bytes=tuple(meta.numel() * meta.element_size() for meta in made),
        splits_dims=any(
            len(dim) > 1 for mapping in mappings for dims in (*mapping.inputs, *mapping.outputs) for dim in dims
        ),
        is_view=is_view(node.target),
    )


def is_view(op: Any) -> bool:
    """Whether an op's results share their argument's bytes: by its schema, or usually (reshape, contiguous)."""
    if op in (torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default):
        return True
    return hasattr(op, "overloadpacket") and schema_facts(op).aliases is not None


def _matmul_flops(metas: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    return 2.0 * made[0].numel() * (metas[0].shape[-1] if metas[0].dim() else 1)


def _attention_flops(metas: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    return 4.0 * metas[0].numel() * metas[1].shape[-2]


def _convolution_flops(metas: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    return 2.0 * made[0].numel() * metas[1].numel() / max(1, metas[1].shape[0])


_FLOPS: dict[str, Callable[[list[torch.Tensor], list[torch.Tensor]], float]] = {
    "linear": _matmul_flops,
    "mm": _matmul_flops,
    "bmm": _matmul_flops,
    "matmul": _matmul_flops,
    "_grouped_mm": _matmul_flops,
    "scaled_dot_product_attention": _attention_flops,
    "conv1d": _convolution_flops,
    "conv2d": _convolution_flops,
    "conv3d": _convolution_flops,
}


def op_flops(op: Any, metas: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    """Floating point operations of one call: exact for matrix products and convolutions, one a result else."""
    name = op.name().rpartition("::")[2].partition(".")[0] if hasattr(op, "name") else ""
    if name == "addmm" and len(metas) == 3:
        return _matmul_flops(metas[1:], made)
    count = _FLOPS.get(name)
    if count is not None and metas:
        return count(metas, made)
    return float(sum(meta.numel() for meta in made))
