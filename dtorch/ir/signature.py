"""What goes into a traced program and what comes out: names, kinds, and which outputs are new values of inputs.

In: what capture found. Out: frozen data that every later stage reads; no tensors are held here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

InputKind = Literal["user", "weight", "buffer", "state", "constant"]


@dataclass(frozen=True)
class InputSpec:
    """One placeholder of the global graph.

    `kind`: "user" (given at each call by the host), "weight" / "buffer" (stored on the devices, `target` is the
    module's qualified name; tied names share one input and are listed in `tied`), "state" (a value that lives on
    the devices from step to step, such as a KV cache; donated), "constant" (a tensor made by the model's Python
    code; `target` is the key into `Traced.constants`).
    """

    name: str
    kind: InputKind
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = ()
    requires_grad: bool = False
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputSpec:
    """One result of the global graph, in order.

    `mutates`: the name of the input whose new value this is (written back after the call); None for a result
    that goes to the user. `aliases`: the name of the input that this result *is* or views, if any.
    """

    name: str
    mutates: str | None = None
    aliases: str | None = None


@dataclass(frozen=True)
class Signature:
    """Inputs in placeholder order, outputs in the order of the graph's output tuple."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    by_name: dict[str, InputSpec] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self.by_name.update({spec.name: spec for spec in self.inputs})
