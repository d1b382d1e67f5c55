"""`redistribute` between meshes and between graphs: values, order, errors, and that nobody waits on the client's line.

In: tensors on two meshes or two graphs. Out: the same values on the other one.
"""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.controller import QUEUE_JOBS
from dtorch.errors import ShardingError

PAIR = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
OTHER_PAIR = dtorch.DeviceMesh("cpu", torch.tensor([2, 3]), mesh_dim_names=["tp"])
THREE = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=["tp"])
GRID = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
MESHES = {"pair": PAIR, "other": OTHER_PAIR, "three": THREE, "grid": GRID}
KINDS = (Replicate(), Shard(0), Shard(1), Partial("sum"))


def placements_of(mesh: Any) -> list[tuple[Any, ...]]:
    return list(itertools.product(KINDS, repeat=mesh.ndim))


ROWS = (Shard(0),)


def placed(value: torch.Tensor, mesh: Any = PAIR, placements: Any = ROWS) -> Any:
    return dtorch.distribute_tensor(value, mesh, placements)


class Held:
    """A graph whose thread stands still inside the block: what is recorded meanwhile can only be queued."""

    def __init__(self, graph: Any) -> None:
        self.busy = graph.controller._busy

    def __enter__(self) -> None:
        self.busy.acquire()

    def __exit__(self, *_: object) -> None:
        self.busy.release()


@pytest.mark.parametrize(
    ("source", "target"), [("pair", "other"), ("three", "pair"), ("pair", "grid"), ("grid", "three")]
)
def test_values_arrive_on_every_mesh_from_and_to_every_placement(source: str, target: str) -> None:
    value = torch.arange(35.0).reshape(7, 5)  # even on no axis
    with dtorch.Graph():
        for before, after in itertools.product(placements_of(MESHES[source]), placements_of(MESHES[target])):
            x = placed(value, MESHES[source], before) + 0  # computed, not just put
            y = x.redistribute(MESHES[target], after)
            assert y.device_mesh == MESHES[target] and y.placements == list(after)
            assert torch.equal(y.to_torch(), value), (before, after)
            assert torch.equal((y * 2).to_torch(), value * 2), (before, after)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_partial_values_are_reduced_on_the_way(op: str) -> None:
    value = torch.randn(5, 3)
    x = placed(value, PAIR, [Partial(op)]).redistribute(THREE, [Shard(0)])
    assert torch.equal(x.to_torch(), value)
    y = placed(value, PAIR, [Shard(1)]).redistribute(THREE, [Partial(op)])
    assert torch.allclose((y.redistribute(placements=[Replicate()]) + 0).to_torch(), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.0),
        torch.ones(1, 2),
        torch.zeros(0, 4),
        torch.arange(6).reshape(2, 3),
        torch.tensor([True, False]),
    ],
    ids=["no dims", "smaller than the axis", "empty", "integers", "bools"],
)
def test_shapes_and_dtypes_that_are_easily_forgotten(value: torch.Tensor) -> None:
    after = [Shard(0)] if value.ndim else [Replicate()]
    moved = placed(value, PAIR, [Replicate()]).redistribute(THREE, after)
    assert moved.dtype == value.dtype and torch.equal(moved.to_torch(), value)


