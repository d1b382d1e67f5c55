"""Eager distributed tensors: recording an op, a read, a Hugging Face forward, next to torch eager and torch DTensor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from bars import Bar
from llama_models import llama, token_ids

import dtorch

RECORD_LIMIT = 1.0
END_TO_END_LIMIT = 1.37
READ_LIMIT_MS = 0.3
MODEL_LIMITS = {256: 0.36, 64: 0.75}
REPEATS = 30


def bars() -> Iterator[Bar]:
    """The bars of eager code."""
    mesh = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=["tp"])
    plain = (torch.ones(1, 1), torch.ones(1, 1), torch.ones(1))
    ours = tuple(dtorch.distribute_tensor(each, mesh, [dtorch.Replicate()]) for each in plain)
    with torch.no_grad():
        for name, program in (("chain of seven ops", _chain), ("add alone", _adds)):
            record, whole = _times(program, ours, lambda y: y.to_torch())
            eager, read = _times(program, plain, lambda y: y.sum().item())
            yield Bar(f"record an op: {name}, us", record, eager, RECORD_LIMIT, "us", "torch eager")
            title = f"an op end to end with the value read: {name}, us"
            yield Bar(title, whole, read, END_TO_END_LIMIT, "us", "torch eager")
        distributed, _ = _times(_adds, _torch_distributed(plain), lambda y: None)
        record, _ = _times(_adds, ours, lambda y: y.to_torch())
        yield Bar("record an op: add alone, next to torch DTensor, us", record, distributed, 1.0, "us", "torch DTensor")
        yield Bar("round trip of a scalar read", _read_ms(ours[0]), None, READ_LIMIT_MS, "ms", "-", False)
        for hidden, limit in MODEL_LIMITS.items():
            yield _model(hidden, limit, mesh)


def _chain(x: Any, w: Any, b: Any) -> Any:
    for _ in range(REPEATS):
        x = x + b
        x = x * 0.5
        x = x @ w
        x = F.linear(x, w, b)
        x = F.layer_norm(x, (1,), b, b)
        x = x.view(1, 1)
        x = x.transpose(0, 1)
    return x


def _adds(x: Any, w: Any, b: Any) -> Any:
    for _ in range(7 * REPEATS):
        x = x + b
    return x


def _times(program: Callable[..., Any], args: tuple, finish: Callable[[Any], Any]) -> tuple[float, float]:
    """Microseconds an op: of the program alone, and with the finish."""
    alone, whole = [], []
    for _ in range(60):
        began = time.perf_counter()
        y = program(*args)
        middle = time.perf_counter()
        finish(y)
        ended = time.perf_counter()
        alone.append((middle - began) / (7 * REPEATS) * 1e6)
        whole.append((ended - began) / (7 * REPEATS) * 1e6)
    return statistics.median(alone[10:]), statistics.median(whole[10:])


def _torch_distributed(plain: tuple) -> tuple:
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,)) if dist.get_world_size() == 1 else None
    if mesh is None:
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh("cpu", [0])
    return tuple(distribute_tensor(each, mesh, [Replicate()]) for each in plain)


def _read_ms(x: Any) -> float:
    times = []
    for _ in range(200):
        y = x + 1
        began = time.perf_counter()
        y.item()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[20:])


def _model(hidden: int, limit: float, mesh: Any) -> Bar:
    """Client time of a Llama forward with distributed parameters, values not read, over eager's whole forward."""
    model = llama(4, hidden=hidden, heads=4)
    ours = dtorch.distribute_module(llama(4, hidden=hidden, heads=4), mesh)
    ids = token_ids()
    placed = dtorch.distribute_tensor(ids, mesh, [dtorch.Replicate()])
    client, eager = [], []
    for _ in range(20):
        began = time.perf_counter()
        logits = ours(placed, use_cache=False).logits
        client.append((time.perf_counter() - began) * 1e3)
        logits.to_torch()
        began = time.perf_counter()
        model(ids, use_cache=False)
        eager.append((time.perf_counter() - began) * 1e3)
    name = f"client time of a Hugging Face forward, hidden {hidden}"
    return Bar(name, statistics.median(client[5:]), statistics.median(eager[5:]), limit, "ms", "torch eager")
