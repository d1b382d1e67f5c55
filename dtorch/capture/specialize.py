"""A program with symbolic sizes, made static for given arguments: no tracing, only metadata evaluated.

In: `Traced` of dynamic capture and arguments. Out: `Traced` with plain integers in every size, argument and
signature entry.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.structure import Flat
from dtorch.capture.symbol import shared_val
from dtorch.capture.traced import Traced
from dtorch.errors import InputError
from dtorch.ir.signature import InputSpec, Signature

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def concretize(traced: Traced, given: Flat) -> Traced:
    """The program for arguments of these sizes (`flatten_arguments` of the call).

    Raises `InputError` for sizes outside those that the program was captured for.
    """
    sizes = _Sizes(traced, given)
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, Any] = {}
    for node in traced.graph.graph.nodes:
        val = node.meta.get("val")
        if node.op != "output" and isinstance(val, SYMBOLIC):
            values[node] = sizes.number(val)
            continue
        if node.op == "placeholder":
            copy = graph.placeholder(node.name)
            copy.target = copy.name
        elif node.op == "output":
            copy = graph.output(sizes.plain(node.args[0], values))
        else:
            args, kwargs = sizes.plain(node.args, values), sizes.plain(node.kwargs, values)
            copy = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        copy.meta = dict(node.meta)
        if "val" in copy.meta:
            copy.meta["val"] = sizes.fake(val)
        values[node] = copy
    inputs = tuple(sizes.spec(spec) for spec in traced.signature.inputs)
    signature = Signature(inputs, traced.signature.outputs)
    return Traced(torch_private.lazy_graph_module(graph), signature, traced.constants, traced.structure)


def _same_layout(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return 0 in shape or all(a == b or size == 1 for size, a, b in zip(shape, one, other, strict=True))


class _Sizes:
    """Values of the symbols, and everything symbolic evaluated by them."""

    def __init__(self, traced: Traced, given: Flat) -> None:
        self.symbols: dict[Any, int] = {}
        self._cache: dict[Any, Any] = {}
        leaves = dict(zip(given.paths, given.leaves, strict=True))
        specs = [spec for spec in traced.signature.inputs if spec.kind in ("user", "state")]
        for spec in specs:
            if spec.target not in leaves or leaves[spec.target].dim() != len(spec.shape):
                raise InputError(f"argument {spec.target} is missing or has another rank than {list(spec.shape)}.")
            for size, actual in zip(spec.shape, leaves[spec.target].shape, strict=True):
                expression = torch_private.symbolic_expression(size)
                if getattr(expression, "is_Symbol", False):
                    self.symbols.setdefault(expression, int(actual))
        for spec in specs:
            wanted = tuple(self.number(size) for size in spec.shape)
            actual_shape = tuple(leaves[spec.target].shape)
            strides = tuple(self.number(stride) for stride in spec.stride)
            if wanted == actual_shape and not _same_layout(wanted, strides, leaves[spec.target].stride()):
                raise InputError(
                    f"argument {spec.target} has strides {leaves[spec.target].stride()}; the program was captured for "
                    f"{list(spec.stride)}, which is {strides} for this shape. Pass a tensor laid out so."
                )
            if wanted != actual_shape:
                raise InputError(
                    f"argument {spec.target} has shape {actual_shape}; the program was captured for "
                    f"{list(spec.shape)}, which "
                    f"is {wanted} with the other arguments' sizes. Capture it with an example of this shape."
                )
        for symbol, (low, high) in traced.ranges.items():
            value = self.symbols.get(symbol)
            if value is not None and not low <= value <= high:
                raise InputError(
                    f"a size is {value}, and the program was captured for {low} to {high}. Capture it with an "
                    f"example of this size."
                )
        for guard in traced.guards:
            if guard.xreplace(self.symbols) == False:  # noqa: E712  (sympy's own truth values)
                raise InputError(
                    f"the sizes {self.symbols} do not meet {guard}, on which the captured program rests. "
                    "Capture it with an example of these sizes."
                )

    def number(self, size: Any) -> Any:
        """A symbolic or plain number as a plain one."""
        if not isinstance(size, SYMBOLIC):
            return size
        expression = torch_private.symbolic_expression(size)
        if expression not in self._cache:
            kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(size)]
            self._cache[expression] = kind(expression.xreplace(self.symbols))
        return self._cache[expression]

    def plain(self, item: Any, values: dict[torch.fx.Node, Any]) -> Any:
        """Arguments of a node, with the new nodes and numbers."""
        return torch.fx.node.map_aggregate(
            item, lambda leaf: values[leaf] if isinstance(leaf, torch.fx.Node) else self.number(leaf)
        )

    def fake(self, val: Any) -> Any:
        """A node's `val` with plain sizes."""
        if isinstance(val, torch.Tensor):
            shape = tuple([self.number(size) for size in val.shape])
            stride = tuple([self.number(size) for size in val.stride()])
            return shared_val(shape, stride, val.dtype, val.device)
        if isinstance(val, (tuple, list)):
            return type(val)(self.fake(item) for item in val)
        return self.number(val)

    def spec(self, spec: InputSpec) -> InputSpec:
        """A signature entry with plain sizes."""
        return InputSpec(
            name=spec.name,
            kind=spec.kind,
            target=spec.target,
            shape=tuple(self.number(size) for size in spec.shape),
            dtype=spec.dtype,
            stride=tuple(self.number(size) for size in spec.stride),
            requires_grad=spec.requires_grad,
            tied=spec.tied,
        )
