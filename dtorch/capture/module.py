"""Static capture: run a module's unmodified forward once on symbols, and keep what it did as the global graph.

In: a model (or its `Host`) and example arguments. Out: `Traced`, right for arguments of the same shapes,
dtypes and Python values.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.host import Host, make_host
from dtorch.capture.intercept import Intercept
from dtorch.capture.reads import input_spec
from dtorch.capture.record import Origin, Recorder
from dtorch.capture.results import result_structure
from dtorch.capture.structure import Flat, flatten
from dtorch.capture.symbol import Tensor, meta_of
from dtorch.capture.traced import ReadCallback, ReadRequest, Traced
from dtorch.errors import CaptureError, CaptureWarning
from dtorch.ir.signature import InputKind, OutputSpec, Signature


def capture_module(
    model: torch.nn.Module | Host,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    *,
    read: ReadCallback | None = None,
) -> Traced:
    """Record one forward of a model.

    read: answers the values that the model's Python code branches on; without it such a model raises
    `DataDependentError`. Raises `CaptureError` for what a graph cannot hold.
    """
    host = model if isinstance(model, Host) else make_host(model)
    traced = _capture(host, args, kwargs or {}, read)
    if host.left:
        _refuse_state(host, traced, args, kwargs or {}, read)
    return traced


def _refuse_state(host: Host, first: Traced, args: tuple, kwargs: dict[str, Any], read: ReadCallback | None) -> None:
    """Compare with the forward of a second call: attributes that it assigned must make no difference to it."""
    names = ", ".join(sorted(host.left)[:4])

    def answered(request: ReadRequest) -> torch.Tensor:
        if request.index < len(first.reads):
            return first.reads[request.index].value
        raise CaptureError("the second call reads more values than the first")

    second: Traced | None = None
    with host.as_left(), suppress(CaptureError):  # raised where it reads a tensor that the first left
        second = _capture(host, args, kwargs, read and answered)
    if second is not None and first.computes_as(second):
        return
    if second is None or not host.left:
        warnings.warn(
            f"the forward assigns {names} at its first call and computes otherwise from then on. A compiled module "
            "forgets what forward assigns: every call runs as the first. Call the model once before compile, or keep "
            "such state in a buffer that forward writes into.",
            CaptureWarning,
        )
        return
    raise CaptureError(
        f"the forward assigns {names} and computes something else when it is called again: state that lives from "
        "call to call has to be a buffer that it writes into (self.register_buffer), or be computed before compile."
    )


def _capture(host: Host, args: tuple, kwargs: dict[str, Any], read: ReadCallback | None) -> Traced:
    given = flatten_arguments(host.module, args, kwargs)
    recorder = Recorder(host.names, host.device.type if host.device else _device_type(given, host), read)
    host.bind(recorder)
    symbols = [_user_symbol(recorder, given, i, host.device) for i in range(len(given.leaves))]
    for symbol in symbols:
        recorder.value(symbol)
    (symbolic_args, symbolic_kwargs), containers = given.rebuild(symbols)
    forward = _Forward(recorder, symbols, containers)
    try:
        with host.restored(recorder), _quiet_surroundings():
            with Intercept(recorder):
                result = host.module(*symbolic_args, **symbolic_kwargs)
            return forward.finish(result, (symbolic_args, symbolic_kwargs), given, host)
    finally:
        recorder.finished = True


def flatten_arguments(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Flat:
    """The call's tensors, with paths that begin with the names of forward's parameters (`input_ids`,
    `cache.layers.0.keys`).
    """
    positional = _positional_names(module)

    def name(path: str) -> str:
        kind, _, rest = path.partition(".")
        if kind == "1":
            return rest
        number, _, inner = rest.partition(".")
        index = int(number)
        known = positional[index] if index < len(positional) else f"args_{index}"
        return f"{known}.{inner}" if inner else known

    return flatten((tuple(args), dict(kwargs)), name)


def _positional_names(module: torch.nn.Module) -> list[str]:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def _device_type(given: Flat, host: Host) -> str:
    return next((tensor.device.type for tensor in [*host.symbols, *given.leaves]), "cpu")


def _user_symbol(recorder: Recorder, given: Flat, index: int, device: torch.device | None) -> Tensor:
    leaf, path = given.leaves[index], given.paths[index]
    kind: InputKind = "state" if index in given.states else "user"
    return recorder.new_input(meta_of(leaf, device), Origin(kind, path, path, leaf.requires_grad))


def _quiet_surroundings() -> ExitStack:
    """Gradients off, compiled submodules run as written, whatever the caller has set."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch_private.compiled_code_runs_eagerly() or nullcontext())
    return stack


