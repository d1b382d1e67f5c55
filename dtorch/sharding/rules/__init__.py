"""Sharding rules, one file per family of ops; importing this registers all of them."""

from dtorch.sharding.rules import (  # noqa: F401  (imported for their registrations)
    attention,
    convolution,
    factories,
    indexing,
    matmul,
    norms,
    pieces,
    pointwise,
    reductions,
    transforms,
    views,
)
from dtorch.sharding.rules.registry import mappings_of, register_sharding_rule, when_registered

__all__ = ["mappings_of", "register_sharding_rule", "when_registered"]
