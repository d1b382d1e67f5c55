"""What one torch function does: metadata and aliasing (probe), and a functional ATen graph (expansion).

In: a function, its arguments with `Ref`s for tensors, the tensors' metadata, the ambient state. Out:
`Operation`s, cached for the process by all of these; no tensor data is looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch import options, torch_private
from dtorch.capture import direct
from dtorch.capture.draw import Draw, draw_of
from dtorch.capture.promotion import dtypes_pinned
from dtorch.capture.steps import (
    DROPPED,
    SELF,
    VIEW,
    Expansion,
    Ref,
    Step,
    draws,
    fill,
    is_inactive_dropout,
    ref,
    replaced,
    without_dead,
)
from dtorch.capture.symbol import TensorMeta, meta_of
from dtorch.capture.undo import scatter_through
from dtorch.errors import CaptureError
from dtorch.ir.strides import may_overlap
from dtorch.recent import Recent

aten = torch.ops.aten
CACHE_ENTRIES = 16384
UNASKED: Any = object()


@dataclass
class Operation:
    """One torch function on arguments of given metadata, under one ambient state."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    metas: tuple[TensorMeta, ...]
    results: list[Any] = field(default_factory=list)  # a TensorMeta for each tensor, other values as they are
    spec: Any = None
    aliases: list[tuple[str, int] | None] = field(default_factory=list)
    mutated: tuple[int, ...] = ()
    expansion: Expansion | None = None
    scatters: dict[tuple[int, TensorMeta], Expansion] = field(default_factory=dict)
    draws: Any = UNASKED

    def probe(self) -> None:
        """Run once on fakes: metadata, which inputs are written (by version), what aliases what (by storage)."""
        fakes = [meta.fake() for meta in self.metas]
        versions = [torch_private.version_of(tensor) for tensor in fakes]
        with torch_private.fake_execution(), torch_private.kernels_that_read_data():
            result = self.function(*fill(self.args, fakes), **fill(self.kwargs, fakes))
        written = {i for i, tensor in enumerate(fakes) if torch_private.version_of(tensor) != versions[i]}
        self.mutated = tuple(sorted(written | self._written_unseen()))
        for i in self.mutated:
            if meta_of(fakes[i]) is not self.metas[i]:
                raise CaptureError(
                    f"{name_of(self.function)} changes the shape or strides of a tensor in place "
                    f"({self.metas[i]} to {meta_of(fakes[i])}), which a graph cannot hold. Use the form that "
                    f"returns a new tensor."
                )
            if not self.metas[i].contiguous and may_overlap(self.metas[i].shape, self.metas[i].stride):
                if name_of(self.function).partition(".")[0] not in ("fill_", "zero_", "__setitem__"):
                    raise RuntimeError(
                        "more than one element of the written-to tensor refers to a single memory location. Please "
                        "clone() the tensor before performing the operation."
                    )
        flat, self.spec = torch_private.tree_flatten(result)
        storages = {torch_private.storage_id(tensor): i for i, tensor in reversed(list(enumerate(fakes)))}
        for value in flat:
            if not isinstance(value, torch.Tensor):
                self.results.append(value)
                self.aliases.append(None)
                continue
            self.results.append(meta_of(value))
            same = next((i for i, tensor in enumerate(fakes) if tensor is value), None)
            if same is not None:
                self.aliases.append((SELF, same))
            else:
                base = storages.get(torch_private.storage_id(value))
                self.aliases.append(None if base is None else (VIEW, base))

    def _written_unseen(self) -> set[int]:
        """Tensors that are written without a new version: running statistics, and all under vmap."""
        if isinstance(self.function, torch_private.OpOverload):
            writes = torch_private.schema_facts(self.function).mutates
            return {arg.index for i, arg in enumerate(self.args) if i in writes and type(arg) is Ref}
        if name_of(self.function) not in ("batch_norm", "instance_norm"):
            return set()

        def run(*tensors: torch.Tensor) -> tuple:
            self.function(*fill(self.args, tensors), **fill(self.kwargs, tensors))
            return tensors

        graph = torch_private.trace_functional(run, [meta.fake() for meta in self.metas]).graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        values = next(node for node in graph.nodes if node.op == "output").args[0]
        return {i for i, (given, value) in enumerate(zip(inputs, values, strict=True)) if value is not given}

    def expand(self) -> Expansion:
        """The functional ATen calls; traced at the first use, under the ambient state of that use."""
        if self.expansion is None and isinstance(self.function, torch_private.OpOverload) and not self.mutated:
            self.expansion = self._one_step()
        if self.expansion is None:

            def run(*tensors: torch.Tensor) -> tuple:
                result = self.function(*fill(self.args, tensors), **fill(self.kwargs, tensors))
                flat = torch_private.tree_flatten(result)[0]
                new = [
                    value
                    for value, alias in zip(flat, self.aliases, strict=True)
                    if isinstance(value, torch.Tensor) and not (alias and alias[0] == SELF)
                ]
                return (*new, *(tensors[i] for i in self.mutated))

            self.expansion = traced(run, self.metas, name_of(self.function))
        return self.expansion

    def _one_step(self) -> Expansion:
        """An ATen overload (it came past torch functions, from under vmap, where nothing can be traced) is its
        own step.
        """
        count = len(self.metas)
        vals = [meta.fake() for meta in self.results if type(meta) is TensorMeta]
        whole = vals[0] if self.spec.is_leaf() else torch_private.tree_unflatten(vals, self.spec)
        steps = [Step(self.function, self.args, self.kwargs, whole)]
        if not self.spec.is_leaf():
            steps += [Step(operator.getitem, (ref(count), i), {}, val) for i, val in enumerate(vals)]
        outputs = range(count, count + 1) if self.spec.is_leaf() else range(count + 1, count + 1 + len(vals))
        drawn = torch_private.draws_random_numbers(self.function) and draws(self.function, self.args, self.kwargs)
        made = Expansion(tuple(steps), tuple(ref(i) for i in outputs), random=str(self.function) if drawn else None)
        return dtypes_pinned(made, self.metas)

    def draw(self) -> Draw | None:
        """How it draws random numbers without reading values; None: it draws none, or has to read."""
        if self.draws is UNASKED:
            self.draws = draw_of(self)
        return self.draws

    def output_of(self, position: int) -> int:
        """Where a result stands among the expansion's outputs, which leave out results that are arguments."""
        return sum(
            type(result) is TensorMeta and not (alias and alias[0] == SELF)
            for result, alias in zip(self.results[:position], self.aliases[:position], strict=True)
        )

    def scatter(self, position: int, value: TensorMeta) -> Expansion:
        """New value of the base from (tensors..., new value of the view that is result `position`, of metadata
        `value`).
        """
        found = self.scatters.get((position, value))
        if found is None:
            base = _base_of(self, position)
            expansion, output = self.expand(), self.output_of(position)
            if not expansion.constants and not torch.are_deterministic_algorithms_enabled():
                found = scatter_through(expansion, self.metas, expansion.outputs[output], base, value)
                if found is not None:
                    self.scatters[position, value] = found
                    return found

            def run(*tensors: torch.Tensor) -> tuple:
                *inputs, new = tensors
                result = self.function(*fill(self.args, inputs), **fill(self.kwargs, inputs))
                torch_private.tree_flatten(result)[0][position].copy_(new)
                return (inputs[base],)

            found = traced(run, (*self.metas, value), f"write through {name_of(self.function)}")
            self.scatters[position, value] = found
        return found


