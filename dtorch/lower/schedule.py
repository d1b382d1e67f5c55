"""From the local graph to the scheduled one: every node gets a stream, the events it waits for, and a storage class.

In: a local graph and the signature. Out: the same graph with `meta["stream"]`, `meta["after"]`, `meta["storage"]`.
Collectives run on their axis's communication stream, everything else on the compute stream; the order of the
graph is kept, so the order of communication launches is one and the same on all devices.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from dtorch.ir.schema import STREAM_COMPUTE, alias_source, collective_axis, is_collective, is_wait


def schedule(graph: GraphModule) -> GraphModule:
    """Assign streams, events and storage classes, in place."""
    results = set()
    for node in graph.graph.nodes:
        if node.op == "output":
            results = set(node.all_input_nodes)
    for node in graph.graph.nodes:
        node.meta["stream"] = f"comm:{collective_axis(node)}" if is_collective(node) else STREAM_COMPUTE
        node.meta["after"] = _crossing(node)
        node.meta["storage"] = _storage(node, results)
    return graph


def _crossing(node: Node) -> tuple[str, ...]:
    """Names of the operands made on another stream; a wait is where compute meets communication again."""
    own = node.meta["stream"]
    waited = []
    for operand in node.all_input_nodes:
        there = operand.meta.get("stream", STREAM_COMPUTE)
        if is_wait(operand):
            there = STREAM_COMPUTE
        if there != own and operand.op == "call_function":
            waited.append(operand.name)
    return tuple(waited)


def _storage(node: Node, results: set[Node]) -> str:
    if node.op in ("placeholder", "get_attr"):
        return "argument"
    if node in results:
        return "output"
    return "view" if alias_source(node) is not None else "pool"