class _Forward:
    """Turns what a finished forward left behind into `Traced`."""

    def __init__(self, recorder: Recorder, symbols: list[Tensor], containers: list[Any]) -> None:
        self.recorder, self.symbols, self.containers = recorder, symbols, containers
        self._owners: dict[torch.fx.Node, Tensor] = {}

    def finish(self, result: Any, arguments: tuple, given: Flat, host: Host) -> Traced:
        recorder = self.recorder
        structure, tensors = result_structure(result, arguments, given, self.symbols, self.containers)
        results = [tensor if isinstance(tensor, Tensor) else recorder.lift(tensor) for tensor in tensors]
        nodes = [self._own(symbol) for symbol in results]
        outputs = [
            OutputSpec(node.name, aliases=self._alias(symbol)) for symbol, node in zip(results, nodes, strict=True)
        ]
        for name, node in self._mutations(host):
            nodes.append(node)
            outputs.append(OutputSpec(node.name, mutates=name))
        recorder.graph.output(tuple(nodes))
        kept = self._without_dead({output.mutates for output in outputs if output.mutates})
        specs = [input_spec(recorder, node) for node in kept]
        constants = {spec.target: recorder.constants[spec.target] for spec in specs if spec.kind == "constant"}
        graph = torch_private.lazy_graph_module(recorder.graph)
        return Traced(graph, Signature(tuple(specs), tuple(outputs)), constants, structure, recorder.reads)

    def _own(self, symbol: Tensor) -> torch.fx.Node:
        """The result's node, its memory being its own where it is so in eager: `y = empty_like(x).copy_(x)` is
        no alias of x.
        """
        recorder, root = self.recorder, symbol if symbol.root is None else symbol.root
        node = recorder.value(root)
        memory: torch.fx.Node | None = node
        while memory is not None and memory.op == "call_function":
            node, memory = memory, aliased_argument(memory)
        owner = self._owners.setdefault(node, root) if memory is None else recorder.inputs[memory]
        if owner is not root and (owner.origin is None or owner.origin.kind != "constant"):
            node = recorder.value(root)
            with torch_private.fake_execution():
                val = torch.ops.aten.clone.default(node.meta["val"])
            root.node = recorder.emit(torch.ops.aten.clone.default, (node,), {}, val)
            root.version += 1  # its views are taken from the copy
            self._owners[root.node] = root
        return recorder.value(symbol)

    def _alias(self, symbol: Tensor) -> str | None:
        owner = symbol.root if symbol.root is not None else symbol
        if owner.origin is None:
            return None
        return self.recorder.placeholders[id(owner)].name

    def _mutations(self, host: Host) -> list[tuple[str, torch.fx.Node]]:
        recorder = self.recorder
        replaced = dict((id(symbol), (symbol, new)) for symbol, new in host.reassigned())
        for symbol, _ in replaced.values():
            if symbol.node is None:
                recorder.value(symbol)
        found = []
        for placeholder, symbol in list(recorder.inputs.items()):
            if symbol.origin.kind == "constant":  # made in the forward and written there: gone when it returns
                continue
            _, new = replaced.get(id(symbol), (symbol, symbol))
            new = new if isinstance(new, Tensor) else recorder.lift(new)
            if new.meta.shape != symbol.meta.shape or new.meta.dtype != symbol.meta.dtype:
                raise CaptureError(
                    f"the forward replaces {symbol.origin.target} ({symbol.meta}) by a tensor of another "
                    f"shape or dtype "
                    f"({new.meta}). Keep a buffer of one size and write into it."
                )
            node = recorder.value(new)
            if node is not placeholder:
                other = host.overlaps.get(symbol.origin.target) if symbol.origin.kind in ("weight", "buffer") else None
                if other is not None:
                    raise CaptureError(
                        f"the forward writes into {symbol.origin.target}, which shares memory with {other}: on the "
                        "devices they are apart, and the write would not reach it. Keep one of them, and take the "
                        "view in the forward."
                    )
                found.append((placeholder.name, node))
        return found

    def _without_dead(self, mutated: set[str | None]) -> list[torch.fx.Node]:
        """Remove unused calls, then inputs that only the model could give; returns the placeholders left."""
        graph = self.recorder.graph
        for node in reversed(list(graph.nodes)):
            if node.op == "call_function" and not node.users:
                graph.erase_node(node)
        kept = []
        for placeholder, symbol in self.recorder.inputs.items():
            if (
                not placeholder.users
                and symbol.origin.kind not in ("user", "state")
                and placeholder.name not in mutated
            ):
                graph.erase_node(placeholder)
            else:
                kept.append(placeholder)
        return kept


def aliased_argument(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument whose memory a node's value shares, or None."""
    if node.target is operator.getitem:
        source = node.args[0]
        return source.args[0] if torch_private.returns_views(source.target) else None
    position = torch_private.schema_facts(node.target).aliases
    source = None if position is None or position >= len(node.args) else node.args[position]
    return source if isinstance(source, torch.fx.Node) else None
