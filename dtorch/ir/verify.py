"""Checks that a graph keeps the promises of its level (the table in docs/passes.md), after every pass.

In: a GraphModule, its level, and optionally the signature and the mesh axes' sizes. Out: nothing, or a VerifyError
that names the node, the user's line and the node's neighbours. One walk; about 5 µs a node.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import torch
from torch.fx import GraphModule, Node

from dtorch.errors import VerifyError
from dtorch.ir import schema
from dtorch.ir.infer import infer_value
from dtorch.ir.layout import Split
from dtorch.ir.ops import LOCAL_INTEGERS, keep_first, redistribute
from dtorch.ir.signature import Signature
from dtorch.ir.text import neighbourhood, spec_text, value_text
from dtorch.ir.verify_schedule import check_schedule
from dtorch.torch_private import OpOverload

Level = Literal["global", "local", "scheduled"]


def verify(
    graph_module: GraphModule,
    level: Level,
    signature: Signature | None = None,
    axis_sizes: Mapping[str, int] | None = None,
    *,
    deep: bool = False,
) -> None:
    """Raise VerifyError at the first node that breaks a rule of `level`.

    `axis_sizes` are the mesh axes in order, by name. `deep` also calls every op on its operands' fake values and
    compares the result with the recorded one (about 0.1 ms a node: for tests and for hunting a wrong pass).
    """
    _Checker(graph_module, level, signature, axis_sizes, deep).run()


def fail(node: Node, rule: str) -> NoReturn:
    """Raise the VerifyError for a node: the rule it breaks, the user's line, its neighbours."""
    where = schema.where(node)
    raise VerifyError(
        f"%{node.name}: {rule}\n" + (f"  from {where}\n" if where else "") + neighbourhood(node.graph.nodes, node)
    )


