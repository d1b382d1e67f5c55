"""A picture of a graph at one moment that costs a walk over its nodes: no node is copied, text is made when asked for.

In: a GraphModule. Out: a `Snapshot` that compares with a later one, prints, and rebuilds a GraphModule. It relies
on torch.fx never changing an operand tuple in place: every rewrite of a node's operands makes new tuples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule, Node, map_arg

from dtorch.ir.row import Row
from dtorch.ir.text import rows_text
from dtorch.torch_private import lazy_graph_module


@dataclass(frozen=True)
class Snapshot:
    """The graph after the stage `stage`, at `level`; `rows` are its nodes in order."""

    stage: str
    level: str
    rows: tuple[Row, ...]
    _texts: list[str] = field(default_factory=list, repr=False, compare=False)

    def text(self) -> str:
        """The graph as deterministic text, one line a node (see `dtorch.ir.text`)."""
        if not self._texts:
            self._texts.append(rows_text(self.rows, self.level))
        return self._texts[0]

    def graph_module(self) -> GraphModule:
        """A new GraphModule with the nodes, names and metadata of that moment."""
        graph = Graph()
        made: dict[Node, Node] = {}
        for row in self.rows:
            args, kwargs = map_arg((row.args, row.kwargs), lambda node: made[node])
            copy = graph.create_node(row.node.op, row.target, args, kwargs, row.name, row.node.type)
            copy.meta = dict(row.meta)
            made[row.node] = copy
        return lazy_graph_module(graph)

    def changed_from(self, before: Snapshot) -> int:
        """How many nodes are new, gone, moved or different from an earlier snapshot of the same graph (0: equal)."""
        if len(before.rows) == len(self.rows) and all(map(Row.same, before.rows, self.rows)):
            return 0
        old = {row.node: row for row in before.rows}
        touched = sum(1 for row in self.rows if row.node not in old or not row.same(old[row.node]))
        return max(1, touched + len(old.keys() - {row.node for row in self.rows}))

    def new_nodes(self, before: Snapshot) -> Iterator[Node]:
        """The nodes, in order, that an earlier snapshot does not have."""
        old = {row.node for row in before.rows}
        return (row.node for row in self.rows if row.node not in old)


def take_snapshot(graph_module: GraphModule, stage: str, level: str) -> Snapshot:
    """Picture the graph as it is now."""
    rows = tuple(Row(n, n.name, n.target, n.args, n.kwargs, dict(n.meta)) for n in graph_module.graph.nodes)
    return Snapshot(stage, level, rows)
