"""From a scheduled graph to the plan: registers, kernel names, and where each register is freed.

In: a scheduled graph, the signature, the placements of inputs and outputs. Out: an `ir.plan.Plan`.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node

from dtorch.errors import PlanError
from dtorch.ir import ops
from dtorch.ir.plan import PYTHON, Arithmetic, Instruction, LocalBegin, LocalSize, Plan, PlanInput, PlanOutput, Ref
from dtorch.ir.signature import Signature
from dtorch.sharding.propagate import Placement


def emit(
    graph: GraphModule,
    signature: Signature,
    placement: Placement,
    mesh_shape: tuple[int, ...],
    axis_names: tuple[str, ...],
) -> Plan:
    """Write the plan of a scheduled graph."""
    emitter = _Emitter(graph)
    instructions = emitter.instructions()
    mutated = {spec.mutates for spec in signature.outputs if spec.mutates is not None}
    inputs = tuple(
        PlanInput(
            spec.name,
            spec.kind,
            spec.target,
            emitter.register[node],
            tuple(spec.shape),
            spec.dtype,
            placement.inputs[spec.name],
            donated=spec.kind in ("state", "buffer") and spec.name in mutated,
        )
        for spec, node in zip(signature.inputs, emitter.placeholders)
    )
    outputs = []
    shapes = emitter.nodes[-1].meta["logical_shapes"]
    for spec, node, out, shape in zip(signature.outputs, emitter.results, placement.outputs, shapes):
        outputs.append(
            PlanOutput(
                spec.name,
                emitter.register[node],
                shape,
                node.meta["val"].dtype,
                out if out is not None else (),
                spec.mutates,
                spec.aliases,
                inplace=spec.mutates is not None and _in_place_of(node) == spec.mutates,
            )
        )
    return Plan(
        tuple(mesh_shape),
        tuple(axis_names),
        inputs,
        instructions,
        tuple(outputs),
        len(emitter.register),
        tuple(emitter.lines),
    )


def _in_place_of(node: Node) -> str | None:
    """The input whose bytes a node's result is written into, through any chain of in-place nodes."""
    while node.op == "call_function" and node.meta.get("storage_of") is not None:
        node = node.meta["storage_of"]
    return node.name if node.op == "placeholder" else None


class _Emitter:
    def __init__(self, graph: GraphModule) -> None:
        nodes = list(graph.graph.nodes)
        self.nodes = nodes
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        output = nodes[-1]
        self.results: list[Node] = list(output.args[0])
        self.register: dict[Node, int] = {}
        self.expressions: dict[Node, Any] = {}
        self.lines: list[str] = []
        self._line_index: dict[str, int] = {}
        for node in nodes:
            if node.op == "output":
                continue
            if node.target in ops.LOCAL_INTEGERS:
                self.expressions[node] = self._expression(node)
            else:
                self.register[node] = len(self.register)

    def instructions(self) -> tuple[Instruction, ...]:
        position: dict[str, int] = {}
        last: dict[Node, Node] = {}
        for node in self.nodes:
            for operand in node.all_input_nodes:
                last[operand] = node
        dying: dict[Node, list[int]] = {}
        results = set(self.results)
        for operand, reader in last.items():
            if operand in self.register and operand not in results and reader.op == "call_function":
                if operand.op == "call_function":
                    dying.setdefault(reader, []).append(self.register[operand])
        made: list[Instruction] = []
        for node in self.nodes:
            if node.op != "call_function" or node in self.expressions:
                continue
            position[node.name] = len(made)
            frees = dying.get(node, [])
            if node not in last and node not in results:
                frees = [*frees, self.register[node]]
            made.append(
                Instruction(
                    kernel_name(node.target),
                    tuple(self._argument(argument) for argument in node.args),
                    tuple((key, self._argument(argument)) for key, argument in node.kwargs.items()),
                    self.register[node],
                    tuple(sorted(frees)),
                    node.meta["stream"],
                    tuple(sorted(position[name] for name in node.meta["after"] if name in position)),
                    self._line(node.meta.get("where", "")),
                )
            )
        return tuple(made)

    def _line(self, where: str) -> int:
        if where not in self._line_index:
            self._line_index[where] = len(self.lines)
            self.lines.append(where)
        return self._line_index[where]

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return self.expressions[argument] if argument in self.expressions else Ref(self.register[argument])
        if isinstance(argument, tuple):
            return tuple(self._argument(item) for item in argument)
        if isinstance(argument, list):
            return [self._argument(item) for item in argument]
        if isinstance(argument, slice):
            raise PlanError(f"a plan cannot hold {argument}: slices are lowered to aten.slice before this")
        return argument

    def _expression(self, node: Node) -> Any:
        if node.target is ops.local_size:
            return LocalSize(*node.args)
        if node.target is ops.local_begin:
            return LocalBegin(*node.args)
        operands = tuple(self.expressions[a] if isinstance(a, Node) else a for a in node.args[1:])
        return Arithmetic(node.args[0], operands)


def kernel_name(target: Any) -> str:
    """How the runtime finds a kernel: "aten.add.Tensor", "dtorch.keep_first", "getitem", "python:module:function"."""
    if target is operator.getitem:
        return "getitem"
    if hasattr(target, "overloadpacket"):
        return str(target)
    if target.__module__.split(".")[0] == "dtorch":
        return f"dtorch.{target.__name__}"
    if "<" in target.__qualname__:
        raise PlanError(
            f"the function {target.__qualname__} of {target.__module__} is in the graph, and a plan names functions by "
            "module and name: define it at the top level of a module, or register it with torch.library.custom_op."
        )
    return f"{PYTHON}{target.__module__}:{target.__qualname__}"
