"""Building the local graph: emits nodes with local metadata and folds integers that are equal on all devices.

In: calls on local nodes. Out: nodes whose `meta["val"]` is what coordinate 0 holds; integers of the mesh coordinate
become nodes only where devices differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from dtorch.ir import ops
from dtorch.ir.layout import Spec, Split, dim_cuts, is_even, local_bounds, local_dim
from dtorch.torch_private import fake_execution

Integer = Any


class LocalBuilder:
    """A growing local graph for a mesh of `mesh_shape`; `where` is the user's line of what is being lowered."""

    def __init__(self, mesh_shape: tuple[int, ...], axis_names: tuple[str, ...]) -> None:
        self.graph = Graph()
        self.mesh_shape = mesh_shape
        self.axis_names = axis_names
        self.where = ""
        self.origin = (0,) * len(mesh_shape)
        self._integers: dict[Any, Node] = {}
        self._metas: dict[Any, Any] = _METAS

    def emit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Add one call; its metadata is found by running it on coordinate 0's fakes, cached by metadata."""
        node = self.graph.call_function(function, args, kwargs)
        node.meta["val"] = self._meta(function, args, kwargs)
        node.meta["where"] = self.where
        return node

    def emit_known(self, function: Callable[..., Any], value: Any, *args: Any) -> Node:
        """Add one call whose metadata is known to be `value`."""
        node = self.graph.call_function(function, args)
        node.meta["val"] = value
        node.meta["where"] = self.where
        return node

    def _meta(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        key = (function, _key(args), _key(tuple(kwargs.items())) if kwargs else None)
        found = self._metas.get(key)
        if found is None:
            if len(self._metas) > 50_000:
                self._metas.clear()
            fakes, named = torch.fx.map_arg((args, kwargs), lambda node: node.meta["val"])
            with fake_execution():
                found = function(*fakes, **named)
            self._metas[key] = found
        return found

    # --- integers -------------------------------------------------------------------------------------------------

    def size(self, size: int, dim: int, spec: Spec) -> Integer:
        """Local size of a dimension: an int where it is the same on every device."""
        if is_even(size, dim, spec, self.mesh_shape):
            return local_dim(size, dim, spec, self.mesh_shape, self.origin)
        cuts = tuple((p.outer, p.unit, axis) for axis, p in enumerate(spec) if type(p) is Split and p.dim == dim)
        return self._integer_node(
            ops.local_size, local_dim(size, dim, spec, self.mesh_shape, self.origin), size, cuts
        )

    def shape(self, shape: Sequence[int], spec: Spec) -> list[Integer]:
        """Local shape of a tensor of logical `shape`."""
        return [self.size(size, dim, spec) for dim, size in enumerate(shape)]

    def begin(self, size: int, dim: int, spec: Spec) -> Integer:
        """Index of the first unit this device holds in the one interval in which `spec` cuts `dim`."""
        cuts = tuple((p.outer, p.unit, axis) for axis, p in enumerate(spec) if type(p) is Split and p.dim == dim)
        if not cuts or all(self.mesh_shape[axis] == 1 for _, _, axis in cuts):
            return 0
        bounds = local_bounds(size, dim_cuts(spec, dim, self.mesh_shape, self.origin))
        return self._integer_node(ops.local_begin, bounds[0][2], size, cuts)

    def integer(self, function: str, *operands: Integer) -> Integer:
        """Arithmetic on integers; folds when all are plain."""
        if all(isinstance(operand, int) for operand in operands):
            return ops.INTEGER_FUNCTIONS[function](*operands)
        if function == "mul" and 1 in operands:
            return next((operand for operand in operands if operand != 1), 1)
        if function in ("add", "sub") and operands[1] == 0:
            return operands[0]
        if function == "floordiv" and operands[1] == 1:
            return operands[0]
        known = ops.INTEGER_FUNCTIONS[function](*[o if isinstance(o, int) else o.meta["val"] for o in operands])
        return self._integer_node(ops.integer, known, function, *operands)

    def _integer_node(self, function: Callable[..., int], known: int, *args: Any) -> Node:
        key = (function, *args)
        if key not in self._integers:
            self._integers[key] = self.emit_known(function, known, *args)
        return self._integers[key]


_METAS: dict[Any, Any] = {}


def _key(argument: Any) -> Any:
    kind = type(argument)
    if kind is Node:
        meta = argument.meta["val"]
        if isinstance(meta, torch.Tensor):
            return (meta.shape, meta.stride(), meta.dtype)
        return (int, meta) if isinstance(meta, int) else tuple((m.shape, m.stride(), m.dtype) for m in meta)
    if isinstance(argument, (list, tuple)):
        return (kind, *[_key(item) for item in argument])
    return (kind, argument) if kind is not float else (kind, repr(argument))


class CallContext:
    """What a localiser sees of one call (the `LocalContext` of `dtorch.sharding.localize`)."""

    def __init__(self, builder: LocalBuilder, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> None:
        self.builder, self._inputs, self._outputs = builder, inputs, outputs
        self.mesh_shape = builder.mesh_shape

    def input_spec(self, position: int) -> Spec:
        """Placement of a tensor argument, by its place in the flattened arguments."""
        return self._inputs[position]

    def output_spec(self, position: int = 0) -> Spec:
        """Placement of a result."""
        return self._outputs[position]

    def local_shape(self, shape: Sequence[int], spec: Spec) -> list[Integer]:
        """Local shape of a tensor of logical `shape`, as ints or integer nodes."""
        return self.builder.shape(shape, spec)

    def local_size(self, size: int, dim: int, spec: Spec) -> Integer:
        """Local size of one dimension."""
        return self.builder.size(size, dim, spec)

    def begin(self, size: int, dim: int, spec: Spec) -> Integer:
        """First unit this device holds of a cut dimension."""
        return self.builder.begin(size, dim, spec)

    def integer(self, function: str, *operands: Integer) -> Integer:
        """Arithmetic on integers."""
        return self.builder.integer(function, *operands)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Emit an op on local values."""
        return self.builder.emit(function, *args, **kwargs)


