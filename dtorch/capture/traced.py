"""`Traced`: a captured module as data: graph, signature, constants, and how outputs are rebuilt.

In: what a recorder or torch.export found. Out: the object that the compiler's later stages read, and small
programs that compute single values which the model's Python code asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch.ir.signature import Signature


@dataclass
class Traced:
    """One captured program.

    graph: placeholders in the order of `signature.inputs`, a body of ATen overloads, one flat output tuple in
    the order of `signature.outputs`; every node has `meta["val"]`. constants: values of the inputs of kind
    "constant", by target. structure: rebuilds the user's result from the flat user results. reads: values of
    the inputs that Python code asked for, in order; the graph is right only for inputs for which every
    `program` gives an equal `value`. guards, ranges: for symbolic sizes, the conditions (sympy) and bounds
    within which the graph is right. assigned: attributes of modules that the forward
    set, and that are forgotten. time_ms: how long capturing took.
    """

    graph: torch.fx.GraphModule
    signature: Signature
    constants: dict[str, torch.Tensor]
    structure: Any = None
    reads: list[Read] = field(default_factory=list)
    guards: list[Any] = field(default_factory=list)
    ranges: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    assigned: tuple[str, ...] = ()
    time_ms: float = 0.0

    def computes_as(self, other: Traced) -> bool:
        """Whether the other program has the same nodes, inputs, constants and reads."""
        return (
            self.signature == other.signature
            and _text(self.graph) == _text(other.graph)
            and self.constants.keys() == other.constants.keys()
            and all(_same(value, other.constants[name]) for name, value in self.constants.items())
            and len(self.reads) == len(other.reads)
            and all(a.request.program.computes_as(b.request.program) for a, b in zip(self.reads, other.reads))
        )


def _text(graph: torch.fx.GraphModule) -> list[tuple]:
    return [(node.op, node.name, str(node.target), repr(node.args), repr(node.kwargs)) for node in graph.graph.nodes]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


@dataclass(frozen=True)
class ReadRequest:
    """The model's Python code needs a value: `program` computes it from the original inputs and is its one output.

    index: the how-manieth read of the capture. where: the user's line. what: the Python operation ("bool",
    "item", ...). only_user_inputs: the value depends on user inputs and constants alone, so the host's tensors
    suffice for it.
    """

    index: int
    where: str
    what: str
    program: Traced
    only_user_inputs: bool


@dataclass(frozen=True)
class Read:
    """A read that was answered: the graph holds for inputs that give the same `value`."""

    request: ReadRequest
    value: torch.Tensor


ReadCallback = Callable[[ReadRequest], torch.Tensor]
