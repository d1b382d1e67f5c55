"""Cold sharding propagation for one op, next to torch DTensor's, on meshes of one, two and three axes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bars import Bar
from torch.fx import Graph, GraphModule, Node

LIMIT_MS = 0.3
MESHES = ((8,), (2, 4), (2, 2, 2))
OPS = ("add", "mm", "relu", "softmax", "layer_norm", "view", "cat")
ROUNDS = 25


def bars() -> Iterator[Bar]:
    """Three bars: milliseconds of thread CPU time an op."""
    for shape in MESHES:
        peer = _torch_ms(shape)
        ours = _ours_ms(shape)
        name = f"cold propagation of one op on a {len(shape)}-axis mesh"
        yield Bar(name, ours, peer, LIMIT_MS, "ms", "torch DTensor", of_ratio=False)


def _ours_ms(shape: tuple[int, ...]) -> float:
    """Median over graphs of all the ops, on shapes never seen before, for one op."""
    from dtorch.ir.layout import WHOLE, Split
    from dtorch.ir.signature import InputSpec, OutputSpec, Signature
    from dtorch.sharding.propagate import propagate
    from dtorch.sharding.requests import Ask, Requests
    from dtorch.torch_private import fake_tensor

    names = ("a", "b", "c")[: len(shape)]
    rows = (Split(0), *[WHOLE] * (len(shape) - 1))
    columns = (*[WHOLE] * (len(shape) - 1), Split(1))
    times: list[float] = []
    size = 64
    for _ in range(ROUNDS):
        size += 8
        graph = Graph()
        x = _argument(graph, "x", fake_tensor((size, 8), (8, 1), torch.float32, "cpu"))
        y = _argument(graph, "y", fake_tensor((size, 8), (8, 1), torch.float32, "cpu"))
        w = _argument(graph, "w", fake_tensor((8, size), (size, 1), torch.float32, "cpu"))
        results = [_call(graph, op, x, y, w, size, fake_tensor) for op in OPS]
        graph.output(tuple(results))
        module = GraphModule({}, graph)
        inputs = tuple(
            InputSpec(node.name, "user", node.name, tuple(node.meta["val"].shape), torch.float32) for node in (x, y, w)
        )
        signature = Signature(inputs, tuple(OutputSpec(result.name) for result in results))
        asks = {}
        for axis in range(len(shape)):
            asks["x", axis] = asks["y", axis] = Ask(rows[axis], exact=True)
            asks["w", axis] = Ask(columns[axis], exact=True)
        began = time.thread_time()
        propagate(module, signature, Requests(asks, names, shape))
        times.append((time.thread_time() - began) * 1e3 / len(OPS))
    return statistics.median(times[5:])


def _argument(graph: Graph, name: str, value: torch.Tensor) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _call(graph: Graph, op: str, x: Node, y: Node, w: Node, size: int, fake: Callable[..., Any]) -> Node:
    aten = torch.ops.aten
    same = fake((size, 8), (8, 1), torch.float32, "cpu")
    calls: dict[str, tuple[Any, tuple, Any]] = {
        "add": (aten.add.Tensor, (x, y), same),
        "mm": (aten.mm.default, (x, w), fake((size, size), (size, 1), torch.float32, "cpu")),
        "relu": (aten.relu.default, (x,), same),
        "softmax": (aten.softmax.int, (x, -1), same),
        "layer_norm": (aten.layer_norm.default, (x, [8]), same),
        "view": (aten.view.default, (x, [size, 2, 4]), fake((size, 2, 4), (8, 4, 1), torch.float32, "cpu")),
        "cat": (aten.cat.default, ([x, y], 1), fake((size, 16), (16, 1), torch.float32, "cpu")),
    }
    target, args, value = calls[op]
    node = graph.call_function(target, args)
    node.meta["val"] = value
    return node


def _torch_ms(shape: tuple[int, ...]) -> float:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", shape)
    rows = [Shard(0)] + [Replicate()] * (len(shape) - 1)
    columns = [Replicate()] * (len(shape) - 1) + [Shard(1)]
    local_rows = shape[0]
    per_op: dict[str, list[float]] = {}
    size = 64
    with torch.no_grad():
        for _ in range(ROUNDS):
            for op in OPS:
                size += 8
                part = torch.empty(size // local_rows, 8)
                x, y = (DTensor.from_local(part.clone(), mesh, rows, run_check=False) for _ in "xy")
                w = DTensor.from_local(torch.empty(8, size // shape[-1]), mesh, columns, run_check=False)
                run = {
                    "add": lambda x=x, y=y: x + y,
                    "mm": lambda x=x, w=w: torch.mm(x, w),
                    "relu": lambda x=x: torch.relu(x),
                    "softmax": lambda x=x: torch.softmax(x, -1),
                    "layer_norm": lambda x=x: torch.nn.functional.layer_norm(x, (8,)),
                    "view": lambda x=x: x.view(-1, 2, 4),
                    "cat": lambda x=x, y=y: torch.cat([x, y], 1),
                }[op]
                began = time.thread_time()
                run()
                per_op.setdefault(op, []).append((time.thread_time() - began) * 1e3)
    return statistics.median(statistics.median(times[5:]) for times in per_op.values())
