"""When each value of a graph is last read, and how many bytes are live at each node, in list order.

In: a graph whose nodes have `meta["val"]`. Out: `LiveRanges`. Values that share memory (views, waits, elements of a
tuple) share one storage, and a collective's operand lives until its wait. Linear in nodes and edges.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from dtorch.ir.schema import alias_source, is_wait, tensor_bytes, value


@dataclass
class LiveRanges:
    """Live ranges over positions in the graph's list of nodes.

    `storages[node]`: the storages a node's result lives in (one for a tensor, one for each element of a tuple).
    For storage `s`: `sizes_bytes[s]`, the position `born[s]` that makes it and `last[s]` that reads it last (its own
    position if nothing does), and whether it belongs to an argument of the graph (`argument[s]`).
    `last_read[node]`: position of the last node that names `node` as an operand; absent if none does.
    """

    storages: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    sizes_bytes: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    argument: list[bool] = field(default_factory=list)
    last_read: dict[Node, int] = field(default_factory=dict)
    length: int = 0

    def curve_bytes(self) -> list[int]:
        """Bytes that the graph's own values (not its arguments) hold while the node at each position runs."""
        change = [0] * (self.length + 1)
        for size, begin, end, argument in zip(self.sizes_bytes, self.born, self.last, self.argument, strict=True):
            if not argument:
                change[begin] += size
                change[end + 1] -= size
        live, curve = 0, []
        for step in change[: self.length]:
            live += step
            curve.append(live)
        return curve

    def peak_bytes(self) -> int:
        """The most bytes of the graph's own values, results included and arguments excluded, that live at once."""
        return max(self.curve_bytes(), default=0)

    def argument_bytes(self) -> int:
        """Bytes of all arguments: weights, state and inputs."""
        return sum(size for size, argument in zip(self.sizes_bytes, self.argument, strict=True) if argument)

    def _add(self, tensor: Any, position: int, argument: bool) -> int:
        self.sizes_bytes.append(tensor_bytes(tensor) if isinstance(tensor, Tensor) else 0)
        self.born.append(position)
        self.last.append(position)
        self.argument.append(argument)
        return len(self.born) - 1


def live_ranges(graph: Graph) -> LiveRanges:
    """Work out the live ranges of a graph's values."""
    ranges = LiveRanges()
    storages, last, last_read = ranges.storages, ranges.last, ranges.last_read
    for position, node in enumerate(graph.nodes):
        result = value(node)
        source = alias_source(node)
        if source is not None:
            shared = storages[source]
            if node.target is operator.getitem and len(shared) > 1:
                shared = (shared[node.args[1]],)
            storages[node] = shared
        elif isinstance(result, (tuple, list)):
            storages[node] = tuple(ranges._add(each, position, False) for each in result)
        else:
            storages[node] = (ranges._add(result, position, node.op == "placeholder"),)
        operands = node.all_input_nodes
        for operand in operands:
            last_read[operand] = position
            for storage in storages[node] if node.target is operator.getitem else storages[operand]:
                last[storage] = position
        if is_wait(node) and source is not None:
            for operand in source.all_input_nodes:
                for storage in storages[operand]:
                    last[storage] = position
        ranges.length = position + 1
    return ranges


def peak_bytes(graph: Graph) -> int:
    """The most bytes of a graph's own values that live at once (arguments excluded, results included)."""
    return live_ranges(graph).peak_bytes()
