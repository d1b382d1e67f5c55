"""The placement of one eager operation: where its results are, and what has to be moved for it.

In: an operation's expansion and the placements of its inputs. Out: a `PlacedStep`: the expansion as a small global
graph with specs and redistributes, shared by all calls that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph

from dtorch import options
from dtorch.capture.steps import Expansion, fill
from dtorch.ir import ops
from dtorch.ir.layout import WHOLE, Pending, Spec
from dtorch.ir.spec import tensor_text
from dtorch.mesh import DeviceMesh
from dtorch.recent import Recent
from dtorch.sharding.legal import legal_text
from dtorch.sharding.problem import tensor_arguments
from dtorch.sharding.propagate import place_openly


@dataclass(frozen=True)
class Sheet:
    """Holds a graph, as a GraphModule does; without code, which takes longer to make than all the rest."""

    graph: Graph


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A placed expansion. `outputs`: value (metadata) and placement of each; `moves`: its redistributes in words."""

    name: str
    graph: Sheet
    outputs: tuple[tuple[Any, Spec], ...]
    moves: str
    expansion: Expansion  # held, since the cache knows it by id


_PLACED: Recent[PlacedStep] = Recent()


def place_expansion(
    expansion: Expansion, values: Sequence[Any], specs: tuple[Spec, ...], mesh_shape: tuple[int, ...]
) -> PlacedStep:
    """Place an expansion for inputs of these metadata and placements."""
    key = (id(expansion), specs, mesh_shape)
    found = _PLACED.get(key)
    if found is None:
        made = _place(expansion, values, specs, mesh_shape)
        found = _PLACED.put(key, made, options.current().eager_cache_steps)
    return found


def must_redistribute(placed: PlacedStep, mesh: DeviceMesh) -> str:
    """Why a step that moves its inputs is refused: the op, where they are, all that is legal, the cheapest move."""
    node = next(node for node in placed.graph.graph.nodes if any(map(_is_move, node.all_input_nodes)))
    given = [leaf.args[0] if _is_move(leaf) else leaf for leaf in tensor_arguments(node)]
    texts = [tensor_text(leaf.meta["val"].dtype, leaf.meta["val"].shape, leaf.meta["spec"]) for leaf in given]
    axes = []
    for axis, name in enumerate(mesh.axis_names):
        if any(_is_move(leaf) and leaf.args[1][axis] != leaf.args[2][axis] for leaf in tensor_arguments(node)):
            axes.append(f"({', '.join(repr(leaf.meta['spec'][axis]) for leaf in given)}) on {name!r}")
    return (
        f"{node.target}({', '.join(texts)}) on {mesh.summary} needs a change of placement, and redistribution is "
        f"explicit here: the inputs are {' and '.join(axes)}.\n  Legal on each axis: {legal_text(node)}.\n"
        f"  The cheapest move: {placed.moves}. Do it with x.redistribute(placements=...), or allow moves by "
        "dtorch.explicit_redistribution(False)."
    )


def _is_move(node: Any) -> bool:
    return node.target is ops.redistribute


_IN_PARTS = frozenset(("full", "zeros", "ones", "empty"))  # every device can make its own part


def place_made(expansion: Expansion, spec: Spec, mesh_shape: tuple[int, ...]) -> PlacedStep:
    """A factory's expansion, without inputs, placed as `spec`: constants are made in parts, others whole and cut."""
    key = (id(expansion), spec, mesh_shape)
    found = _PLACED.get(key)
    if found is not None:
        return found
    graph = Graph()
    nodes: list[Any] = []
    whole = (WHOLE,) * len(mesh_shape)
    parts = tuple(WHOLE if type(placed) is Pending else placed for placed in spec)
    for step in expansion.steps:
        node = graph.call_function(step.target, fill(step.args, nodes), fill(step.kwargs, nodes))
        packet = getattr(step.target, "overloadpacket", step.target)
        in_parts = not node.all_input_nodes and packet.__name__ in _IN_PARTS
        node.meta.update(val=step.val, spec=parts if in_parts else whole)
        nodes.append(node)
    result = nodes[expansion.outputs[0].index]
    if result.meta["spec"] != spec:
        before, val = result.meta["spec"], result.meta["val"]
        result = graph.call_function(ops.redistribute, (result, before, spec))
        result.meta.update(val=val, spec=spec)
    graph.output((result,))
    module = Sheet(graph)
    made = PlacedStep(str(expansion.steps[0].target), module, ((result.meta["val"], spec),), "", expansion)
    return _PLACED.put(key, made, options.current().eager_cache_steps)


def _place(
    expansion: Expansion, values: Sequence[Any], specs: tuple[Spec, ...], mesh_shape: tuple[int, ...]
) -> PlacedStep:
    graph = Graph()
    nodes = []
    names: dict[str, Spec] = {}
    for index, (value, spec) in enumerate(zip(values, specs, strict=True)):
        node = graph.placeholder(f"x{index}")
        node.meta["val"] = value
        names[node.name] = spec
        nodes.append(node)
    for step in expansion.steps:
        node = graph.call_function(step.target, fill(step.args, nodes), fill(step.kwargs, nodes))
        node.meta["val"] = step.val
        nodes.append(node)
    results = tuple(nodes[output.index] for output in expansion.outputs)
    graph.output(results)
    module = Sheet(graph)
    placed = place_openly(module, names, mesh_shape)
    moves = [node for node in graph.nodes if node.target is ops.redistribute]
    shapes = [list(node.args[0].meta["val"].shape) for node in moves]
    text = "; ".join(f"{shape}{list(node.args[1])} to {list(node.args[2])}" for shape, node in zip(shapes, moves))
    name = str(expansion.steps[0].target) if expansion.steps else "identity"
    outputs = tuple((node.meta["val"], spec) for node, spec in zip(results, placed, strict=True))
    return PlacedStep(name, module, outputs, text, expansion)
