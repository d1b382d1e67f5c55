"""The plan: what a device is to do, as pure data that can be printed, compared, saved and run anywhere.

In: scheduled graphs (see `dtorch.lower.emit`). Out: frozen dataclasses that round-trip through JSON. A plan names
kernels, never Python closures. One plan serves all coordinates of a mesh: integers that differ between devices
are expressions, and `resolve` gives them their value at a coordinate.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import torch

from dtorch.errors import PlanError
from dtorch.ir.layout import Pending, Spec, Split, Whole, local_bounds, local_dim
from dtorch.ir.ops import INTEGER_FUNCTIONS

FORMAT = 1
PYTHON = "python:"  # before module and name of a user's function that is a kernel


@dataclass(frozen=True)
class Ref:
    """The value in a register."""

    register: int


@dataclass(frozen=True)
class LocalSize:
    """Elements of a dimension that a device holds; `cuts`: (outer, unit, mesh axis)."""

    size: int
    cuts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class LocalBegin:
    """Index of the first unit that a device holds in the one interval of `cuts`."""

    size: int
    cuts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Arithmetic:
    """`function` ("add", "sub", "mul", "floordiv", "min", "max") of two integers or expressions."""

    function: str
    operands: tuple[Any, ...]


@dataclass(frozen=True)
class Instruction:
    """One kernel call: `result = kernel(*args, **kwargs)`, then the registers in `frees` are dropped.

    `stream`: "compute" or "comm:<axis>". `waits`: positions of instructions on other streams to wait for first.
    `line`: index into `Plan.lines`.
    """

    kernel: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    result: int
    frees: tuple[int, ...]
    stream: str
    waits: tuple[int, ...]
    line: int


@dataclass(frozen=True)
class PlanInput:
    """An argument of the plan: its register, what it is and how it is placed. `donated`: may be overwritten."""

    name: str
    kind: str
    target: str
    register: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    donated: bool = False


@dataclass(frozen=True)
class PlanOutput:
    """A result of the plan; `mutates`: the input whose new value it is, `inplace` if it is in that input's bytes."""

    name: str
    register: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    mutates: str | None = None
    aliases: str | None = None
    inplace: bool = False


@dataclass(frozen=True)
class Plan:
    """A whole program for a canonical mesh of `mesh_shape`; device ids are the runtime's business."""

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    inputs: tuple[PlanInput, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[PlanOutput, ...]
    registers: int
    lines: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A name for the plan by its content; equal on every machine."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=12).hexdigest()

    @property
    def launch_digest(self) -> str:
        """A digest of the order of all communication launches; equal on all devices by construction."""
        launches = [(i.kernel, _encode(i.args[1:])) for i in self.instructions if i.kernel.startswith("_c10d_")]
        text = json.dumps(launches, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON text, deterministic."""
        body = {field.name: _encode(getattr(self, field.name)) for field in fields(self)}
        return json.dumps({"format": FORMAT, **body}, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan back. Raises PlanError for text that is no plan of this format."""
        try:
            body = json.loads(text)
        except ValueError as error:
            raise PlanError(f"this is not a plan: {error}. Write one with Plan.to_json().") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            found = body.get("format") if isinstance(body, dict) else None
            raise PlanError(f"this plan has format {found}, this version reads format {FORMAT}: compile again.")
        try:
            return Plan(**{field.name: _decode(body[field.name]) for field in fields(Plan)})
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"the plan is damaged at {error}. Write it again with Plan.to_json().") from error


# --- JSON ---------------------------------------------------------------------------------------------------------

_CLASSES = {
    cls.__name__: cls
    for cls in (Ref, LocalSize, LocalBegin, Arithmetic, Instruction, PlanInput, PlanOutput, Whole, Pending, Split)
}
_TORCH = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def _encode(item: Any) -> Any:
    kind = type(item)
    if item is None or kind in (bool, int, str):
        return item
    if kind is float:
        return {"float": repr(item)}
    if kind is complex:
        return {"complex": repr(item)}
    if isinstance(item, (tuple, list)):
        return {"list" if isinstance(item, list) else "tuple": [_encode(part) for part in item]}
    if isinstance(item, dict):
        return {"dict": [[key, _encode(part)] for key, part in item.items()]}
    if kind in _TORCH:
        return {_TORCH[kind]: str(item).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(item)}
    if is_dataclass(item) and kind.__name__ in _CLASSES:
        return {kind.__name__: [_encode(getattr(item, field.name)) for field in fields(item)]}
    raise PlanError(f"a plan cannot hold {item!r} of type {kind.__name__}: plans are pure data.")


def _decode(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    ((tag, body),) = item.items()
    if tag in _CLASSES:
        return _CLASSES[tag](*[_decode(part) for part in body])
    if tag == "tuple":
        return tuple(_decode(part) for part in body)
    if tag == "list":
        return [_decode(part) for part in body]
    if tag == "dict":
        return {key: _decode(part) for key, part in body}
    if tag == "float":
        return float(body)
    if tag == "complex":
        return complex(body)
    if tag == "device":
        return torch.device(body)
    if tag in ("dtype", "layout", "memory_format"):
        return getattr(torch, body)
    raise PlanError(f"a plan holds nothing called {tag!r}")


# --- values at a coordinate ---------------------------------------------------------------------------------------



def is_expression(item: Any) -> bool:
    """Whether an argument is an integer that depends on the coordinate."""
    return isinstance(item, (LocalSize, LocalBegin, Arithmetic))


@cache
def expression_axes(item: Any) -> frozenset[int]:
    """The mesh axes an integer expression depends on."""
    if isinstance(item, (LocalSize, LocalBegin)):
        return frozenset(axis for _, _, axis in item.cuts)
    if isinstance(item, Arithmetic):
        return frozenset().union(*[expression_axes(operand) for operand in item.operands])
    return frozenset()


def evaluate(item: Any, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> int:
    """The integer that an expression is at a coordinate."""
    if isinstance(item, LocalSize):
        spec = _cut_spec(item.cuts, len(mesh_shape))
        return local_dim(item.size, 0, spec, mesh_shape, coordinate)
    if isinstance(item, LocalBegin):
        cuts = tuple((outer, unit, mesh_shape[axis], coordinate[axis]) for outer, unit, axis in item.cuts)
        return local_bounds(item.size, cuts)[0][2]
    if isinstance(item, Arithmetic):
        return INTEGER_FUNCTIONS[item.function](*[evaluate(o, mesh_shape, coordinate) for o in item.operands])
    return item


def resolve(item: Any, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Any:
    """An argument with every integer expression in it replaced by its value at a coordinate."""
    if is_expression(item):
        return evaluate(item, mesh_shape, coordinate)
    if isinstance(item, (tuple, list)):
        return type(item)(resolve(part, mesh_shape, coordinate) for part in item)
    return item


def _cut_spec(cuts: tuple[tuple[int, int, int], ...], axes: int) -> Spec:
    spec: list[Any] = [Whole()] * axes
    for outer, unit, axis in cuts:
        spec[axis] = Split(0, outer, unit)
    return tuple(spec)
