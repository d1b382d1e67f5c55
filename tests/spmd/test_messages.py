"""Whoever can reach the controller's sockets and is not a worker changes nothing; many clients keep one order."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
import zmq

import dtorch
from dtorch import Partial, Replicate, Shard, options
from dtorch.errors import UnsupportedError
from dtorch.runtime.protocol import Kind, encode
from dtorch.runtime.session import SESSION


def mesh_of(*shape):
    return dtorch.init_device_mesh("cpu", shape)


def test_foreign_malformed_and_repeated_messages_are_dropped_with_a_log_line(workers, caplog):
    x = dtorch.distribute_tensor(torch.ones(4), mesh_of(2), [Shard(0)])
    assert float(x.sum()) == 4
    cluster = SESSION.cluster("cpu")
    token = cluster.token
    bad = [
        [b""], [b"x" * 36, b"", b""], [b"x"] * 5000,
        encode(bytes(16), Kind.DONE, 0, 10**9, (10**9,)),  # of another cluster
        encode(token, Kind.DONE, 0, 1, (10**9,)),  # repeated
        encode(token, Kind.RUN, 0, 10**9, (1, 2, 3)),  # a command, to the controller
        encode(token, Kind.DONE, 77, 10**9, (10**9,)),  # from a worker that there is not
        [encode(token, Kind.DONE, 0, 10**9)[0], b"1234567", b""],
        [encode(token, Kind.DONE, 0, 10**9)[0], b"", b"{not json"],
    ]  # fmt: skip
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(cluster.board.endpoints[1])
    with caplog.at_level(logging.WARNING, "dtorch.workers"):
        for frames in bad:
            socket.send_multipart(frames)
        for _ in range(100):
            if len([r for r in caplog.records if "dropped" in r.message]) >= len(bad) - 1:
                break
            threading.Event().wait(0.02)
    socket.close(0)
    assert len([r for r in caplog.records if "dropped" in r.message]) >= len(bad) - 1
    assert not cluster.lanes.passed((0,), 10**9)
    assert float((x + 1).sum()) == 8


def test_a_thousand_all_reduces_run_one_after_the_other_on_four_workers(workers):
    x = dtorch.distribute_tensor(torch.ones(8), mesh_of(4), [Partial()])
    for _ in range(1000):
        x = (x.redistribute(placements=[Replicate()]) * 0.5).redistribute(placements=[Partial()])
    assert float(x.sum()) == pytest.approx(0.0, abs=1e-6)
    y = dtorch.distribute_tensor(torch.ones(8), mesh_of(4), [Shard(0)])
    futures = [(y + step).sum().redistribute(placements=[Replicate()]).to_torch_async() for step in range(200)]
    assert [float(future.get()) for future in futures] == [8.0 + 8 * step for step in range(200)]


def test_graphs_on_threads_share_workers_without_waiting_for_each_other_in_a_circle(workers):
    errors = []

    def work(number):
        try:
            shapes = [(2,), (2, 2), (4,)]
            with dtorch.Graph():
                for step in range(40):
                    mesh = mesh_of(*shapes[(number + step) % 3])
                    x = dtorch.distribute_tensor(torch.full((8, 4), 1.0 + number), mesh, [Shard(0)] * mesh.ndim)
                    total = x.sum().redistribute(placements=[Replicate()] * mesh.ndim)
                    assert float(total) == 32 * (1 + number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)


def test_large_host_tensors_travel_through_shared_memory_and_come_back_equal(workers):
    value = torch.randn(3000, 3001)  # above a piece
    for placement in (Replicate(), Shard(0), Shard(1), Partial()):
        x = dtorch.distribute_tensor(value, mesh_of(2), [placement])
        assert torch.equal(x.to_torch(), value)
    del x
    dtorch.sync()
    assert SESSION.cluster("cpu").ferry.slots.free_bytes == SESSION.cluster("cpu").ferry.arena.size


def test_a_tensor_larger_than_the_shared_memory_goes_and_comes_in_turns(workers):
    dtorch.shutdown()
    with options.override(arena_bytes=1 << 26):
        dtorch.init(workers="process", devices=2)
        value = torch.arange(24 << 20, dtype=torch.float32)  # 96 MiB through 64
        x = dtorch.distribute_tensor(value, mesh_of(2), [Replicate()])
        assert torch.equal(x.to_torch(), value)
        del x
    dtorch.shutdown()
    dtorch.init(workers="process")


def test_values_that_nobody_holds_are_freed_on_the_workers(workers):
    x = dtorch.distribute_tensor(torch.ones(16), mesh_of(2), [Replicate()])
    float(x.sum())
    for _ in range(300):
        y = x + 1
        float(y[0])
    del y
    counts = []
    for _ in range(200):
        counts = [entry["values"] for entry in dtorch.status() if entry["device"] < 2]
        if max(counts) < 60:
            break
        threading.Event().wait(0.02)
    assert max(counts) < 60, counts


def test_custom_ops_of_modules_run_on_workers_and_those_of_the_script_are_refused(workers, tmp_path, monkeypatch):
    (tmp_path / "ops_of_a_user.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('ours::scaled', mutates_args=())\n"
        "def scaled(x: torch.Tensor, by: float) -> torch.Tensor:\n"
        "    return x * by\n"
        "@scaled.register_fake\n"
        "def _(x, by):\n"
        "    return torch.empty_like(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    dtorch.shutdown()  # workers look where the program looks when they are started
    dtorch.init(workers="process")
    import ops_of_a_user

    dtorch.register_sharding_rule("ours.scaled.default", "a b -> a b")
    x = dtorch.distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh_of(2), [Shard(0)])
    assert torch.equal(torch.ops.ours.scaled(x, 2.0).to_torch(), torch.arange(6.0).reshape(2, 3) * 2)
    ops_of_a_user.scaled._init_fn.__module__ = "__main__"
    with pytest.raises(UnsupportedError, match="module of its own"):
        torch.ops.ours.scaled(x + 1, 3.0).to_torch()
