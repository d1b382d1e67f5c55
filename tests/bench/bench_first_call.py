"""The client's share of an operation's first time: a call on shapes that nobody has used before, nothing waited for.

In: hot functions, rare ones, and such that take the general way into ATen. Out: bars; a figure is the median over
functions, of each its median over new shapes, with whole and with cut inputs.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from bars import Bar

import dtorch
from dtorch import Replicate, Shard

LIMIT_MS = 1.0
SHAPES = 12

Tensors = tuple[Any, ...]  # x (n, h), y (n, h), weight (6, h), bias (6), row (h), q (2, 2, n, 8), index (n)
HOT: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, w, b, r, q, i: torch.add(x, y),
    "x * number": lambda x, y, w, b, r, q, i: x * 2.0,
    "in place": lambda x, y, w, b, r, q, i: x.add_(y),
    "compare": lambda x, y, w, b, r, q, i: x > y,
    "where": lambda x, y, w, b, r, q, i: torch.where(x > 0, x, y),
    "gelu": lambda x, y, w, b, r, q, i: F.gelu(x),
    "linear": lambda x, y, w, b, r, q, i: F.linear(x, w, b),
    "matmul": lambda x, y, w, b, r, q, i: x @ y.t(),
    "view": lambda x, y, w, b, r, q, i: x.view(-1),
    "transpose": lambda x, y, w, b, r, q, i: x.transpose(0, 1),
    "unsqueeze": lambda x, y, w, b, r, q, i: x.unsqueeze(1),
    "expand": lambda x, y, w, b, r, q, i: r.expand(3, -1),
    "slice": lambda x, y, w, b, r, q, i: x[..., 1:],
    "select": lambda x, y, w, b, r, q, i: x[:, 2],
    "cat": lambda x, y, w, b, r, q, i: torch.cat([x, y], 0),
    "stack": lambda x, y, w, b, r, q, i: torch.stack([x, y]),
    "sum": lambda x, y, w, b, r, q, i: x.sum(-1),
    "mean": lambda x, y, w, b, r, q, i: x.mean(-1, keepdim=True),
    "softmax": lambda x, y, w, b, r, q, i: F.softmax(x, -1),
    "layer_norm": lambda x, y, w, b, r, q, i: F.layer_norm(x, (x.shape[-1],), r, r),
    "rms_norm": lambda x, y, w, b, r, q, i: F.rms_norm(x, (x.shape[-1],), r),
    "embedding": lambda x, y, w, b, r, q, i: F.embedding(i, x),
    "attention": lambda x, y, w, b, r, q, i: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    "to": lambda x, y, w, b, r, q, i: x.to(torch.bfloat16),
}
RARE: dict[str, Callable[..., Any]] = {
    "assignment to rows": lambda x, y, w, b, r, q, i: x.__setitem__(slice(0, 2), 1.5),
    "assignment to a column": lambda x, y, w, b, r, q, i: x.__setitem__((slice(None), 0), y[:, 0]),
    "write through a view": lambda x, y, w, b, r, q, i: x[0].add_(1),
    "out=": lambda x, y, w, b, r, q, i: torch.add(x, x, out=y),
    "convolution": lambda x, y, w, b, r, q, i: F.conv2d(q, q),
    "convolution of one dim": lambda x, y, w, b, r, q, i: F.conv1d(q[0], q[1]),
    "largest of windows": lambda x, y, w, b, r, q, i: F.max_pool2d(q, 2),
    "mean of windows": lambda x, y, w, b, r, q, i: F.avg_pool2d(q, 2),
    "interpolate": lambda x, y, w, b, r, q, i: F.interpolate(q, scale_factor=2),
    "instance_norm": lambda x, y, w, b, r, q, i: F.instance_norm(q),
    "normal_": lambda x, y, w, b, r, q, i: r.normal_(),
}
GENERAL: dict[str, Callable[..., Any]] = {
    "dropout": lambda x, y, w, b, r, q, i: F.dropout(r, 0.5),
    "cumulative maximum": lambda x, y, w, b, r, q, i: torch.cummax(x, 1),
    "rfft": lambda x, y, w, b, r, q, i: torch.fft.rfft(x),
    "linear under autocast": lambda x, y, w, b, r, q, i: _autocast_linear(x, w, b),
}
"""What takes the general way into ATen, by a probe and a trace."""


def _autocast_linear(x: Any, weight: Any, bias: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, weight, bias)


def bars() -> Iterator[Bar]:
    """The bars of first calls."""
    mesh = dtorch.init_device_mesh("cpu", (2,))
    rows = itertools.count(16, 2 * SHAPES)  # no shape twice
    hot = {name: _milliseconds(function, mesh, next(rows)) for name, function in HOT.items()}
    slowest = max(hot, key=lambda name: hot[name])
    name = f"client's share of an op's first time: median of {len(HOT)} hot functions"
    yield Bar(name, statistics.median(hot.values()), None, LIMIT_MS, "ms", "-", False)
    name_of_slowest = f"client's share of an op's first time: the slowest, {slowest}"
    yield Bar(name_of_slowest, hot[slowest], None, None, "ms", "-", False)
    for kind, functions in (("rare functions", RARE), ("functions on the general way", GENERAL)):
        found = [_milliseconds(function, mesh, next(rows)) for function in functions.values()]
        name = f"client's share of an op's first time: median of {len(functions)} {kind}"
        yield Bar(name, statistics.median(found), None, LIMIT_MS if functions is RARE else None, "ms", "-", False)


def _milliseconds(function: Callable[..., Any], mesh: Any, base: int) -> float:
    """Median over new shapes. All calls are recorded in one trace, so no compiler runs beside them."""
    times = []
    for begin, placement in ((base, Replicate()), (base + SHAPES, Shard(0))):
        inputs = [_inputs(mesh, placement, rows) for rows in range(begin, begin + SHAPES)]
        dtorch.sync()
        gc.collect()
        gc.disable()  # a collection would be somebody else's garbage
        try:
            for given in inputs:
                began = time.perf_counter()
                function(*given)
                times.append((time.perf_counter() - began) * 1e3)
        finally:
            gc.enable()
    return statistics.median(times)


def _inputs(mesh: Any, placement: Any, rows: int) -> Tensors:
    columns = rows // 2 + 8

    def placed(*shape: int, how: Any = placement) -> Any:
        return dtorch.distribute_tensor(torch.ones(shape), mesh, [how])

    whole = Replicate()
    index = dtorch.distribute_tensor(torch.zeros(rows, dtype=torch.int64), mesh, [placement])
    return (
        placed(rows, columns), placed(rows, columns), placed(6, columns, how=whole), placed(6, how=whole),
        placed(columns, how=whole), placed(2, 2, rows, 8), index,
    )  # fmt: skip
