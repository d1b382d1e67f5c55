"""Gives nodes that a pass made the metadata every node has: value, user's line, placement, origin.

In: snapshots before and after the pass, and which node replaced which. Out: the new nodes' `meta` filled in where
the pass left it empty. What a pass set itself is kept.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from dtorch.errors import VerifyError
from dtorch.ir import schema
from dtorch.ir.infer import infer_value
from dtorch.ir.ops import redistribute
from dtorch.ir.snapshot import Snapshot
from dtorch.passes.base import PassContext


def refresh_metadata(
    before: Snapshot,
    after: Snapshot,
    pass_name: str,
    origins: dict[str, str],
    context: PassContext,
) -> int:
    """Fill in the metadata of new nodes; returns how many there are.

    `origins` maps a new node's name to the name of the node whose uses it took over. Raises VerifyError for a new
    node whose target cannot be called on its operands' shapes.
    """
    old = {row.name: row.meta for row in before.rows}
    made = 0
    for node in after.new_nodes(before):
        made += 1
        replaced = origins.get(node.name)
        node.meta.setdefault("origin", (pass_name, replaced))
        inherited = old.get(replaced or "", {})
        if node.op == "output":
            continue
        if "val" not in node.meta:
            node.meta["val"] = _infer(node, context)
        _inherit_where(node, inherited)
        if "spec" not in node.meta:
            _inherit_spec(node, inherited)
    return made


def _infer(node: Node, context: PassContext) -> object:
    try:
        return infer_value(node, context.axis_sizes)
    except Exception as error:
        raise VerifyError(
            f"%{node.name} = {node.target} cannot be called on its operands: {type(error).__name__}: {error}"
        ) from error


def _inherit_where(node: Node, inherited: dict) -> None:
    if node.meta.get("where"):
        return
    lines = [inherited.get("where"), *(schema.where(operand) for operand in node.all_input_nodes)]
    line = next((line for line in lines if line), None)
    if line:
        node.meta["where"] = line


def _inherit_spec(node: Node, inherited: dict) -> None:
    """A redistribute says its own; another node takes over the placement of the node it replaces, if shaped alike."""
    if node.target is redistribute:
        node.meta["spec"] = node.args[2]
        return
    new, old = node.meta["val"], inherited.get("val")
    if (
        "spec" in inherited
        and isinstance(new, Tensor)
        and isinstance(old, Tensor)
        and schema.same_sizes(new.shape, old.shape)
    ):
        node.meta["spec"] = inherited["spec"]
