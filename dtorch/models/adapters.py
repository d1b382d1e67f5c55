"""Which adapter a model gets: what its library's models need besides compiling (presets, caches, generation).

In: a model. Out: its `Adapter`; the plain one for modules of no library that DTorch knows.
"""

from __future__ import annotations

import sys

import torch

from dtorch.models.plain import Adapter


def adapter_for(model: torch.nn.Module) -> Adapter:
    """The adapter of the library that a model's class comes from; libraries are not imported for it."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from dtorch.models.transformers import TransformersAdapter

        return TransformersAdapter()
    return Adapter()
