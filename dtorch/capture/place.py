"""The placement of one eager operation: where its results are, and what has to be moved for it.

In: an operation's expansion and the placements of its inputs. Out: a `PlacedStep`: the expansion as a small global
graph with specs and redistributes, shared by all calls that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from dtorch.capture.expand import Expansion, fill
from dtorch.ir import ops
from dtorch.ir.layout import WHOLE, Pending, Spec
from dtorch.sharding.propagate import place_openly


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A placed expansion. `outputs`: value (metadata) and placement of each; `moves`: its redistributes in words."""

    name: str
    graph: GraphModule
    outputs: tuple[tuple[Any, Spec], ...]
    moves: str
    expansion: Expansion  # held, since the cache knows it by id


_PLACED: dict[Any, PlacedStep] = {}
_PLACED_MAX = 20_000


def place_expansion(
    expansion: Expansion, values: Sequence[Any], specs: tuple[Spec, ...], mesh_shape: tuple[int, ...]
) -> PlacedStep:
    """Place an expansion for inputs of these metadata and placements."""
    key = (id(expansion), specs, mesh_shape)
    found = _PLACED.get(key)
    if found is None:
        if len(_PLACED) >= _PLACED_MAX:
            _PLACED.clear()
        found = _PLACED[key] = _place(expansion, values, specs, mesh_shape)
    return found


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
    module = GraphModule(torch.nn.Module(), graph)
    made = PlacedStep(str(expansion.steps[0].target), module, ((result.meta["val"], spec),), "", expansion)
    _PLACED[key] = made
    return made


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
    module = GraphModule(torch.nn.Module(), graph)
    placed = place_openly(module, names, mesh_shape)
    moves = [node for node in graph.nodes if node.target is ops.redistribute]
    shapes = [list(node.args[0].meta["val"].shape) for node in moves]
    text = "; ".join(f"{shape}{list(node.args[1])} to {list(node.args[2])}" for shape, node in zip(shapes, moves))
    name = str(expansion.steps[0].target) if expansion.steps else "identity"
    outputs = tuple((node.meta["val"], spec) for node, spec in zip(results, placed, strict=True))
    return PlacedStep(name, module, outputs, text, expansion)
