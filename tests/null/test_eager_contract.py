"""What eager code promises about time: who waits for what, what is final when, and that awaiting is no polling.

In: graphs whose thread is held up, so that what is recorded can only be queued. Out: the client's line returns or
waits as promised, and every value is right once the thread goes on.
"""

import asyncio
import threading
import time

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.controller import QUEUE_JOBS
from dtorch.errors import DTorchError

MESH = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
PLAIN = torch.arange(12.0).reshape(4, 3)


def dist(value=PLAIN, placement=None):
    return dtorch.distribute_tensor(value, MESH, [placement or Shard(0)])


class Held:
    """A graph whose queue nobody works off inside the block."""

    def __init__(self, graph):
        self.busy = graph.controller._busy

    def __enter__(self):
        self.busy.acquire()

    def __exit__(self, *_):
        self.busy.release()


def test_recording_and_asking_for_futures_wait_for_nobody():
    with dtorch.Graph() as graph, Held(graph):
        x = dist()
        began = time.monotonic()
        futures = []
        for i in range(30):
            x = (x * 2).reshape(3, 4).t().reshape(4, 3) - x  # at the first round nothing of it is compiled
            x[0] = i
            futures.append(x.to_torch_async())
        y = x.redistribute(placements=[Replicate()]) @ dtorch.ones(3, 3, device_mesh=MESH)
        done = dtorch.sync_future()
        assert time.monotonic() - began < 20
        assert not any(future.is_ready() for future in futures) and not done.is_ready()
        assert not futures[-1].wait_for(5) and y.shape == (4, 3)
    done.get()
    plain = PLAIN.clone()
    for i in range(30):
        plain = (plain * 2).reshape(3, 4).t().reshape(4, 3) - plain
        plain[0] = i
        assert torch.equal(futures[i].get(), plain)
    torch.testing.assert_close(y.to_torch(), plain @ torch.ones(3, 3))


def test_a_client_far_ahead_waits_until_the_queue_is_shorter(monkeypatch):
    with dtorch.Graph() as graph:
        x = dist()
        (x + 1).to_torch()
        recorded = []

        def record():
            for i in range(200):
                recorded.append((x + i).to_torch_async())

        with Held(graph):
            with graph:
                client = threading.Thread(target=record)
            client.start()
            deadline = time.monotonic() + 30
            before = -1
            while (len(recorded) != before or not recorded) and time.monotonic() < deadline:
                before = len(recorded)
                time.sleep(0.3)
            assert client.is_alive() and len(recorded) <= QUEUE_JOBS + 2, len(recorded)
        client.join(60)
        assert not client.is_alive() and len(recorded) == 200
        assert all(torch.equal(future.get(), PLAIN + i) for i, future in enumerate(recorded))


def test_awaiting_sets_no_timer_and_the_loop_stands_still_meanwhile():
    with dtorch.Graph() as graph:
        held = Held(graph)

        async def main():
            loop = asyncio.get_running_loop()
            timers, turns = [], []
            real_at, real_soon = loop.call_at, loop._run_once
            loop.call_at = lambda *args, **kwargs: [timers.append(args), real_at(*args, **kwargs)][1]
            loop._run_once = lambda: [turns.append(1), real_soon()][1]
            threading.Timer(0.5, held.__exit__).start()
            value = await (dist() * 3).to_torch_async()
            return value, timers, turns

        held.__enter__()
        value, timers, turns = asyncio.run(main())
    assert torch.equal(value, PLAIN * 3)
    assert not timers and len(turns) < 10


def test_giving_up_on_an_awaited_value_harms_nobody():
    with dtorch.Graph() as graph:
        x = dist() * 5
        with Held(graph):

            async def impatient():
                await asyncio.wait_for(_await(x), 0.05)

            with pytest.raises(asyncio.TimeoutError):
                asyncio.run(impatient())  # whose loop is closed when the value comes
        assert torch.equal(x.to_torch(), PLAIN * 5)
        assert torch.equal((x + 1).to_torch(), PLAIN * 5 + 1)


async def _await(x):
    return await x.to_torch_async()


def test_shapes_and_placements_are_final_before_anything_runs():
    def program(x, w):
        yield (x @ w)
        yield (x @ w).sum(0)
        yield (x * 2).t().reshape(-1)
        yield torch.cat([x, x.redistribute(placements=[Shard(1)])])
        yield x.amax(0)
        yield torch.nn.functional.softmax(x, 0)

    plain = list(program_of(PLAIN))
    with dtorch.Graph() as graph:
        with Held(graph):
            x, w = dist(), dist(torch.ones(3, 3), Replicate())
            made = list(program(x, w))
            seen = [(each.shape, each.dtype, each.stride(), list(each.placements)) for each in made]
            with pytest.raises(RuntimeError, match="(?s)aten.mm.*test_eager_contract.py"):
                x @ x
            with pytest.raises(DTorchError, match="test_eager_contract.py"):
                x.check_placement([Replicate()])
        for each, before, wanted in zip(made, seen, plain, strict=True):
            torch.testing.assert_close(each.to_torch(), wanted)
            assert before == (each.shape, each.dtype, each.stride(), list(each.placements))
            assert each.stride() == wanted.stride()
        assert made[4].placements == [Partial("max")] and made[1].placements == [Partial()]


def program_of(x):
    w = torch.ones(3, 3)
    yield x @ w
    yield (x @ w).sum(0)
    yield (x * 2).t().reshape(-1)
    yield torch.cat([x, x])
    yield x.amax(0)
    yield torch.nn.functional.softmax(x, 0)


def test_placements_equal_the_list_and_the_tuple_of_the_same_items():
    x = dist()
    assert x.placements == [Shard(0)] == x.placements and x.placements == (Shard(0),)
    assert x.placements != [Shard(1)] and x.placements != [Shard(0), Shard(0)] and x.placements[0] == Shard(0)
    assert hash(x.placements) == hash((Shard(0),)) and isinstance(x.placements, tuple)