class _Checker:
    """One verification; the methods check one node each and share what the walk has learnt."""

    def __init__(
        self,
        graph_module: GraphModule,
        level: Level,
        signature: Signature | None,
        axis_sizes: Mapping[str, int] | None,
        deep: bool,
    ) -> None:
        self.nodes = list(graph_module.graph.nodes)
        self.level, self.signature, self.axis_sizes, self.deep = level, signature, axis_sizes, deep
        self.seen: set[Node] = set()
        self.names: set[str] = set()
        self.placed = level == "global" and any("spec" in node.meta for node in self.nodes)

    def run(self) -> None:
        if not self.nodes or self.nodes[-1].op != "output":
            raise VerifyError("The graph does not end in an output node.")
        inputs = 0
        for position, node in enumerate(self.nodes):
            self.check_operands(node)
            if node.op == "placeholder":
                if inputs != position:
                    fail(node, "stands after a computation; all inputs must come first")
                self.check_input(node, inputs)
                inputs += 1
                self.check_value(node)
            elif node.op == "call_function":
                self.check_call(node)
                self.check_value(node)
            elif node is not self.nodes[-1]:
                fail(node, f"is a {node.op}; graphs hold placeholders, call_function and one output at the end")
            self.seen.add(node)
            self.names.add(node.name)
        self.check_output(self.nodes[-1], inputs)
        if self.level == "scheduled":
            check_schedule(self.nodes, self.axis_sizes, fail, self.donated())

    def donated(self) -> set[str] | None:
        """Inputs whose bytes a scheduled graph may overwrite: state and buffers that it gives a new value to."""
        if self.signature is None:
            return None
        mutated = {described.mutates for described in self.signature.outputs}
        owned = (item.name for item in self.signature.inputs if item.kind in ("state", "buffer"))
        return {name for name in owned if name in mutated}

    def check_operands(self, node: Node) -> None:
        if node.name in self.names:
            fail(node, "has the name of an earlier node")
        for operand in node.all_input_nodes:
            if operand not in self.seen:
                exists = operand in self.nodes
                fail(node, f"reads %{operand.name}, which {'comes later' if exists else 'is not in the graph'}")

    def check_input(self, node: Node, index: int) -> None:
        if self.signature is None:
            return
        inputs = self.signature.inputs
        if index >= len(inputs):
            fail(node, f"is input {index}, but the signature has {len(inputs)} inputs")
        if node.name != inputs[index].name:
            fail(node, f'is input {index}, which the signature calls "{inputs[index].name}"')

    def check_output(self, node: Node, inputs: int) -> None:
        results = node.args[0]
        if not isinstance(results, tuple):
            fail(node, f"returns a {type(results).__name__}; the output is one flat tuple")
        for result in results:
            if isinstance(result, (tuple, list, dict)):
                fail(node, f"holds a {type(result).__name__}; the output tuple is flat")
        if self.signature is None:
            return
        if inputs != len(self.signature.inputs):
            fail(node, f"ends a graph of {inputs} inputs; the signature has {len(self.signature.inputs)}")
        if len(results) != len(self.signature.outputs):
            fail(node, f"returns {len(results)} values; the signature has {len(self.signature.outputs)}")
        for result, described in zip(results, self.signature.outputs, strict=True):
            for what, name in (("mutates", described.mutates), ("aliases", described.aliases)):
                if name is not None and name not in self.signature.by_name:
                    fail(node, f'"{described.name}" {what} "{name}", which is not an input')
            if described.mutates is not None and not isinstance(result, Node):
                fail(node, f'the new value of input "{described.mutates}" is {result!r}, not a node')

    def check_call(self, node: Node) -> None:
        target = node.target
        if type(target) is OpOverload:
            if schema.is_collective(node):
                self.check_collective(node)
            elif schema.is_wait(node):
                self.check_wait(node)
            elif self.level != "scheduled" and schema.is_mutating(node):
                fail(node, f"{target} writes to its operand; {self.level} graphs are functional")
        elif target is redistribute:
            if self.level != "global":
                fail(node, f"redistribute stands in global graphs only, not in a {self.level} one")
        elif target in LOCAL_INTEGERS or target is keep_first:
            if self.level == "global":
                fail(node, f"{target.__name__} depends on the mesh coordinate, which a global graph does not know")
            self.check_axes(node)
        elif target is operator.getitem:
            self.check_getitem(node)
        elif schema.is_mutating(node):
            if self.level != "scheduled":
                fail(node, f"{target.__name__} writes to its operand; {self.level} graphs are functional")
        elif isinstance(schema.value(node), torch.Tensor):
            name = getattr(target, "__name__", type(target).__name__)
            fail(node, f"{name} is not an ATen overload, getitem or an op of dtorch.ir.ops")

    def check_collective(self, node: Node) -> None:
        if self.level == "global":
            fail(node, "is a collective; a global graph says redistribute instead")
        axis = schema.collective_axis(node)
        if not isinstance(axis, str):
            fail(node, f"its group is {axis!r}; groups are named by mesh axis")
        if self.axis_sizes is not None:
            if axis not in self.axis_sizes:
                fail(node, f'its group is "{axis}"; the mesh axes are {", ".join(self.axis_sizes)}')
            size = schema.collective_group_size(node)
            if size is not None and size != self.axis_sizes[axis]:
                fail(node, f'its group size is {size}; mesh axis "{axis}" has {self.axis_sizes[axis]}')
        readers = list(node.users)
        if len(readers) != 1 or not schema.is_wait(readers[0]):
            shown = ", ".join(f"%{reader.name}" for reader in readers) or "nothing"
            fail(node, f"a started collective is read by exactly one wait_tensor; this one is read by {shown}")

    def check_wait(self, node: Node) -> None:
        if self.level == "global":
            fail(node, "waits for a collective; a global graph has none")
        if not isinstance(node.args[0], Node) or not schema.is_collective(node.args[0]):
            fail(node, "wait_tensor reads something that is not a collective")

    def check_axes(self, node: Node) -> None:
        if self.axis_sizes is None or node.target in LOCAL_INTEGERS[2:]:
            return
        axes = [node.args[1]] if node.target is keep_first else [cut[2] for cut in node.args[1]]
        for axis in axes:
            if not isinstance(axis, int) or not 0 <= axis < len(self.axis_sizes):
                fail(node, f"names mesh axis {axis!r}; the mesh has axes 0 to {len(self.axis_sizes) - 1}")

    def check_getitem(self, node: Node) -> None:
        source, index = node.args
        results = schema.value(source) if isinstance(source, Node) else None
        if not isinstance(results, (tuple, list)) or not isinstance(index, int) or index >= len(results):
            fail(node, f"takes element {index!r} of something that does not have it")
        if not _alike(results[index], schema.value(node)):
            fail(node, f"is {value_text(schema.value(node))}, but that element is {value_text(results[index])}")

    def check_value(self, node: Node) -> None:
        if "val" not in node.meta:
            fail(node, 'has no meta["val"]')
        result = node.meta["val"]
        if self.placed:
            self.check_spec(node, result)
        if node.target is redistribute and not _alike(result, schema.value(node.args[0])):
            fail(node, "redistribute must not change the logical shape or dtype")
        if self.level == "scheduled" and isinstance(result, torch.Tensor):
            if any(type(size) is not int for size in result.shape):
                fail(node, f"has the symbolic shape {value_text(result)}; scheduled graphs are concrete")
        if self.deep and node.op == "call_function":
            self.check_deep(node, result)

    def check_spec(self, node: Node, result: Any) -> None:
        spec = node.meta.get("spec")
        if isinstance(result, torch.Tensor):
            self.check_one_spec(node, spec, result)
        elif isinstance(result, (tuple, list)):
            if not isinstance(spec, tuple) or len(spec) != len(result):
                fail(node, f'its meta["spec"] must be a tuple of {len(result)} Specs, one for each result')
            for each_spec, each in zip(spec, result, strict=True):
                if isinstance(each, torch.Tensor):
                    self.check_one_spec(node, each_spec, each)
        if node.target is redistribute:
            source, wanted = node.args[0].meta.get("spec"), node.args[1:]
            if wanted[0] != source:
                fail(node, f"redistributes from {spec_text(wanted[0])}, but its operand is {spec_text(source)}")
            if wanted[1] != spec:
                fail(node, f'redistributes to {spec_text(wanted[1])}, but its meta["spec"] is {spec_text(spec)}')

    def check_one_spec(self, node: Node, spec: Any, result: torch.Tensor) -> None:
        if not isinstance(spec, tuple) or not all(isinstance(placed, schema.PLACEMENT_CLASSES) for placed in spec):
            fail(node, f'has no placement: meta["spec"] is {spec!r}')
        if self.axis_sizes is not None and len(spec) != len(self.axis_sizes):
            axes = f"{len(spec)} mesh axes; the mesh has {len(self.axis_sizes)}"
            fail(node, f"its placement {spec_text(spec)} is for {axes}")
        for placed in spec:
            if type(placed) is not Split:
                continue
            if not 0 <= placed.dim < result.dim():
                fail(node, f"is {placed!r}, but has {result.dim()} dimensions")
            size, cut = result.shape[placed.dim], placed.outer * placed.unit
            if type(size) is int and size % cut:
                fail(node, f"is {placed!r}, but dimension {placed.dim} of {size} is no multiple of {cut}")

    def check_deep(self, node: Node, result: Any) -> None:
        try:
            found = infer_value(node, self.axis_sizes)
        except Exception as error:
            fail(node, f"{node.target} cannot be called on its operands: {type(error).__name__}: {error}")
        if not _alike(found, result):
            fail(node, f"is recorded as {value_text(result)}, but its operands make it {value_text(found)}")


def _alike(one: Any, other: Any) -> bool:
    """Whether two fake results have the same structure, shapes and dtypes."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and schema.same_sizes(one.shape, other.shape)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other)