@pytest.mark.parametrize("before", [Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize("view", ["t", "expand"])
def test_strides_are_those_of_a_copy(view: str, before: Any) -> None:
    x = placed(torch.arange(6.0).reshape(2, 3), PAIR, [before])
    x = x.t() if view == "t" else x[:, None].expand(2, 4, 3)
    plain = x.to_torch()
    moved = x.redistribute(OTHER_PAIR, [Replicate()])
    assert torch.equal(moved.to_torch(), plain) and torch.equal((moved + 1).to_torch(), plain + 1)
    assert moved.stride() == torch.empty_like(torch.empty_strided(x.shape, x.stride())).stride()
    assert moved.to_torch().stride() == moved.stride()


def test_going_to_another_mesh_does_not_wait() -> None:
    with dtorch.Graph() as graph:
        x = placed(torch.ones(4, 3)) * 2
        with Held(graph):
            y = x.redistribute(THREE, [Shard(1)])
            z = (y + 1).redistribute(PAIR, [Shard(0)]) + x
            future = z.to_torch_async()
            assert not future.is_ready()
        assert torch.equal(future.get(), torch.full((4, 3), 5.0))


def test_writing_later_does_not_change_what_was_sent() -> None:
    x = placed(torch.ones(4, 3))
    with Held(dtorch.default_graph()):
        y = x.redistribute(THREE)
        x.add_(5)
        y.mul_(3)
    assert torch.equal(y.to_torch(), torch.full((4, 3), 3.0))
    assert torch.equal(x.to_torch(), torch.full((4, 3), 6.0))


def test_requires_grad_and_units_travel_along() -> None:
    x = placed(torch.ones(4, 3)).requires_grad_()
    assert x.redistribute(THREE).requires_grad
    assert x.redistribute_like(dtorch.zeros(4, 3, device_mesh=THREE, placements=[Shard(1)])).placements == [Shard(1)]


# --- graphs ------------------------------------------------------------------------------------------------------


def test_what_the_error_of_two_graphs_recommends_works() -> None:
    x = placed(torch.ones(4, 3))
    with dtorch.Graph() as other:
        y = placed(torch.ones(4, 3))
        with pytest.raises(ShardingError, match=r"(?s)of two graphs.*redistribute_like\(y\).*inside the `with graph:`"):
            x + y
        assert torch.equal((x.redistribute(device_mesh=PAIR) + y).to_torch(), torch.full((4, 3), 2.0))
        assert torch.equal((x.redistribute(placements=[Replicate()]) + y).to_torch(), torch.full((4, 3), 2.0))
        assert x.redistribute().recorder.home.graph is other
    assert torch.equal((x.redistribute_like(y) + y).to_torch(), torch.full((4, 3), 2.0))
    assert x.redistribute(placements=[Replicate()]).recorder is x.recorder, "outside of blocks a tensor stays"


def test_what_the_error_of_two_meshes_recommends_works() -> None:
    x, y = placed(torch.ones(4, 3)), placed(torch.ones(4, 3), THREE)
    with pytest.raises(ShardingError, match=r"of one graph, on mesh\(tp=2\) and on mesh\(tp=3\).*one mesh first"):
        x + y
    assert torch.equal((x.redistribute_like(y) + y).to_torch(), torch.full((4, 3), 2.0))


def test_the_other_graph_waits_and_not_the_client() -> None:
    graph = dtorch.Graph()
    with graph:
        x = placed(torch.ones(4, 3)) * 2
    with Held(graph), dtorch.Graph():
        y = x.redistribute(THREE, [Shard(1)]) + 1
        future = y.to_torch_async()
        assert not future.wait_for(50)
    assert torch.equal(future.get(), torch.full((4, 3), 3.0))


def test_graphs_that_give_each_other_values_never_wait_in_a_circle() -> None:
    graphs = [dtorch.Graph() for _ in range(3)]
    results: dict[int, float] = {}

    def play(number: int) -> None:
        mine = graphs[number]
        with mine:
            x = placed(torch.ones(4, 3))
        for step in range(40):
            with graphs[(number + step) % 3]:
                x = x.redistribute([PAIR, THREE][step % 2], [Shard(step % 2)]) + 1
            if step % 7 == number:
                x.sum().to_torch_async()
        results[number] = x[0, 0].item()

    threads = [threading.Thread(target=play, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {0: 41.0, 1: 41.0, 2: 41.0}


def test_two_readers_of_one_graph_do_not_leave_each_other_waiting() -> None:
    with dtorch.Graph() as graph:
        x = placed(torch.ones(4, 3))
        y = x + 1
    read = threading.Thread(target=y.to_torch, daemon=True)
    with Held(graph):  # as if somebody else were at it, who stops before what is wanted
        read.start()
        read.join(0.2)
    read.join(20)
    assert not read.is_alive()


# --- errors and memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["mesh", "graph"])
def test_an_error_of_the_source_reaches_the_read_of_the_target_with_its_line(to: str) -> None:
    with dtorch.Graph():
        weights = placed(torch.randn(5, 2), PAIR, [Replicate()])
        bad = torch.nn.functional.embedding(placed(torch.tensor([1, 99]), PAIR, [Replicate()]), weights)
        good = weights * 3
        target = dtorch.default_graph() if to == "graph" else dtorch.current_graph()
        with target:
            moved = bad.redistribute(THREE, [Replicate()])
            later, fine = moved * 2, good.redistribute(THREE, [Replicate()]) + 1
        with pytest.raises(IndexError, match=r"(?s)aten.embedding.*test_transfers.py"):
            later.to_torch()
        with pytest.raises(IndexError):
            moved.to_torch()
        assert torch.equal(fine.to_torch(), weights.to_torch() * 3 + 1)


def test_an_error_of_the_transfer_names_the_line_of_the_redistribute(monkeypatch: pytest.MonkeyPatch) -> None:
    with dtorch.Graph() as graph:
        x = placed(torch.ones(4, 3))
        runtime = graph.recorder(THREE).home.runtime

        def full(*_: Any) -> None:
            raise RuntimeError("no room")

        monkeypatch.setattr(runtime, "place", full)
        y = x.redistribute(THREE, [Shard(0)])
        with pytest.raises(RuntimeError, match=r"(?s)no room.*redistribute.*test_transfers.py"):
            y.to_torch()
        assert torch.equal((x + 1).to_torch(), torch.full((4, 3), 2.0))


def test_a_client_far_ahead_of_its_transfers_waits() -> None:
    with dtorch.Graph() as graph:
        x, sent, kept = placed(torch.ones(4, 3)), [0], []

        def send() -> None:
            for _ in range(QUEUE_JOBS + 20):
                kept.append(x.redistribute(THREE))
                sent[0] += 1

        sender = threading.Thread(target=send, daemon=True)
        with Held(graph):
            sender.start()
            sender.join(1)
            assert sender.is_alive() and sent[0] <= QUEUE_JOBS
        sender.join(60)
        assert not sender.is_alive() and sent[0] == QUEUE_JOBS + 20


def test_values_that_nobody_reads_are_not_kept() -> None:
    gc.collect()
    with dtorch.Graph() as graph:
        x = placed(torch.ones(64, 64))
        graph.sync()
        before = dtorch.memory_stats()["values"]
        for _ in range(300):
            (x.redistribute(THREE) + 1).redistribute(PAIR)
        graph.sync()
        gc.collect()
        assert dtorch.memory_stats()["values"] <= before + 2
        kept = [(x * 2).redistribute(THREE) for _ in range(50)]
        graph.sync()
        gc.collect()
        assert dtorch.memory_stats()["values"] <= before + 2 + len(kept), "sources are let go of once they were sent"
