"""One node of a graph as it was at a moment: what snapshots hold and text is made of.

In: the fields of an fx node. Out: a `Row`, which keeps the operand tuples themselves: fx never changes one in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

_WATCHED = ("spec", "stream", "storage", "after")  # metadata whose change is a change of the graph


@dataclass(frozen=True)
class Row:
    """One node as it was."""

    node: Node
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]

    def same(self, other: Row) -> bool:
        """Whether nothing that counts has changed between two pictures of a node."""
        return (
            self.node is other.node
            and self.args is other.args
            and self.kwargs is other.kwargs
            and self.target is other.target
            and all(self.meta.get(key) is other.meta.get(key) for key in _WATCHED)
        )
