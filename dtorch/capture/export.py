"""Dynamic capture: torch.export without Dynamo, for graphs whose batch, sequence or other sizes stay symbolic.

In: a model and example arguments. Out: `Traced` with symbolic sizes; functional, composites kept, as static
capture gives. `concretize` (specialize.py) makes it static for given arguments.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.expand import DROPPED, is_inactive_dropout
from dtorch.capture.host import shared_copy
from dtorch.capture.module import aliased_argument, flatten_arguments
from dtorch.capture.results import result_structure
from dtorch.capture.structure import Container, Flat, Static, Structure
from dtorch.capture.traced import Traced
from dtorch.errors import CaptureError, DataDependentError, InputError
from dtorch.ir.signature import InputSpec, OutputSpec, Signature

aten = torch.ops.aten
Dynamic = bool | Mapping[str, Any] | None
ASSERTIONS = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"}


def export_module(
    model: torch.nn.Module,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Dynamic = None,
) -> Traced:
    """Export one forward of a model.

    dynamic_shapes: None: every size as in the example; True: every size may differ where the model allows it; or, for
    arguments by name or path (`input_ids`, `cache.layers.0.keys`), `{dim: name}` of the sizes that may, equal
    names for equal sizes. Sizes 0 and 1 in an example stay fixed, as torch.export has it: give examples of at
    least 2.
    """
    copied = shared_copy(model)
    given = flatten_arguments(copied, args, kwargs or {})
    wrapper = _FlatForward(copied, given)
    shapes = _dynamic_shapes(given, dynamic_shapes)
    leaves = tuple(given.leaves)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec")  # torch warns of itself
            exported = torch.export.export(wrapper, (leaves,), strict=False, dynamic_shapes=(shapes,))
            exported = exported.run_decompositions({})
    except Exception as error:
        kind = DataDependentError if "DataDependent" in type(error).__name__ else CaptureError
        raise kind(
            f"torch.export could not capture {type(model).__name__} ({type(error).__name__}): {error}\n"
            "Use static shapes (dynamic=False), or change the line of the model that torch.export names."
        ) from error
    return _Import(exported, wrapper, model, given).traced()


def _dynamic_shapes(given: Flat, dynamic: Dynamic) -> tuple[Any, ...]:
    if dynamic is None or dynamic is False:
        return tuple(None for _ in given.leaves)
    if dynamic is True:
        auto = torch.export.Dim.AUTO
        return tuple({dim: auto for dim in range(leaf.dim())} for leaf in given.leaves)
    unknown = [name for name in dynamic if not any(_covers(name, path) for path in given.paths)]
    if unknown:
        raise InputError(
            f"dynamic shapes are given for {unknown}, which are no tensor arguments. Tensor arguments: {given.paths}."
        )
    names: dict[str, Any] = {}

    def size(value: Any) -> Any:
        return names.setdefault(value, torch.export.Dim(value)) if isinstance(value, str) else value

    shapes = []
    for path in given.paths:
        wanted = next((spec for name, spec in dynamic.items() if _covers(name, path)), None)
        items = wanted.items() if isinstance(wanted, Mapping) else enumerate(wanted or ())
        shapes.append({dim: size(value) for dim, value in items} or None)
    return tuple(shapes)


def symbolic_dims(traced: Traced, given: Flat) -> set[tuple[int, int]]:
    """Which dims of which tensor arguments (by number) an exported program leaves open."""
    numbers = {path: number for number, path in enumerate(given.paths)}
    return {
        (numbers[spec.target], dim)
        for spec in traced.signature.inputs
        if spec.kind in ("user", "state")
        for dim, size in enumerate(spec.shape)
        if isinstance(size, torch.SymInt) and torch_private.symbolic_expression(size).free_symbols
    }


def _covers(name: str, path: str) -> bool:
    return path == name or path.startswith(name + ".")


class _Found:
    """What the flat forward saw beside tensors. No attribute of the module: torch.export puts those back."""

    structure: Structure | None = None
    assigned: tuple[str, ...] = ()  # attributes of modules
    aliases: list[int | None] = []


def _attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Everything that the modules hold under a name, by path."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        parameters, buffers = torch_private.tensor_stores(module)
        for name, value in (*module.__dict__.items(), *parameters.items(), *buffers.items()):
            found[f"{path}.{name}".removeprefix(".")] = value
    return found


class _FlatForward(torch.nn.Module):
    """The model as a function from the flat tensors of its arguments to the flat tensors of its result."""

    def __init__(self, model: torch.nn.Module, given: Flat) -> None:
        super().__init__()
        self.model, self.given = model, given
        self.found = _Found()

    def forward(self, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (args, kwargs), containers = self.given.rebuild(list(leaves))
        before = _attributes(self.model)
        result = self.model(*args, **kwargs)
        after = _attributes(self.model)
        assigned = sorted(name for name in after if after[name] is not before.get(name))
        replaced = [name for name in assigned if isinstance(before.get(name), torch.Tensor)]
        if replaced:
            raise CaptureError(
                f"the forward replaces {', '.join(replaced[:4])} by another tensor, which torch.export forgets: write "
                "into it (copy_, add_), or use dynamic=False."
            )
        self.found.assigned = tuple(assigned)
        structure, results = result_structure(result, (args, kwargs), self.given, list(leaves), containers)
        _refuse_symbolic(structure)
        self.found.structure = structure
        self.found.aliases = [next((i for i, leaf in enumerate(leaves) if leaf is each), None) for each in results]
        return tuple(results)


def _refuse_symbolic(structure: Structure) -> None:
    """A number that depends on sizes, standing in the result beside its tensors, would be the example's for ever."""
    stack: list[Any] = [structure.tree, *structure.effects]
    while stack:
        tree = stack.pop()
        if isinstance(tree, Container):
            stack += [*tree.children, Static(tree.context)]
        elif isinstance(tree, Static) and _holds_symbolic(tree.value, 4):
            raise CaptureError(f"the model returns {tree.value!r}, which depends on sizes; only tensors can.")


