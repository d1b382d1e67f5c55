"""Give every value of a global graph a placement, and make each change of placement a node of the graph.

In: a global graph, its signature, what is asked of its inputs. Out: the same graph with `meta["spec"]` on every
tensor node and `redistribute` nodes where a reader wants a value placed otherwise than it was made. One mesh
axis is decided at a time, in mesh order, each knowing the cuts of the earlier ones.
"""

from __future__ import annotations

import operator
import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from dtorch.errors import ShardingWarning
from dtorch.ir import ops
from dtorch.ir.cost import CostModel
from dtorch.ir.layout import WHOLE, Pending, Spec, Whole
from dtorch.ir.signature import Signature
from dtorch.sharding.moves import At, Free
from dtorch.sharding.problem import HasGraph, Problem, read_problem
from dtorch.sharding.requests import DATA_AXES, Requests, given_on_axis
from dtorch.sharding.search import AxisChoice, choose
from dtorch.sharding.units import mark_units


@dataclass(frozen=True)
class Placement:
    """The outcome: specs of the graph's inputs and outputs, in signature order, and the estimated seconds an axis."""

    inputs: dict[str, Spec]
    outputs: tuple[Spec | None, ...]
    seconds: tuple[float, ...]


def propagate(
    graph: HasGraph,
    signature: Signature,
    requests: Requests,
    cost: CostModel | None = None,
) -> Placement:
    """Decide and write placements into `graph` (in place). Ops without a rule run replicated, with a warning."""
    cost = cost or CostModel()
    problem = read_problem(graph, signature)
    outputs = [problem.outputs[position] for position in requests.resident]
    problem.resident = frozenset(index for index in outputs if index is not None)
    mark_units(problem)
    tied = _tied(problem, signature)
    choices: list[AxisChoice] = []
    for axis, size in enumerate(requests.mesh_shape):
        batch = requests.axis_names[axis] in DATA_AXES
        given = given_on_axis(problem, signature, requests, axis, cost, [choice.placed for choice in choices])
        sizes = requests.mesh_shape[:axis]
        choices.append(choose(problem, given, choices, sizes, size, cost, tied, batch))
    _warn_without_rule(problem, choices, requests)
    return _write(graph, problem, choices, requests.mesh_shape, cost, tied)


def place_openly(graph: HasGraph, inputs: dict[str, Spec], mesh_shape: tuple[int, ...]) -> tuple[Spec, ...]:
    """Place a small graph whose inputs are where they are, and leave its results as they come (Pending too).

    For eager code, op by op. Writes specs and redistributes into `graph`; gives the results' specs, in order.
    """
    if all(type(placed) is Whole or size == 1 for spec in inputs.values() for placed, size in zip(spec, mesh_shape)):
        return _all_whole(graph, (WHOLE,) * len(mesh_shape))
    cost = CostModel()
    problem = read_problem(graph, Signature((), ()))
    problem.open_results = True
    choices: list[AxisChoice] = []
    for axis, size in enumerate(mesh_shape):
        given: dict[int, At | Free] = {index: (inputs[name][axis],) for name, index in problem.inputs.items()}
        choices.append(choose(problem, given, choices, mesh_shape[:axis], size, cost, {}))
    specs = list(zip(*[choice.placed for choice in choices]))
    _write_specs(problem, specs)
    writer = _Writer(graph, problem, specs, mesh_shape, cost)
    _rewire_all(writer, problem, choices, specs)
    return tuple(specs[index] for index in problem.outputs if index is not None)


def _all_whole(graph: HasGraph, whole: Spec) -> tuple[Spec, ...]:
    """Where no input is cut nothing is: what the search would find, whatever the rules say."""
    results: tuple[Node, ...] = ()
    for node in graph.graph.nodes:
        if node.op == "output":
            results = node.args[0]
            continue
        val = node.meta["val"]
        many = isinstance(val, (list, tuple))
        node.meta["spec"] = tuple([whole for part in val if isinstance(part, Tensor)]) if many else whole
    return (whole,) * len(results)


def _tied(problem: Problem, signature: Signature) -> dict[int, int]:
    """Results that are new values of an input: they must come out placed as that input is stored."""
    found = {}
    for spec, index in zip(signature.outputs, problem.outputs):
        if spec.mutates is not None and index is not None and spec.mutates in problem.inputs:
            source = problem.inputs[spec.mutates]
            if index != source:
                found[index] = source
    return found