_PLACES: Recent[tuple[Any, Expansion]] = Recent()  # the operations of a key are held: it knows them by id


def scatter_places(
    steps: tuple[tuple[Operation, int], ...], base: TensorMeta, values: tuple[TensorMeta, ...]
) -> Expansion:
    """New value of a base from (base, new value of a view of it, other tensors of the steps).

    `steps`: operations and the results that are the next views, from the base on. Unlike `Operation.scatter` this
    may lead through views whose elements share memory: the steps view the numbers of the base's elements instead.
    `values`: of the view's new value; also of its old one where its own elements share memory: those that differ from
    it were written, and go past the base's end otherwise.
    """
    key = (*[(id(called), position) for called, position in steps], base, values)
    found = _PLACES.get(key)
    if found is not None:
        return found[1]
    given = [[m for i, m in enumerate(called.metas) if i != _base_of(called, at)] for called, at in steps]

    def run(*tensors: torch.Tensor) -> tuple:
        source, new = tensors[:2]
        supply = iter(tensors[1 + len(values) :])
        places = torch.arange(base.numel, device=base.device).reshape(base.shape)
        if places.stride() != base.stride:
            empty = torch.empty_strided(base.shape, base.stride, dtype=places.dtype, device=base.device)
            places = empty.copy_(places)
        for called, position in steps:
            own = _base_of(called, position)
            inputs = [places if i == own else next(supply) for i in range(len(called.metas))]
            result = called.function(*fill(called.args, inputs), **fill(called.kwargs, inputs))
            places = torch_private.tree_flatten(result)[0][position]
        flat = source.reshape(-1)
        if len(values) == 2:
            places = places.where(_bits(new) != _bits(tensors[2]), base.numel)
            flat = torch.cat([flat, flat.new_zeros(1)])
        flat = flat.scatter(0, places.reshape(-1), new.reshape(-1))
        return (flat[: base.numel].reshape(base.shape),)

    made = traced(
        run, (base, *values, *[meta for metas in given for meta in metas]), "write through an expanded tensor"
    )
    return _PLACES.put(key, (steps, made), CACHE_ENTRIES)[1]


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Numbers that are equal where a value's bits are: signs of zero and NaNs count."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.view(whole[value.dtype.itemsize]) if value.dtype.is_floating_point else value