def _holds_symbolic(value: Any, depth: int) -> bool:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    if not depth or isinstance(value, (type, torch.nn.Module)):
        return False
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    return any(_holds_symbolic(item, depth - 1) for item in (*inside, *getattr(value, "__dict__", {}).values()))


class _Import:
    """Turns an exported program into `Traced`: user inputs first, no assertions, no no-ops, our metadata."""

    def __init__(self, exported: Any, wrapper: _FlatForward, model: torch.nn.Module, given: Flat) -> None:
        self.exported, self.wrapper, self.model, self.given = exported, wrapper, model, given
        self.graph = torch.fx.Graph()
        self.copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self.renamed: dict[str, str] = {}
        self.constants: dict[str, torch.Tensor] = {}

    def traced(self) -> Traced:
        specs = self._placeholders()
        output: Any = None
        for node in self.exported.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                output = node
            elif node.op == "get_attr":
                raise CaptureError(
                    f"torch.export left the attribute {node.target} in the graph, which is not supported."
                )
        outputs = self._outputs(output)
        specs = self._without_dead(specs, {each.mutates for each in outputs})
        constants = {spec.target: self.constants[spec.target] for spec in specs if spec.kind == "constant"}
        graph = torch_private.lazy_graph_module(self.graph)
        traced = Traced(graph, Signature(tuple(specs), tuple(outputs)), constants, self.wrapper.found.structure)
        traced.assigned = self.wrapper.found.assigned
        traced.guards = torch_private.shape_guards(self.exported)
        traced.ranges = {
            symbol: (bounds.lower, bounds.upper) for symbol, bounds in self.exported.range_constraints.items()
        }
        return traced

    def _placeholders(self) -> list[InputSpec]:
        nodes = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        sources = dict(zip(nodes, self.exported.graph_signature.input_specs, strict=True))
        users = [node for node, source in sources.items() if source.kind.name == "USER_INPUT"]
        specs = []
        for i, node in enumerate(users):
            kind = "state" if i in self.given.states else "user"
            specs.append(self._placeholder(node, kind, self.given.paths[i], self.given.leaves[i].requires_grad))
        return specs + self._stored({node: source for node, source in sources.items() if node not in users})

    def _stored(self, sources: dict[torch.fx.Node, Any]) -> list[InputSpec]:
        """Weights, buffers and constants; a tied tensor becomes one input under its first name."""
        ties = _ties(self.model)
        seen: dict[tuple[str, str], torch.fx.Node] = {}
        specs = []
        for node, source in sources.items():
            kind = {"PARAMETER": "weight", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}.get(source.kind.name)
            if kind is None:
                raise CaptureError(f"torch.export gave an input of kind {source.kind.name}, which is not supported.")
            target = (source.target or node.name).removeprefix("model.")
            target, *tied = ties.get(target, (target,))
            if (kind, target) in seen:
                self.copies[node] = seen[kind, target]
                self.renamed[node.name] = self.copies[node].name
                continue
            if kind == "constant":
                self.constants[target] = self.exported.constants[source.target]
            requires_grad = kind == "weight" and self.model.get_parameter(target).requires_grad
            specs.append(self._placeholder(node, kind, target, requires_grad, tuple(tied)))
            seen[kind, target] = self.copies[node]
        return specs

    def _placeholder(
        self, node: torch.fx.Node, kind: Any, target: str, requires_grad: bool, tied: tuple[str, ...] = ()
    ) -> InputSpec:
        copy = self.graph.placeholder(re.sub(r"\W", "_", target))
        copy.target = copy.name
        copy.meta["val"] = val = node.meta["val"]
        self.copies[node] = copy
        self.renamed[node.name] = copy.name
        return InputSpec(copy.name, kind, target, tuple(val.shape), val.dtype, tuple(val.stride()), requires_grad, tied)

    def _call(self, node: torch.fx.Node) -> None:
        target = node.target
        packet = getattr(getattr(target, "overloadpacket", None), "__name__", "")
        if packet in ASSERTIONS:
            return
        if target in DROPPED or is_inactive_dropout(target, node.args):
            self.copies[node] = self.copies[node.args[0]]
            return
        if isinstance(target, torch_private.HigherOrderOperator):
            raise CaptureError(f"torch.export left the region {target} in the graph, which is not supported.")
        copy = self.graph.node_copy(node, self.copies.__getitem__)
        where, module = _where(node)
        if target is aten.type_as.default:
            copy.target, copy.args = aten._to_copy.default, copy.args[:1]
            copy.kwargs = {"dtype": node.meta["val"].dtype}
        copy.meta = {"val": node.meta.get("val"), "where": where, "module": module}
        self.copies[node] = copy

    def _outputs(self, output: torch.fx.Node) -> list[OutputSpec]:
        sources = self.exported.graph_signature.output_specs
        results, written = [], []
        for node, source in zip(output.args[0], sources, strict=True):
            if source.kind.name == "USER_OUTPUT":
                results.append((self._tensor(node), None))
            else:
                written.append((self.copies[node], self._written(source)))
        specs = [
            OutputSpec(node.name, aliases=self._alias(node, position)) for position, (node, _) in enumerate(results)
        ] + [OutputSpec(node.name, mutates=name) for node, name in written]
        self.graph.output(tuple(node for node, _ in results + written))
        return specs

    def _tensor(self, node: Any) -> torch.fx.Node:
        if not isinstance(node, torch.fx.Node):
            raise CaptureError(
                f"the model returns {node!r}, a number that depends on sizes; only tensors can vary with them."
            )
        return self.copies[node]

    def _written(self, source: Any) -> str:
        """The new name of the input that an output of the exported program updates."""
        if source.kind.name == "USER_INPUT_MUTATION":
            return self.renamed[source.target]
        by_target = {spec.target: spec.arg.name for spec in self.exported.graph_signature.input_specs}
        return self.renamed[by_target[source.target]]

    def _alias(self, node: torch.fx.Node, position: int) -> str | None:
        index = self.wrapper.found.aliases[position]
        if index is not None:
            return [copy for copy in self.copies.values() if copy.op == "placeholder"][index].name
        while node.op == "call_function":
            source = aliased_argument(node) if _is_aten(node) else None
            if source is None:
                return None
            node = source
        return node.name

    def _without_dead(self, specs: list[InputSpec], written: set[str | None]) -> list[InputSpec]:
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)
        kept = []
        placeholders = {node.name: node for node in self.graph.nodes if node.op == "placeholder"}
        for spec in specs:
            node = placeholders[spec.name]
            if node.users or spec.kind in ("user", "state") or spec.name in written:
                kept.append(spec)
            else:
                self.graph.erase_node(node)
        return kept


def _is_aten(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch_private.OpOverload) or getattr(node.target, "__name__", "") == "getitem"


def _ties(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter and buffer, by each of them."""
    names: dict[int, list[str]] = {}
    for found in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in found:
            names.setdefault(id(tensor), []).append(name)
    return {name: tuple(found) for found in names.values() for name in found}


def _where(node: torch.fx.Node) -> tuple[str, str]:
    """The user's line and module path, from what torch.export notes."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n?\s*([^\n]*)', node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    where = f"{frames[-1][0]}:{frames[-1][1]} in {frames[-1][2]}: {frames[-1][3].strip()}" if frames else ""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return where, path.removeprefix("model").removeprefix(".")
