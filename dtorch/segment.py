"""A segment of eager code on its way to a plan: the placed steps of a trace joined into one global graph.

In: a `Trace` of the eager recorder. Out: a `Compiled`, by the same stages and passes as a module's. Placements are
not chosen again: what the user saw on a tensor is what it has.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from dtorch.capture.eager import Called, Entered, Moved, State, Trace
from dtorch.capture.traced import Traced
from dtorch.compiler import Compiled, Settings, compile_program
from dtorch.errors import PlanError
from dtorch.ir import ops
from dtorch.ir.layout import Spec
from dtorch.ir.signature import InputSpec, OutputSpec, Signature
from dtorch.sharding.propagate import Placement
from dtorch.sharding.requests import Requests


def compile_segment(
    trace: Trace, mesh_shape: tuple[int, ...], axis_names: tuple[str, ...], settings: Settings
) -> Compiled:
    """Join and compile a trace."""
    traced, placement = join(trace)
    return compile_program(traced, Requests({}, axis_names, mesh_shape), settings, placement)


def join(trace: Trace) -> tuple[Traced, Placement]:
    """The global graph of a trace, with specs on every node, and the placements of its inputs and results."""
    graph = Graph()
    values: dict[int, Node] = {}
    inputs: list[InputSpec] = []
    placed_inputs: dict[str, Spec] = {}
    last: Node | None = None
    for state in _live(trace):
        entry = state.entry
        if isinstance(entry, Entered):
            with graph.inserting_before() if last is None else graph.inserting_after(last):  # inputs come first
                node = last = graph.placeholder(f"in{len(inputs)}")
            node.meta.update(val=state.outputs[0].meta["val"], spec=entry.spec)
            meta = entry.meta
            inputs.append(InputSpec(node.name, "user", node.name, tuple(meta.shape), meta.dtype, meta.stride))
            placed_inputs[node.name] = entry.spec
            values[state.outputs[0].index] = node
        elif isinstance(entry, Moved):
            source = values[entry.source]
            node = graph.call_function(ops.redistribute, (source, entry.before, entry.after))
            node.meta.update(val=source.meta["val"], spec=entry.after, where="")
            values[state.outputs[0].index] = node
        elif isinstance(entry, Called):
            for slot, node in zip(state.outputs, _inlined(graph, entry, values), strict=True):
                values[slot.index] = node
        else:
            raise PlanError(f"a trace holds a step of unknown kind: {entry!r}")
    results = tuple(values[index] for index in trace.wanted)
    graph.output(results)
    signature = Signature(tuple(inputs), tuple(OutputSpec(node.name) for node in results))
    module = GraphModule(torch.nn.Module(), graph)
    specs = tuple(node.meta["spec"] for node in results)
    return Traced(module, signature, {}), Placement(placed_inputs, specs, ())


def _live(trace: Trace) -> list[State]:
    """The steps that the wanted values come from, and all inputs: what is dead shall cost nothing, nor fail."""
    needed = set(trace.wanted)
    found = []
    for state in reversed(trace.state.path()):
        entry = state.entry
        if isinstance(entry, Entered) or any(slot.index in needed for slot in state.outputs):
            found.append(state)
            needed.update(entry.inputs if isinstance(entry, Called) else ())
            needed.update((entry.source,) if isinstance(entry, Moved) else ())
    return found[::-1]


def _inlined(graph: Graph, entry: Called, values: dict[int, Node]) -> list[Node]:
    """Copy a placed step's nodes; the nodes of its results."""
    copies: dict[Node, Node] = {}
    given = iter(entry.inputs)
    for node in entry.placed.graph.graph.nodes:
        if node.op == "placeholder":
            copies[node] = _as_placed(graph, values[next(given)], node.meta["spec"])
        elif node.op == "output":
            return [copies[result] for result in node.args[0]]
        else:
            copy = graph.node_copy(node, copies.__getitem__)
            copy.meta = {**node.meta, "where": entry.where}
            copies[node] = copy
    raise PlanError("a placed step has no output")


def _as_placed(graph: Graph, source: Node, spec: Spec) -> Node:
    """The source under the step's name for its placement: on an axis of one device, whole and cut are one."""
    have = source.meta["spec"]
    if have == spec:
        return source
    node = graph.call_function(ops.redistribute, (source, have, spec))
    node.meta.update(val=source.meta["val"], spec=spec, where="")
    return node
