"""DTorch: one ordinary Python process drives a whole mesh of PyTorch devices."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "compile": "dtorch.api",
    "CompiledModule": "dtorch.compiled",
    "DeviceMesh": "dtorch.mesh",
    "init_device_mesh": "dtorch.mesh",
    "Shard": "dtorch.placements",
    "Replicate": "dtorch.placements",
    "Partial": "dtorch.placements",
    "Tensor": "dtorch.factories",
    **dict.fromkeys(
        (
            "tensor from_torch distribute_tensor empty zeros ones full rand randn randint randperm arange linspace "
            "logspace eye empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
        ).split(),
        "dtorch.factories",
    ),
    **dict.fromkeys(
        ("Graph", "default_graph", "current_graph", "sync", "sync_future", "explicit_redistribution", "memory_stats"),
        "dtorch.graph",
    ),
    **dict.fromkeys(("device_mesh_guard", "dtype_guard", "default_device_mesh"), "dtorch.defaults"),
    "TensorFuture": "dtorch.future",
    **dict.fromkeys(("assert_no_recompile", "expect_collectives"), "dtorch.watch"),
    **dict.fromkeys(("init", "shutdown", "recover", "status", "profile"), "dtorch.workers"),
    "nn": "dtorch.nn",
    "distribute_module": "dtorch.nn",
    "Options": "dtorch.options",
    "options": "dtorch.options",
    "errors": "dtorch.errors",
    "register_sharding_rule": "dtorch.sharding.rules",
    "register_pass": "dtorch.passes.base",
    "default_passes": "dtorch.passes.pipeline",
}
"""Public names and the modules they live in; loaded at first use, so that `import dtorch` costs little beyond torch."""

__version__ = "0.1.0"
__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    home = _PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module 'dtorch' has no attribute {name!r}")
    module = importlib.import_module(home)
    found = module if home == f"dtorch.{name}" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
