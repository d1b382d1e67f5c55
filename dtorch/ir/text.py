"""Graphs as text: Python-like, one line a node, the same bytes in every run.

In: nodes or the rows of a `Snapshot`. Out: lines such as
`%linear = aten.linear.default(%x, %w)  # f32[2, 64] [R, S(1)] @ model.py:12`; no ids, no addresses, no full paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from dtorch.ir.layout import Pending, Split, Whole
from dtorch.ir.row import Row
from dtorch.ir.spec import DTYPE_NAMES
from dtorch.torch_private import OpOverload


def graph_text(graph: Graph, level: str) -> str:
    """The whole graph as text, with a first line that says its level and size."""
    return rows_text([_row(node) for node in graph.nodes], level)


def rows_text(rows: Sequence[Row], level: str) -> str:
    """Like `graph_text`, for the rows of a snapshot."""
    return "\n".join([f"# {level} graph, {len(rows)} nodes", *map(row_line, rows), ""])


def node_line(node: Node) -> str:
    """The line of one node."""
    return row_line(_row(node))


def row_line(row: Row) -> str:
    """The line of one node as it was."""
    if row.node.op == "output":
        return f"return {_operand(row.args[0])}"
    if row.node.op == "placeholder":
        call = "argument()"
    else:
        shown = [_operand(argument) for argument in row.args]
        shown += [f"{key}={_operand(argument)}" for key, argument in row.kwargs.items()]
        call = f"{target_text(row.target)}({', '.join(shown)})"
    notes = " ".join(filter(None, _notes(row.meta)))
    return f"%{row.name} = {call}" + (f"  # {notes}" if notes else "")


def target_text(target: Any) -> str:
    """An op's name as written in graphs: `aten.mm.default`, `redistribute`, `getitem`; never an address."""
    return str(target) if type(target) is OpOverload else getattr(target, "__name__", type(target).__name__)


def value_text(value: Any) -> str:
    """`f32[2, 64]`; strides follow in braces where they are not those of a contiguous tensor."""
    if isinstance(value, torch.Tensor):
        text = f"{DTYPE_NAMES.get(value.dtype, str(value.dtype))}[{', '.join(map(str, value.shape))}]"
        return text if _is_dense(value) else text + f"{{{', '.join(map(str, value.stride()))}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(value_text, value))})"
    if isinstance(value, (int, float, bool, str)) or value is None:
        return repr(value)
    return str(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else type(value).__name__


def spec_text(spec: Any) -> str:
    """`[R, S(0)]`; a tuple of specs for a node with several results."""
    if spec is None:
        return ""
    if spec and all(isinstance(placed, (Whole, Pending, Split)) for placed in spec):
        return f"[{', '.join(map(repr, spec))}]"
    return f"({', '.join(spec_text(each) or '-' for each in spec)})"


def where_text(where: str) -> str:
    """`file.py:12` of `path/file.py:12 in function: text`, for places where the full line would drown the rest."""
    place = where.partition(" in ")[0]
    return place.replace("\\", "/").rpartition("/")[2]


def neighbourhood(nodes: Iterable[Node], centre: Node, reach: int = 2) -> str:
    """The lines of a node and of `reach` nodes on each side of it, the node's own marked by an arrow."""
    listed = list(nodes)
    index = listed.index(centre) if centre in listed else len(listed) - 1
    lines = []
    for node in listed[max(0, index - reach) : index + reach + 1]:
        lines.append(("  -> " if node is centre else "     ") + node_line(node))
    return "\n".join(lines)


def _row(node: Node) -> Row:
    return Row(node, node.name, node.target, node.args, node.kwargs, node.meta)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if type(size) is not int or type(stride) is not int:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _notes(meta: dict[str, Any]) -> Iterable[str]:
    yield value_text(meta["val"]) if "val" in meta else ""
    yield spec_text(meta.get("spec"))
    yield meta.get("stream") or ""
    yield meta.get("storage") or ""
    after = meta.get("after")
    yield f"after({', '.join('%' + name for name in after)})" if after else ""
    where = where_text(meta.get("where") or "")
    yield f"@ {where}" if where else ""


def _operand(argument: Any) -> str:
    if isinstance(argument, Node):
        return f"%{argument.name}"
    if isinstance(argument, (Whole, Pending, Split)):
        return repr(argument)
    if isinstance(argument, tuple):
        if argument and all(isinstance(placed, (Whole, Pending, Split)) for placed in argument):
            return spec_text(argument)
        return f"({', '.join(map(_operand, argument))}{',' if len(argument) == 1 else ''})"
    if isinstance(argument, list):
        return f"[{', '.join(map(_operand, argument))}]"
    if isinstance(argument, slice):
        return f"slice({', '.join(map(_operand, (argument.start, argument.stop, argument.step)))})"
    if isinstance(argument, (torch.dtype, torch.device, torch.memory_format, torch.layout)):
        return str(argument)
    return value_text(argument)
