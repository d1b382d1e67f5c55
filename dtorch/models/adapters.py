"""What a library's models need besides compiling: presets read from them, caches, generation.

In: a model. Out: its `Adapter`; the plain one for modules of no library that DTorch knows.
"""

from __future__ import annotations

import sys
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


def adapter_for(model: torch.nn.Module) -> Adapter:
    """The adapter of the library that a model's class comes from; libraries are not imported for it."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from dtorch.models.transformers import TransformersAdapter

        return TransformersAdapter()
    return Adapter()
