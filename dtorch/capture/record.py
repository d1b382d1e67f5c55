"""The recorder: every torch function called on symbols becomes nodes of one functional fx graph, as it is called.

In: functions with symbols, plain tensors and Python values. Out: new symbols at once; the graph, its inputs
and its constants at the end. In-place writes and views become new values (see mutation.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture import mutation
from dtorch.capture.expand import SELF, VIEW, Expansion, Operation, fill, name_of, operation, ref
from dtorch.capture.repeat import Unknown
from dtorch.capture.symbol import Tensor, TensorMeta, make, meta_of
from dtorch.capture.where import here
from dtorch.errors import CaptureError, UnsupportedError
from dtorch.ir.signature import InputKind

SCALARS = frozenset(
    {int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...)}
)


@dataclass(frozen=True)
class Origin:
    """Where an input symbol comes from: fields as in `InputSpec`."""

    kind: InputKind
    target: str
    name: str
    requires_grad: bool = False
    tied: tuple[str, ...] = ()


class Recorder:
    """Records one capture. `modules`: qualified names by id; `device_type`: what autocast is asked about,
    beside "cpu".
    """

    eager = False  # whether symbols have values on devices, and calls may take the short way
    state: Any = Unknown  # of a trie, where one is walked

    def __init__(self, modules: dict[int, str] | None = None, device_type: str = "cpu", read: Any = None) -> None:
        self.graph = torch.fx.Graph()
        self.modules = modules or {}
        self.device_types = ("cpu",) if device_type == "cpu" else ("cpu", device_type)
        self.read = read
        self.reads: list[Any] = []
        self.inputs: dict[torch.fx.Node, Tensor] = {}
        self.placeholders: dict[int, torch.fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.known: dict[torch.fx.Node, torch.Tensor] = {}  # values that the host knows: read, or made of constants
        self._lifted: dict[int, tuple[torch.Tensor, int, Tensor]] = {}
        self._last_placeholder: torch.fx.Node | None = None
        self.finished = False
        self.newest: Callable[[], Tensor | None] = lambda: None  # a weak reference to the last result of `dispatch`
        self._where = ("", "")

    # --- inputs -------------------------------------------------------------------------------------------------

    def new_input(self, meta: TensorMeta, origin: Origin) -> Tensor:
        """A symbol for an input; its placeholder is made when it is first used."""
        symbol = make(meta, self, requires_grad=origin.requires_grad)
        symbol.origin = origin
        return symbol

    def adopt(self, symbol: Tensor) -> None:
        """Make an input symbol of an earlier capture this recorder's own."""
        symbol.recorder, symbol.node, symbol.version, symbol.seen = self, None, 0, 0

    def lift(self, tensor: torch.Tensor) -> Tensor:
        """The constant for a plain tensor: one for each object and state of it (a snapshot)."""
        entry = self._lifted.get(id(tensor))
        version = torch_private.version_of(tensor)
        if entry is not None and entry[1] == version:
            return entry[2]
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise CaptureError(
                f"{self.line()}: a {type(tensor).__name__} meets a captured tensor; only plain tensors can be "
                f"constants."
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedError(
                f"{self.line()}: a {tensor.layout} tensor cannot be a constant of the graph. Use a dense tensor."
            )
        name = f"constant_{len(self.constants)}"
        with torch.no_grad():
            value = tensor.detach()
            self.constants[name] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            ).copy_(value)
        symbol = self.new_input(meta_of(tensor), Origin("constant", name, name))
        self._lifted[id(tensor)] = (tensor, version, symbol)
        return symbol

    def lifted(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor has become a constant."""
        return id(tensor) in self._lifted

    def _placeholder(self, symbol: Tensor) -> torch.fx.Node:
        if symbol.origin is None:
            raise CaptureError(f"{self.line()}: {symbol.summary} was made outside this capture and has no value in it.")
        with self.graph.inserting_after(self._last_placeholder):
            node = self.graph.placeholder(re.sub(r"\W", "_", symbol.origin.name))
            node.target = node.name
        node.meta["val"] = symbol.meta.val()
        self._last_placeholder = node
        self.inputs[node] = symbol
        self.placeholders[id(symbol)] = node
        return node

    # --- values -------------------------------------------------------------------------------------------------

    def line(self) -> str:
        """The user's line that runs now."""
        return here({})[0]

    def value(self, symbol: Tensor) -> torch.fx.Node:
        """The node with the symbol's value as of now."""
        if symbol.recorder is not self:
            raise CaptureError(
                f"{self.line()}: {symbol.summary} belongs to an earlier call of the model, so its value is gone. A "
                f"tensor that "
                "must live from call to call has to be a registered buffer, or an argument and a result."
            )
        if symbol.root is not None and symbol.seen != symbol.root.version:
            mutation.derive_again(self, symbol)
        if symbol.node is None:
            symbol.node = self._placeholder(symbol)
        return symbol.node

    def emit(self, target: Callable[..., Any], args: tuple, kwargs: dict[str, Any], val: Any) -> torch.fx.Node:
        """Append one ATen call."""
        node = self.graph.create_node("call_function", target, args, kwargs)
        node.meta["val"] = val
        node.meta["where"], node.meta["module"] = self._where
        return node

    def inline(self, expansion: Expansion, inputs: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
        """Append an expansion's calls; returns the nodes of its outputs."""
        values = list(inputs)
        for constant in expansion.constants:
            values.append(self.value(self.lift(constant)))
        for step in expansion.steps:
            values.append(self.emit(step.target, fill(step.args, values), fill(step.kwargs, values), step.val))
        return [values[output.index] for output in expansion.outputs]

    def settled(self, symbol: Tensor, node: Any) -> Any:
        """The node of a value that is written into a symbol (or derived again for a view), as the symbol holds it."""
        return node

    def host_value(self, symbol: Tensor, what: str) -> torch.Tensor:
        """The symbol's value as a host tensor; `what` names the Python operation in messages."""
        from dtorch.capture.reads import host_value

        return host_value(self, symbol, what)

    def known_value(self, symbol: Tensor, value: torch.Tensor) -> None:
        """Note the value of a constant, so that reading it later asks nobody."""
        self.known[self.value(symbol)] = value

    # --- calls --------------------------------------------------------------------------------------------------

    def ambient(self) -> tuple:
        """The state of torch beside the arguments on which the meaning of a call depends."""
        casts = tuple(
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in self.device_types
        )
        modes = torch_private.active_function_modes() if torch_private.function_modes_active() else ()
        return casts, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), modes

    def call(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], scan: Scan | None = None) -> Any:
        """Record one call and return what it returns, with symbols for tensors."""
        scan = scan or Scan(args, kwargs)
        symbols = [tensor if isinstance(tensor, Tensor) else self.lift(tensor) for tensor in scan.tensors]
        metas = tuple([symbol.meta for symbol in symbols])
        key: Any = (function, metas, self.ambient(), *scan.tokens)
        try:
            hash(key)
        except TypeError:
            key = None
        called = operation(key, function, scan.args, scan.kwargs, metas)
        return self._apply(called, symbols, scan.tensors, scan.generator)

    def _apply(
        self,
        called: Operation,
        symbols: list[Tensor],
        given: list[torch.Tensor],
        generator: torch.Generator | None = None,
    ) -> Any:
        for i in called.mutated:
            if given[i] is not symbols[i]:
                raise CaptureError(self._write_to_plain(called, given[i], symbols))
        new = [
            i
            for i, (result, alias) in enumerate(zip(called.results, called.aliases, strict=True))
            if type(result) is TensorMeta and not (alias and alias[0] == SELF)
        ]
        nodes: list[torch.fx.Node] = []
        if new or called.mutated:
            expansion = called.expand()
            if expansion.random is not None:
                raise CaptureError(self._random(called, expansion.random))
            inputs = [self.value(symbol) for symbol in symbols]
            self._where = here(self.modules)
            nodes = self.inline(expansion, inputs)
        for i, node in zip(called.mutated, nodes[len(new) :], strict=True):
            mutation.write(self, symbols[i], node)
        made: dict[int, Tensor] = {}
        for position, node in zip(new, nodes, strict=False):
            made[position] = self._result(called, position, node, symbols)
        flat = [
            symbols[alias[1]] if alias and alias[0] == SELF else made.get(i, result)
            for i, (result, alias) in enumerate(zip(called.results, called.aliases, strict=True))
        ]
        return torch_private.tree_unflatten(flat, called.spec)

    def _result(self, called: Operation, position: int, node: torch.fx.Node, symbols: list[Tensor]) -> Tensor:
        meta, alias = called.results[position], called.aliases[position]
        symbol = make(meta, self, mutation.with_strides(self, node, meta))
        if alias is not None and alias[0] == VIEW:
            mutation.attach_view(symbol, symbols[alias[1]], mutation.ViewStep(called, position, tuple(symbols)))
        return symbol

    def _write_to_plain(self, called: Operation, plain: torch.Tensor, symbols: list[Tensor]) -> str:
        other = next((symbol for symbol in symbols if symbol.origin is None or symbol.origin.kind != "constant"), None)
        source = "dtorch tensors" if other is None else f"the dtorch tensor {other.summary}"
        return (
            f"{self.line()}: {name_of(called.function)} writes {source} into a plain torch.Tensor of shape "
            f"{tuple(plain.shape)} and dtype {plain.dtype}, which dtorch does not hold. Make the destination of a "
            "dtorch tensor x, `x.new_zeros(...)`, or write what `x.to_torch()` gives; a captured module can also "
            "register it as a buffer."
        )

    def _random(self, called: Operation, op: str) -> str:
        hint = (
            "Call model.eval() before compiling: dropout in training mode cannot be captured yet."
            if "dropout" in op or "dropout" in name_of(called.function) or "attention" in op
            else "Random operations inside a captured forward are not there yet: draw outside and pass the numbers in."
        )
        return f"{self.line()}: {name_of(called.function)} draws random numbers ({op}). {hint}"