def _warn_without_rule(problem: Problem, choices: list[AxisChoice], requests: Requests) -> None:
    if all(size == 1 for size in requests.mesh_shape):
        return
    said: set[Any] = set()
    for step in problem.steps:
        if step.template.source != "replicate" or step.template.op in said or not step.inputs:  # makes a tensor itself
            continue
        gathered = sum(
            problem.values[value].size_bytes
            for value in step.inputs
            if any(type(choice.placed[value]) is not Whole for choice in choices)
        )
        said.add(step.template.op)
        where = step.node.meta.get("where", "an unknown line")
        warnings.warn(
            f"{step.template.op} has no sharding rule, so it runs replicated at {where}; {gathered} bytes are "
            f"gathered for it at each step. Give it one: dtorch.register_sharding_rule({str(step.template.op)!r}, "
            '"a b, a b -> a b").',
            ShardingWarning,
            stacklevel=2,
        )


def _write(
    graph: HasGraph,
    problem: Problem,
    choices: list[AxisChoice],
    mesh_shape: tuple[int, ...],
    cost: CostModel,
    tied: dict[int, int],
) -> Placement:
    specs: list[Spec] = list(zip(*[choice.placed for choice in choices])) if choices else []
    writer = _Writer(graph, problem, specs, mesh_shape, cost)
    _write_specs(problem, specs)
    _rewire_all(writer, problem, choices, specs)
    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    out_specs: list[Spec | None] = []
    results = list(output.args[0])
    for place, index in enumerate(problem.outputs):
        if index is None:
            out_specs.append(None)
            continue
        if index in tied:
            target = specs[tied[index]]
        else:
            target = tuple(WHOLE if type(placed) is Pending else placed for placed in specs[index])
        if target != specs[index]:
            results[place] = writer.converted(index, target, output, results[place])
        out_specs.append(target)
    output.args = (tuple(results),)
    inputs = {name: specs[index] for name, index in problem.inputs.items()}
    return Placement(inputs, tuple(out_specs), tuple(choice.seconds for choice in choices))


def _write_specs(problem: Problem, specs: list[Spec]) -> None:
    for node, values in problem.of_node.items():
        if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
            node.meta["spec"] = specs[values[0]]
        else:
            many = isinstance(node.meta["val"], (list, tuple))
            node.meta["spec"] = tuple(specs[value] for value in values) if many else specs[values[0]]


def _rewire_all(writer: _Writer, problem: Problem, choices: list[AxisChoice], specs: list[Spec]) -> None:
    """Put redistributes in front of every step that wants an input placed otherwise than it was made."""
    for position, step in enumerate(problem.steps):
        wanted = [
            tuple([made if placed is None else placed for placed, made in zip(column, specs[value])])
            for value, column in zip(step.inputs, zip(*[choice.strategies[position].inputs for choice in choices]))
        ]
        if any(specs[value] != spec for value, spec in zip(step.inputs, wanted)):
            writer.rewire(step.node, step.inputs, wanted)


class _Writer:
    """Inserts redistribute nodes, one for each (value, placement), fed from the cheapest form there is."""

    def __init__(
        self, graph: HasGraph, problem: Problem, specs: list[Spec], mesh_shape: tuple[int, ...], cost: CostModel
    ) -> None:
        self.graph, self.problem, self.specs, self.mesh_shape, self.cost = graph, problem, specs, mesh_shape, cost
        self.forms: dict[int, dict[Spec, Node]] = {}

    def rewire(self, node: Node, values: tuple[int, ...], wanted: list[Spec]) -> None:
        """Replace the tensor arguments of `node`, position by position, by their converted forms."""
        pairs = iter(zip(values, wanted))

        def visit(argument: Any) -> Any:
            if isinstance(argument, Node):
                value, spec = next(pairs)
                return argument if spec == self.specs[value] else self.converted(value, spec, node, argument)
            if isinstance(argument, (list, tuple)):
                return type(argument)(visit(item) for item in argument)
            return argument

        args = tuple(visit(argument) for argument in node.args)
        kwargs = {key: visit(argument) for key, argument in node.kwargs.items()}
        node.args, node.kwargs = args, kwargs

    def converted(self, value: int, spec: Spec, before: Node, plain: Node) -> Node:
        """The node that holds `value` placed as `spec`, made before `before` if there is none yet."""
        forms = self.forms.setdefault(value, {})
        forms.setdefault(self.specs[value], plain)
        if spec not in forms:
            size = self.problem.values[value].size_bytes
            source = min(
                forms,
                key=lambda form: sum(
                    self.cost.convert(a, b, size, n) for a, b, n in zip(form, spec, self.mesh_shape)
                ),
            )
            with self.graph.graph.inserting_before(before):
                node = self.graph.graph.call_function(ops.redistribute, (forms[source], source, spec))
            node.meta.update(val=plain.meta["val"], spec=spec, where=before.meta.get("where", ""))
            forms[spec] = node
        return forms[spec]
