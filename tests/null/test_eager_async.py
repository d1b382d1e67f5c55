"""Futures, graphs, threads and what devices hold."""

import asyncio
import gc
import subprocess
import sys
import threading
import time

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard

MESH = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])


def tensor(value=None):
    return dtorch.distribute_tensor(torch.ones(4, 3) if value is None else value, MESH, [Shard(0)])


def failing():
    """A tensor whose value cannot be computed: the index is out of range, which only the devices see."""
    weights = dtorch.distribute_tensor(torch.randn(5, 2), MESH, [Replicate()])
    return torch.nn.functional.embedding(dtorch.distribute_tensor(torch.tensor([1, 99]), MESH, [Replicate()]), weights)


def test_a_future_becomes_ready_without_being_asked():
    future = (tensor() * 2).sum().to_torch_async()
    deadline = time.monotonic() + 20
    while not future.is_ready() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert future.is_ready() and future.get().item() == 24.0


def test_wait_for_gives_up_after_its_time_and_can_be_asked_again():
    future = (tensor() * 3).to_torch_async()
    future.wait_for(0.001)
    assert future.wait_for(20_000)
    assert torch.equal(future.get(), torch.full((4, 3), 3.0))


def test_many_futures_are_awaited_together_while_the_loop_runs_on():
    ticks = []

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    async def main():
        ticking = asyncio.ensure_future(tick())
        found = await asyncio.gather(*[read(tensor() * n) for n in range(8)])
        ticking.cancel()
        return found

    async def read(x):
        return await x.to_torch_async()

    found = asyncio.run(main())
    assert [each[0, 0].item() for each in found] == list(range(8)) and ticks


def test_an_error_in_the_background_reaches_the_read_and_nothing_else():
    good = tensor() + 1
    good.to_torch_async()
    bad = failing()
    future = bad.to_torch_async()
    other = tensor() * 5
    assert torch.equal(other.to_torch(), torch.full((4, 3), 5.0))
    with pytest.raises(IndexError):
        future.get()
    with pytest.raises(IndexError):
        bad.to_torch()
    with pytest.raises(IndexError):
        asyncio.run(_await(bad))
    assert torch.equal(good.to_torch(), torch.full((4, 3), 2.0))


def test_values_of_one_segment_fail_one_by_one():
    with dtorch.Graph():
        weights = dtorch.ones(5, 2, device_mesh=MESH)
        ids = dtorch.distribute_tensor(torch.tensor([1, 99]), MESH, [Replicate()])
        bad = torch.nn.functional.embedding(ids, weights)
        worse, good = bad + 1, weights * 3
        with pytest.raises(IndexError, match=r"(?s)aten.embedding.*test_eager_async.py"):
            worse.to_torch()
        assert torch.equal(good.to_torch(), torch.full((5, 2), 3.0))
        assert torch.equal((good + weights).to_torch(), torch.full((5, 2), 4.0))
        later, fine = bad * good[:2], good + 1
        with pytest.raises(IndexError):
            later.to_torch()
        assert torch.equal(fine.to_torch(), torch.full((5, 2), 4.0))


async def _await(x):
    return await x.to_torch_async()


def test_sync_waits_and_sync_future_tells():
    x = tensor()
    for _ in range(20):
        x = x + 1
    future = dtorch.sync_future()
    assert future.get() is None and future.is_ready()
    y = x * 2
    dtorch.sync()
    assert y.to_torch_async().is_ready()


def test_a_graph_is_a_stream_of_its_own():
    graph = dtorch.Graph()
    with graph:
        x = tensor()
        with dtorch.Graph() as inner:
            assert dtorch.current_graph() is inner
        y = x + 1
    assert dtorch.current_graph() is dtorch.default_graph()
    assert torch.equal(y.to_torch(), torch.full((4, 3), 2.0))
    assert "aten.add" in graph.segments()[-1].graph_text("capture")


def test_graphs_on_threads_do_not_disturb_each_other():
    def work(number, results):
        with dtorch.Graph():
            x = tensor(torch.full((4, 3), float(number)))
            for _ in range(30):
                x = x + 1
            results[number] = x.to_torch()

    results = {}
    threads = [threading.Thread(target=work, args=(number, results)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(results[n], torch.full((4, 3), n + 30.0)) for n in range(4))


def test_one_graph_serves_several_threads():
    shared = tensor()
    failures = []

    def work(number):
        try:
            for step in range(40):
                x = shared * number + step
                y = x.transpose(0, 1).reshape(-1)
                if step % 5 == 0:
                    assert torch.equal(y.to_torch(), torch.full((12,), float(number + step)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures


def test_memory_stats_counts_what_is_held():
    gc.collect()
    before = dtorch.memory_stats()["bytes"]
    x = dtorch.rand(1000, 100, device_mesh=MESH, placements=[Shard(0)])
    dtorch.sync()
    held = dtorch.memory_stats()
    assert 399_000 < held["bytes"] - before <= 400_000 and held["by_mesh_shape"][(2,)] >= 400_000
    del x
    gc.collect()
    dtorch.zeros(1).to_torch()
    assert dtorch.memory_stats()["bytes"] - before < 1000, "what nobody holds is freed"


def test_a_loop_that_never_reads_is_found_again_whatever_its_number_of_steps():
    model = dtorch.distribute_module(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(37)]).eval(), MESH)
    x = dtorch.distribute_tensor(torch.ones(2, 8), MESH, [Replicate()])
    missed = []
    for _ in range(60):
        model(x)
        missed.append(x.recorder.misses)
    assert missed[-1] == missed[40] > 0


def test_a_chain_that_never_reads_is_found_again():
    x = tensor()
    missed = []
    for _ in range(4000):
        x = x * 0.5 + 1
        x = x * 0.25
        missed.append(x.recorder.misses)
    assert missed[-1] == missed[2500]


def test_a_program_may_end_with_work_pending():
    program = (
        "import torch, dtorch\n"
        "mesh = dtorch.init_device_mesh('cpu', (2,))\n"
        "x = dtorch.ones(64, 64, device_mesh=mesh, placements=[dtorch.Shard(0)])\n"
        "kept = []\n"
        "for i in range(30):\n"
        "    x = (x @ x.t()).relu() * 1e-3 + i\n"
        "    kept.append(x.to_torch_async())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stderr == ""
