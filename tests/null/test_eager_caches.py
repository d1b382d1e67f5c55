"""What eager code keeps of programs that never repeat is bounded, and what is in use stays.

In: loops over ever new shapes, under a small `eager_cache_steps`. Out: right values, flat counts of what is kept, and
no recompiling of what runs beside them.
"""

from __future__ import annotations

import contextvars
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, options

MESH = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
DATA = torch.arange(4000.0)


def cut(size: int) -> Any:
    return dtorch.distribute_tensor(DATA[:size], MESH, [Shard(0)])


def total(x: Any) -> Any:
    """Seven steps and the one that brings the argument in."""
    y = x * 2
    z = y.view(-1, 1)
    for _ in range(2):
        z = (z + 1).relu()
    return z.sum()


@contextmanager
def graph_of(steps: int) -> Iterator[Any]:
    """A graph whose recorders keep so many steps; gives the recorder."""
    with dtorch.Graph() as graph, options.override(eager_cache_steps=steps):
        yield graph.recorder(MESH)


def compiled(recorder: Any) -> int:
    return recorder.home.graph.controller.compiled


def kept() -> Counter[str]:
    gc.collect()
    names = ("State", "Slot", "Known", "Edge", "PlacedStep", "Operation", "SimulatedPlan", "Tensor")
    return Counter(name for name in (type(each).__name__ for each in gc.get_objects()) if name in names)


def test_ever_new_shapes_leave_a_bounded_number_of_things_behind() -> None:
    with graph_of(100) as recorder:
        sizes = iter(range(2, 2000))
        seen = []
        for _ in range(3):
            for size in [next(sizes) for _ in range(40)]:
                assert total(cut(size)).item() == total(DATA[:size]).item()
            seen.append(kept())
            assert recorder.states <= 100 and len(recorder.pools) <= 100
        # the first round fills what is kept for the process
        growth = {name: (seen[1][name], seen[2][name]) for name in seen[2] if seen[2][name] > seen[1][name] + 30}
        assert not growth, growth


def test_a_loop_beside_them_is_never_compiled_again() -> None:
    with graph_of(200) as recorder:
        hot = cut(6)
        for _ in range(3):
            total(hot).item()
        for size in range(10, 110):
            before, misses = compiled(recorder), recorder.misses
            assert total(hot).item() == total(DATA[:6]).item()
            assert (compiled(recorder), recorder.misses) == (before, misses)
            total(cut(size)).item()


def test_what_was_used_last_stays() -> None:
    with graph_of(60) as recorder:
        for size in (2, 4, 6):
            total(cut(size)).item()
        for size in range(10, 16):
            total(cut(2)).item()
            total(cut(size)).item()
        before = compiled(recorder)
        total(cut(2)).item()
        assert compiled(recorder) == before
        total(cut(4)).item()
        assert compiled(recorder) == before + 1


def test_common_beginnings_stay_with_any_of_their_traces() -> None:
    with graph_of(40) as recorder:
        x = cut(6)
        for n in range(60):
            y = x * 2 + 1
            assert (y + n).sum().item() == (DATA[:6] * 2 + 1 + n).sum().item()
        for n in range(60):
            total(cut(20 + n)).item()
            assert (x * 2 + 1 + 0.5).sum().item() == (DATA[:6] * 2 + 1.5).sum().item()
        assert recorder.states <= 40


@pytest.mark.parametrize("steps", [1, 5])
def test_one_trace_may_be_longer_than_all_that_is_kept(steps: int) -> None:
    with graph_of(steps) as recorder:
        for _ in range(3):
            x = cut(6)
            for _ in range(30):
                x = x + 1
            assert x.sum().item() == DATA[:6].sum().item() + 180
        before = compiled(recorder)
        for size in (7, 8, 9):
            assert total(cut(size)).item() == total(DATA[:size]).item()
        assert compiled(recorder) == before + 3


def test_pending_queued_and_live_values_outlive_what_made_them() -> None:
    with graph_of(50) as recorder:
        graph = recorder.home.graph
        base = cut(6)
        view = base[2:4]
        view += 100
        other = base * 2
        future = other.to_torch_async()
        queued = []
        for size in range(10, 50):
            queued.append(total(cut(size)).to_torch_async())
            base += 1
            if size % 7 == 0:
                view *= 1
        graph.sync()
        expected = DATA[:6].clone()
        expected[2:4] += 100
        assert torch.equal(future.get(), expected * 2) and torch.equal(other.to_torch(), expected * 2)
        assert torch.equal(base.to_torch(), expected + 40) and torch.equal(view.to_torch(), expected[2:4] + 40)
        assert [each.get().item() for each in queued] == [total(DATA[:size]).item() for size in range(10, 50)]


def test_a_trace_that_waits_in_the_queue_is_compiled_although_it_was_forgotten() -> None:
    with graph_of(20) as recorder:
        controller = recorder.home.graph.controller
        with controller._busy:  # nothing runs meanwhile
            futures = [total(cut(size)).to_torch_async() for size in range(10, 30)]
            assert recorder.states <= 20
        assert [each.get().item() for each in futures] == [total(DATA[:size]).item() for size in range(10, 30)]


def test_threads_that_share_a_recorder_forget_safely() -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            hot = cut(6 + number)
            for size in range(10, 60):
                assert total(cut(size * 4 + number)).item() == total(DATA[: size * 4 + number]).item()
                for _ in range(3):
                    assert total(hot).item() == total(DATA[: 6 + number]).item()
        except BaseException as error:
            failures.append(error)

    with graph_of(100) as recorder:
        contexts = [contextvars.copy_context() for _ in range(3)]
        threads = [
            threading.Thread(target=context.run, args=(work, number), daemon=True)
            for number, context in enumerate(contexts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures, failures
        assert not any(thread.is_alive() for thread in threads) and recorder.states <= 100


def test_written_views_of_ever_new_shapes_stay_right() -> None:
    with graph_of(60):
        for size in range(4, 44):
            x = dtorch.distribute_tensor(
                DATA[:size].reshape(-1, 2) if size % 2 == 0 else DATA[:size], MESH, [Replicate()]
            )
            plain = DATA[:size].clone().reshape(-1, 2) if size % 2 == 0 else DATA[:size].clone()
            for each in (x, plain):
                part = each[1:]
                part[0] = 5
                part.mul_(2)
                each.add_(1)
            assert torch.equal(x.to_torch(), plain)
