"""The adapter of a plain module, and what adapters of libraries may do beyond it.

In: a model, and the compiled module made of it. Out: presets, values of buffers, methods of the library's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Adapter:
    """The plain module: nothing known about it."""

    def styles(self, model: torch.nn.Module) -> Mapping[str, str]:
        """Tensor-parallel styles by module name, as the model gives them."""
        return {}

    def fill_buffers(self, model: torch.nn.Module, entries: Sequence[Any]) -> None:
        """Give values to buffers of a model on the meta device that no weights file holds."""

    def attach(self, compiled: Any) -> None:
        """Add the library's own methods to a compiled module."""
