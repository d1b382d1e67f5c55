"""Steps on two worker processes beside simulated devices and torch DTensor; starting, reading, losing a worker."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bars import Bar
from llama_models import llama, token_ids

import dtorch
from dtorch import Replicate, Shard, options
from dtorch.errors import DeviceError
from dtorch.runtime.session import SESSION

STEP_LIMIT_MS = 0.3
DTENSOR_LIMIT = 0.9
START_LIMIT_S = 1.0
LOSS_LIMIT_S = 1.0
READ_LIMIT_MS = 0.3
LAYERS, HIDDEN = 4, 256


def bars() -> Iterator[Bar]:
    """All figures; workers are started and ended here."""
    yield _start()
    try:
        with options.override(workers="process"):
            yield from _small_step()
            yield _read()
            yield from _against_dtensor()
            yield _loss()
    finally:
        dtorch.shutdown()


def mesh() -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])


_START = """
import time
began = time.perf_counter()
import torch
imported = time.perf_counter()
import dtorch
dtorch.init(workers="process", devices=2)
x = dtorch.distribute_tensor(torch.ones(4), dtorch.init_device_mesh("cpu", (2,)), [dtorch.Replicate()])
x.to_torch()
print(time.perf_counter() - imported, imported - began)
"""


def _start() -> Bar:
    """Seconds from torch's import to the first result, less one more import of torch (the workers' own)."""
    found = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, check=True)
        total, imported = map(float, done.stdout.split())
        found.append(total - imported)
    name = "start to first result on 2 workers, beyond torch's import"
    return Bar(name, statistics.median(found), None, START_LIMIT_S, "s", "-", of_ratio=False)


def _median_ms(function: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        function()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def _small_step() -> Iterator[Bar]:
    """A step of `relu(x @ w1) @ w2`, 8 x 8, one all-reduce: wall time over the simulated executor's, and CPU time."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 8, bias=False)
    ).eval()
    placements = {"0.weight": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}
    x = torch.randn(8, 8)
    real = dtorch.compile(model, mesh(), placements=placements)
    with options.override(workers="simulated"):
        simulated = dtorch.compile(model, mesh(), placements=placements)
        simulated(x)
    real(x)
    board = SESSION.cluster("cpu").board
    before = board.sent_messages, board.sent_bytes
    real(x)
    messages, sent = board.sent_messages - before[0], board.sent_bytes - before[1]
    rounds = [(_median_ms(lambda: real(x), 50), _median_ms(lambda: simulated(x), 50)) for _ in range(6)]
    over = statistics.median(one - other for one, other in rounds)
    yield Bar(
        f"wall time of a step on 2 workers over simulated ({messages} messages, {sent} bytes)",
        over, None, STEP_LIMIT_MS, "ms", "-", of_ratio=False,
    )  # fmt: skip
    began = time.process_time()
    for _ in range(300):
        real(x)
    spent = (time.process_time() - began) / 300 * 1e3
    name = "client + controller CPU time of a step on 2 workers"
    yield Bar(name, spent, None, STEP_LIMIT_MS, "ms", "-", of_ratio=False)


def _read() -> Bar:
    x = dtorch.distribute_tensor(torch.ones(()), mesh(), [Replicate()])
    x.item()
    name = "scalar read round trip, 2 workers"
    return Bar(name, _median_ms(x.item, 300), 2.4, READ_LIMIT_MS, "ms", "Monarch (published)", of_ratio=False)


def _against_dtensor() -> Iterator[Bar]:
    """The same Llama with tensor parallelism, in alternation with torch DTensor under torchrun on Gloo."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(here / "dtensor_peer.py"), str(LAYERS), str(HIDDEN)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    peer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert peer.stdin is not None and peer.stdout is not None

    def peer_ms(count: int) -> float:
        assert peer.stdin is not None and peer.stdout is not None
        assert peer.stdout.readline().strip() == "ready"
        peer.stdin.write(f"{count}\n")
        peer.stdin.flush()
        return float(peer.stdout.readline())

    compiled, ids = dtorch.compile(llama(LAYERS, HIDDEN), mesh()), token_ids()
    with torch.no_grad():
        compiled(ids, use_cache=False)
        peer_ms(3)
        rounds = [(_median_ms(lambda: compiled(ids, use_cache=False), 15), peer_ms(15)) for _ in range(5)]
    peer.stdin.write("0\n")
    peer.stdin.close()
    peer.wait(30)
    ours, theirs = (statistics.median(times) for times in zip(*rounds))
    name = f"step of a {LAYERS}-layer Llama, hidden {HIDDEN}, TP=2 on 2 processes"
    yield Bar(name, ours, theirs, DTENSOR_LIMIT, "ms", "torch DTensor, torchrun, Gloo")


def _loss() -> Bar:
    """Seconds from killing a worker to the error of everything pending; median of three."""
    found = []
    for _ in range(3):
        x = dtorch.distribute_tensor(torch.ones(8), mesh(), [Shard(0)])
        futures = [(x + step).sum().redistribute(placements=[Replicate()]).to_torch_async() for step in range(3)]
        futures[-1].get()
        os.kill(SESSION.cluster("cpu").workers[1].process.pid, signal.SIGKILL)
        began = time.perf_counter()
        futures = [(x + step).sum().redistribute(placements=[Replicate()]).to_torch_async() for step in range(3)]
        for future in futures:
            try:
                future.get()
            except DeviceError:
                continue
            raise AssertionError("a step ran on a dead worker")
        found.append(time.perf_counter() - began)
        dtorch.recover()
    name = "killed worker to the error on every future"
    return Bar(name, statistics.median(found), 3.0, LOSS_LIMIT_S, "s", "Monarch (published)", of_ratio=False)