class Scan:
    """One call's arguments, taken apart: templates with `Ref`s, the tensors behind them, and hashable tokens."""

    __slots__ = ("tensors", "tokens", "args", "kwargs", "symbolic", "generator", "_index")

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.tokens: list[Any] = []
        self.symbolic = False
        self.generator: torch.Generator | None = None
        self._index: dict[int, int] = {}
        self.args: tuple = self._scan(args)
        self.kwargs: dict[str, Any] = self._scan(kwargs) if kwargs else kwargs

    def _scan(self, item: Any) -> Any:
        kind = type(item)
        tokens = self.tokens
        if kind is Tensor:
            self.symbolic = True
            return self._tensor(item)
        if kind in SCALARS:
            tokens.append(kind)
            tokens.append(item)
            return item
        if kind is tuple or kind is list:
            tokens.append(kind)
            tokens.append(len(item))
            scanned = [self._scan(child) for child in item]
            return tuple(scanned) if kind is tuple else scanned
        if isinstance(item, torch.Tensor):
            self.symbolic = self.symbolic or isinstance(item, Tensor)
            return self._tensor(item)
        if kind is float:
            tokens.append(float)
            tokens.append(item if item else repr(item))  # tells 0.0 from -0.0
            return item
        if kind is dict:
            tokens.append(dict)
            tokens.append(tuple(item))
            return {key: self._scan(child) for key, child in item.items()}
        if kind is slice:
            tokens.append(slice)
            return slice(self._scan(item.start), self._scan(item.stop), self._scan(item.step))
        tokens.append(kind)
        if kind is torch.Generator:  # every generator of a device draws alike
            self.generator = item
            tokens.append(item.device)
            return item
        if isinstance(item, list):
            tokens.append(len(item))
            return [self._scan(child) for child in item]
        tokens.append(item)
        return item

    def _tensor(self, item: torch.Tensor) -> Any:
        index = self._index.get(id(item))
        if index is None:
            index = self._index[id(item)] = len(self.tensors)
            self.tensors.append(item)
        found = ref(index)
        self.tokens.append(found)
        return found
