"""What a graph's nodes carry besides their operands (`node.meta`), and questions every stage asks of a node.

In: a `torch.fx.Node`. Out: its value, placement, user line, stream and so on, by the names documented here; and
whether it is a collective, a view, random, or has effects. No stage writes a metadata key that is not listed.

| key | levels | holds |
|---|---|---|
| `val` | all | FakeTensor (tuple or list of them for multi-output ops), or an int; local: at mesh coordinate 0 |
| `spec` | global, once propagated | a `Spec`: one placement a mesh axis; for several results a tuple of Specs |
| `where` | all | the user's line: `file:line in function: text` |
| `origin` | all | `(pass name, name of the node replaced or None)` on nodes that a pass made |
| `stream` | scheduled | `"compute"` or `"comm:<axis>"` |
| `storage` | scheduled | `"pool"`, `"view"`, `"inplace"`, `"argument"`, `"output"` |
| `storage_of` | scheduled | for "inplace": the node whose bytes are written |
| `logical_shapes` | local and below, output node | shape of each result on one device |
| `after` | scheduled | tuple of names of nodes, on other streams, whose events this node waits for |
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.fx import Node

from dtorch.ir.layout import Pending, Spec, Split, Whole
from dtorch.ir.ops import LOCAL_INTEGERS, keep_first, redistribute, slice_scatter_in_place
from dtorch.torch_private import OpOverload, functional_collectives, let_fx_print, schema_facts, size_hint

STREAM_COMPUTE = "compute"
STORAGES = ("pool", "view", "inplace", "argument", "output")
OWN_OPS = (redistribute, keep_first, *LOCAL_INTEGERS)  # all without effects
PLACEMENT_CLASSES = (Whole, Pending, Split)
for _placement in PLACEMENT_CLASSES:  # global graphs hold them as constants of redistribute
    let_fx_print(_placement)


def value(node: Node) -> Any:
    """The FakeTensor (or tuple of them, or int) that stands for the node's result; None if it has none."""
    return node.meta.get("val")


def spec(node: Node) -> Spec | tuple[Spec, ...] | None:
    """The node's placement on every mesh axis; None before propagation and below the global level."""
    return node.meta.get("spec")


def where(node: Node) -> str:
    """The user's line that made the node, or "" if none is known."""
    return node.meta.get("where") or ""


def stream(node: Node) -> str:
    """The stream a scheduled node runs on."""
    return node.meta.get("stream", STREAM_COMPUTE)


def storage(node: Node) -> str | None:
    """The storage class of a scheduled node's result."""
    return node.meta.get("storage")


def after(node: Node) -> tuple[str, ...]:
    """Names of the nodes on other streams whose events a scheduled node waits for."""
    return node.meta.get("after", ())


def is_wait(node: Node) -> bool:
    """Whether the node waits for a started collective."""
    return node.target is functional_collectives()["wait_tensor"]


def is_collective(node: Node) -> bool:
    """Whether the node starts a collective (its wait is not one)."""
    return node.target in _collective_names() and not is_wait(node)


def collective_name(node: Node) -> str:
    """The short name of a collective, such as `all_reduce`."""
    return _collective_names()[node.target]


def collective_axis(node: Node) -> str:
    """The mesh axis that a collective's group is named by: its last argument."""
    return node.kwargs.get("group_name") or node.args[-1]


def collective_group_size(node: Node) -> int | None:
    """The group size that a gather or reduce-scatter names; None for collectives that name none."""
    position = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 2}.get(collective_name(node))
    return None if position is None else node.args[position]


def written_operands(node: Node) -> tuple[Node, ...]:
    """The operands that the node writes to."""
    if node.target is slice_scatter_in_place:
        return (node.args[0],)
    if type(node.target) is not OpOverload:
        return ()
    positions = schema_facts(node.target).mutates
    found = (node.args[position] for position in positions if position < len(node.args)) if positions else ()
    return tuple(operand for operand in found if isinstance(operand, Node))


def is_mutating(node: Node) -> bool:
    """Whether the node writes to an argument."""
    if type(node.target) is OpOverload:
        return bool(schema_facts(node.target).mutates)
    return node.target is slice_scatter_in_place


def is_random(node: Node) -> bool:
    """Whether the node draws from the random state (dropout that is off does not, attention without it neither)."""
    if type(node.target) is not OpOverload or not schema_facts(node.target).seeded:
        return False
    name = node.target.name()
    if name == "aten::scaled_dot_product_attention":
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    if name in ("aten::dropout", "aten::native_dropout", "aten::feature_dropout", "aten::alpha_dropout"):
        train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
        return train is not False
    return True


def has_effects(node: Node) -> bool:
    """Whether a node without readers must stay: it is an input or output, writes, draws random numbers or checks."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return node.op != "get_attr"
    if type(node.target) is OpOverload:
        return schema_facts(node.target).returns == 0 or is_mutating(node) or is_random(node)
    return node.target not in OWN_OPS and getattr(node.target, "__module__", "") not in _PURE_MODULES


def alias_source(node: Node) -> Node | None:
    """The operand whose memory the node's result shares, or None for a result with memory of its own.

    A wait returns its collective's buffer, a getitem an element of its tuple, a view its base. Ops that share only
    when they can (`reshape`, `contiguous`, `to`) are taken to share when their operand is laid out so that they do.
    """
    if node.target in (operator.getitem, slice_scatter_in_place) or is_wait(node):
        return node.args[0]
    if node.op != "call_function" or type(node.target) is not OpOverload:
        return None
    position = schema_facts(node.target).aliases
    if position is None or position >= len(node.args):
        return None
    base = node.args[position]
    if not isinstance(base, Node) or not _may_copy(node.target):
        return base if isinstance(base, Node) else None
    source, result = value(base), value(node)
    if not isinstance(source, Tensor) or not isinstance(result, Tensor) or source.dtype != result.dtype:
        return None
    if same_sizes(source.shape, result.shape):
        return base if same_sizes(source.stride(), result.stride()) else None
    return base if source.is_contiguous() else None


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether sizes or strides are equal, symbolic ones by their text: comparing those would add a guard."""
    return len(one) == len(other) and all(
        a is b or (a == b if type(a) is int and type(b) is int else str(a) == str(b))
        for a, b in zip(one, other, strict=True)
    )


def tensor_bytes(tensor: Any) -> int:
    """Bytes of one fake tensor's elements, sizes that are symbolic counted as the traced example's."""
    count = tensor.element_size()
    for size in tensor.shape:
        count *= size_hint(size)
    return count


_PURE_MODULES = frozenset(("_operator", "math", "builtins", "torch"))  # getitem, and arithmetic on symbolic sizes
_MAY_COPY = frozenset(("reshape", "contiguous", "to", "flatten", "unflatten", "type_as", "reshape_as", "ravel"))


def _may_copy(op: OpOverload) -> bool:
    return op.name().partition("::")[2].partition(".")[0] in _MAY_COPY


@lru_cache(maxsize=1)
def _collective_names() -> dict[Any, str]:
    return {op: name for name, op in functional_collectives().items()}
