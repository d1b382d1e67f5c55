"""Compiling a Llama-shaped model (32 layers, hidden 256), next to `torch.compile(backend="aot_eager")`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from bars import Bar, seconds
from llama_models import llama, token_ids

import dtorch

PEER = "torch.compile aot_eager"
RECORDING_LIMIT = 1.0
AFTER_CAPTURE_LIMIT_S = 2.0
LINEAR_LIMIT = 1.5  # seconds a layer at 128 layers ÷ at 32


def bars() -> Iterator[Bar]:
    """Compile time by recording and by export, the stages after capture, and growth with depth."""
    ids = token_ids()
    _first_use(ids)
    model = llama(32)
    peer = seconds(lambda: _aot_eager(model, ids))
    times = {shape: _compile(model, ids, shape) for shape in ((1,), (2,), (2, 2))}
    for shape in ((2,), (1,)):
        name = f"compile by recording, 32 layers, mesh {shape}"
        yield Bar(name, times[shape][0], peer, RECORDING_LIMIT, "s", PEER)
    for shape in ((2,), (2, 2)):
        name = f"stages after capture, 32 layers, mesh {shape}"
        yield Bar(name, times[shape][1], peer, AFTER_CAPTURE_LIMIT_S, "s", PEER, of_ratio=False)
    total = times[2,][0]
    deep = _compile(llama(128), ids, (2,))
    yield Bar("seconds a layer at 128 layers, against 32", deep[0] / 128, total / 32, LINEAR_LIMIT, "s", "32 layers")
    export = seconds(lambda: dtorch.compile(model, _mesh((2,)), dynamic=True)(ids, use_cache=False))
    yield Bar("compile by export, 32 layers (for comparison)", export, total, None, "s", "recording")


def _mesh(shape: tuple[int, ...]) -> Any:
    return dtorch.init_device_mesh("cpu", shape, mesh_dim_names=["dp", "tp"][-len(shape) :])


def _compile(model: torch.nn.Module, ids: torch.Tensor, shape: tuple[int, ...]) -> tuple[float, float]:
    """Seconds from `compile` to the first result, and of the stages after capture in that."""
    made = []

    def run() -> None:
        made.append(dtorch.compile(model, _mesh(shape)))
        made[0](ids, use_cache=False)

    total = seconds(run)
    return total, made[0]._program().compiled.seconds


def _aot_eager(model: torch.nn.Module, ids: torch.Tensor) -> None:
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend="aot_eager")(ids, use_cache=False)


def _first_use(ids: torch.Tensor) -> None:
    """Imports and one-time set-up of both, on a model of another size."""
    small = llama(1, hidden=64, heads=2)
    _compile(small, ids, (2,))
    _aot_eager(small, ids)