def _base_of(called: Operation, position: int) -> int:
    """The tensor of an operation that its result `position` is a view of."""
    return called.aliases[position][1]  # type: ignore[index]  # callers ask for results that alias


def name_of(function: Callable[..., Any]) -> str:
    """A readable name of a torch function, for messages."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", None) or str(function)
    if name in ("__get__", "__set__") and owner is not None:
        return f"Tensor.{getattr(owner, '__name__', owner)}"
    return name


_OPERATIONS: Recent[Operation] = Recent()


def operation(
    key: Any, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], metas: tuple[TensorMeta, ...]
) -> Operation:
    """The probed operation for a key (None: not cacheable); probing may raise a data-dependent exception."""
    if key is not None:
        found = _OPERATIONS.get(key)
        if found is not None:
            return found
    made = Operation(function, args, kwargs, metas)
    if not direct.look(made):
        made.probe()
    elif made.expansion is not None:
        made.expansion = dtypes_pinned(made.expansion, metas)
    if key is not None:
        _OPERATIONS.put(key, made, min(CACHE_ENTRIES, options.current().eager_cache_steps))
    return made


def traced(
    function: Callable[..., tuple], metas: Sequence[TensorMeta], name: str, composites: bool = True
) -> Expansion:
    """Trace a function of tensors to clean functional steps; without `composites` to what they are made of."""
    trace = torch_private.trace_functional if composites else torch_private.trace_without_composites
    graph_module = trace(function, [meta.fake() for meta in metas])
    return dtypes_pinned(_Cleaner(graph_module, len(metas), name, composites).expansion(), metas)


class _Cleaner:
    """Turns a traced graph into steps: no-ops and assertions go, scalar constants become `full`, dead steps go."""

    def __init__(self, graph_module: torch.fx.GraphModule, inputs: int, name: str, composites: bool) -> None:
        self.module, self.name = graph_module, name
        self.steps: list[Step] = []
        self.random: str | None = None
        self.autocast = composites and torch_private.autocast_is_on()
        self.values: dict[torch.fx.Node, Any] = {}
        self.attributes = {
            node: getattr(graph_module, node.target) for node in graph_module.graph.nodes if node.op == "get_attr"
        }
        for node in [node for node, value in self.attributes.items() if not isinstance(value, torch.Tensor)]:
            self.values[node] = self.attributes.pop(node)  # a generator, which steps hold as it is
        stored = [node for node, value in self.attributes.items() if value.dim() > 0]
        self.constants = tuple(self.attributes[node] for node in stored)
        self.values.update({node: ref(inputs + i) for i, node in enumerate(stored)})
        self.given = inputs + len(stored)

    def expansion(self) -> Expansion:
        placeholders = 0
        outputs: tuple = ()
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = ref(placeholders)
                placeholders += 1
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "output":
                outputs = tuple(self._read(item) for item in node.args[0])
            else:
                self._call(node)
        return without_dead(self.steps, outputs, self.given, self.constants, self.random)

    def _read(self, item: Any) -> Any:
        """Arguments of a traced node as a template: `Ref`s for nodes, plain lists for fx's immutable ones."""
        if isinstance(item, torch.fx.Node):
            return self.values[item]
        if isinstance(item, tuple):
            return tuple(self._read(child) for child in item)
        if isinstance(item, list):
            return [self._read(child) for child in item]
        if isinstance(item, dict):
            return {key: self._read(child) for key, child in item.items()}
        if isinstance(item, slice):
            return slice(self._read(item.start), self._read(item.stop), self._read(item.step))
        return item

    def _emit(self, node: torch.fx.Node, target: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and "dtype" not in kwargs and makes_its_dtype(target):
            kwargs = {**kwargs, "dtype": val.dtype}  # not that of the process, or of the moment, that runs the plan
        self.steps.append(Step(target, args, kwargs, val))
        self.values[node] = ref(self.given + len(self.steps) - 1)

    def _constant(self, node: torch.fx.Node) -> None:
        value = self.attributes.get(node)
        if value is None:
            return
        if value.dim() == 0:  # a Python number that torch made a tensor of: say so, instead of carrying data
            kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            meta = meta_of(value)
            self.steps.append(Step(aten.full.default, ([], value.item()), kwargs, meta.fake()))
            self.values[node] = ref(self.given + len(self.steps) - 1)

    def _scalar(self, item: Any) -> torch.Tensor | None:
        """The 0-d constant behind a node, through copies."""
        while isinstance(item, torch.fx.Node) and item.target in DROPPED:
            item = item.args[0]
        value = self.attributes.get(item) if isinstance(item, torch.fx.Node) else None
        return value if value is not None and value.dim() == 0 else None

    def _call(self, node: torch.fx.Node) -> None:
        target = node.target
        if target in DROPPED:
            self.values[node] = self._read(node.args[0])
            return
        if target is aten._assert_tensor_metadata.default:
            return
        if target is aten.copy.default and _same_metadata(node, node.args[1]):
            self.values[node] = self._read(node.args[1])
            return
        if target is aten.copy_.default and node.args[0].op == "placeholder":
            self.values[node] = self._read(node.args[1])
            return
        if is_inactive_dropout(target, node.args):
            self.values[node] = self._read(node.args[0])
            return
        if target is aten.type_as.default:
            self._emit(node, aten._to_copy.default, (self._read(node.args[0]),), {"dtype": node.meta["val"].dtype})
            return
        scalar = self._scalar(node.args[1]) if target is aten.fill.Tensor else None
        if scalar is not None:
            self._emit(node, aten.fill.Scalar, (self._read(node.args[0]), scalar.item()), {})
            return
        args, kwargs = self._read(node.args), self._read(node.kwargs)
        if target is not operator.getitem:
            self._refuse_unfit(node)
            if self.autocast:
                args, kwargs = self._converted(node, args, kwargs)
        self._emit(node, target, args, kwargs)

    def _converted(self, node: torch.fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The call's arguments with autocast's conversions as steps of their own."""
        vals = torch.fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
        casts = torch_private.autocast_casts(node.target, *vals)
        moved: dict[Any, Any] = {}
        for source in node.all_input_nodes:
            val = source.meta["val"]
            dtype = next((dtype for tensor, dtype in casts if tensor is val), None)
            if dtype is None:
                continue
            with torch_private.fake_execution():
                converted = torch.empty_like(val, dtype=dtype)
            value = self.values[source]
            self.steps.append(Step(aten._to_copy.default, (value,), {"dtype": dtype}, converted))
            moved[value] = ref(self.given + len(self.steps) - 1)
        return replaced(args, moved), replaced(kwargs, moved)

    def _refuse_unfit(self, node: torch.fx.Node) -> None:
        target = node.target
        if not isinstance(target, torch_private.OpOverload):
            raise CaptureError(f"{self.name} expands to {target}, which is no ATen operator, so no graph can hold it.")
        if torch_private.draws_random_numbers(target) and draws(target, node.args, node.kwargs):
            self.random = str(target)
        if torch_private.schema_facts(target).mutates:
            raise CaptureError(
                f"{self.name} expands to {target}, which writes in place and has no functional form. "
                "Use an operation that returns a new tensor."
            )


def _same_metadata(node: torch.fx.Node, other: Any) -> bool:
    first, second = node.meta.get("val"), getattr(other, "meta", {}).get("val")
    return isinstance(second, torch.Tensor) and meta_of(first) is meta_of(second)


FACTORY_NAMES = frozenset(
    "arange full zeros ones empty eye linspace logspace scalar_tensor tril_indices triu_indices hann_window "
    "hamming_window blackman_window bartlett_window kaiser_window empty_strided".split()
)


def makes_its_dtype(target: Any) -> bool:
    """Whether an op's result has torch's default dtype unless told otherwise."""
    return isinstance(target, torch_private.OpOverload) and target.name()[6:].partition(".")[0] in FACTORY_NAMES
