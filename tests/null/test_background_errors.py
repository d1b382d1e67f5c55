"""A failure in each stage between a line of eager code and its value: who hears of it, what it says, what goes on.

In: one operator (`sinh`) that a stage is made to fail on. Out: an error on the line itself (expansion, placement) or at
the read that needs the value (everything later), with the line that recorded it; all other values are there.
"""

import asyncio

import pytest
import torch

import dtorch
import dtorch.compiler
from dtorch import Replicate, Shard, torch_private
from dtorch.capture import eager
from dtorch.passes.common_subexpressions import CommonSubexpressions
from dtorch.runtime.simulate import SimulatedRuntime

MESH = dtorch.init_device_mesh("cpu", (2,))
PLAIN = torch.arange(12.0).reshape(4, 3)


class Broken(Exception):
    """What the broken stage raises."""


def has(graph):
    return any("sinh" in str(node.target) for node in graph.graph.nodes)


def breaks(monkeypatch, owner, name, wrong):
    """Let a function fail for arguments of which `wrong` is true."""
    real = getattr(owner, name)

    def broken(*args, **kwargs):
        if wrong(*args):
            raise Broken(f"{name} is broken")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


def names_sinh(plan):
    return any("sinh" in instruction.kernel for instruction in plan.instructions)


STAGES = {
    "passes": (CommonSubexpressions, "run", lambda self, graph, context: has(graph)),
    "lower": (dtorch.compiler, "lower", lambda graph, *_: has(graph)),
    "schedule": (dtorch.compiler, "schedule", lambda graph: has(graph)),
    "emit": (dtorch.compiler, "emit", lambda graph, *_: has(graph)),
    "load": (SimulatedRuntime, "load", lambda self, plan: names_sinh(plan)),
}


@pytest.mark.parametrize("asked", ["read", "future", "await"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_background_failure_reaches_the_read_with_the_line_and_nothing_else(monkeypatch, stage, asked):
    breaks(monkeypatch, *STAGES[stage])
    with dtorch.Graph():
        x = dtorch.distribute_tensor(PLAIN, MESH, [Shard(0)])
        good = x * 2
        bad = x.sinh()  # the line that is named
        worse, fine = bad + 1, good + 1
        for value in (bad, worse):
            with pytest.raises(Exception, match=r"(?s)broken.*test_background_errors.py:\d+") as caught:
                read(value, asked)
            if stage != "passes":
                assert isinstance(caught.value, Broken)
        assert torch.equal(read(good, asked), PLAIN * 2) and torch.equal(read(fine, asked), PLAIN * 2 + 1)
        later, apart = bad * 3, x - 1
        with pytest.raises(Exception, match="broken"):
            read(later, asked)
        assert torch.equal(read(apart, asked), PLAIN - 1)
        monkeypatch.undo()
        assert torch.equal(read(x.sinh(), asked), PLAIN.sinh())


def read(value, how):
    if how == "read":
        return value.to_torch()
    if how == "future":
        return value.to_torch_async().get()

    async def wait():
        return await value.to_torch_async()

    return asyncio.run(wait())


@pytest.mark.parametrize("stage", ["expansion", "placement"])
def test_a_failure_before_the_queue_is_raised_on_the_users_own_line(monkeypatch, stage):
    owner, name = (torch_private, "trace_functional") if stage == "expansion" else (eager, "place_expansion")
    with dtorch.Graph():
        x = dtorch.distribute_tensor(PLAIN, MESH, [Shard(0)])
        before = x + 1
        breaks(monkeypatch, owner, name, lambda *_: True)
        with pytest.raises(Broken):
            torch.cosine_similarity(x, x) if stage == "expansion" else x.acosh()
        monkeypatch.undo()
        assert torch.equal(before.to_torch(), PLAIN + 1) and torch.equal((x * 2).to_torch(), PLAIN * 2)
        wanted = torch.cosine_similarity(PLAIN, PLAIN)
        torch.testing.assert_close(torch.cosine_similarity(x, x).to_torch(), wanted)


def test_a_failing_fetch_is_raised_by_that_read_and_may_be_tried_again(monkeypatch):
    x = dtorch.distribute_tensor(PLAIN, MESH, [Shard(0)]) * 3
    future = x.to_torch_async()
    breaks(monkeypatch, SimulatedRuntime, "gather", lambda *_: True)
    for how in ("read", "future", "await"):
        with pytest.raises(Broken):
            read(x, how)
    with pytest.raises(Broken):
        future.get()
    monkeypatch.undo()
    assert torch.equal(x.to_torch(), PLAIN * 3)


def test_a_kernels_own_error_keeps_its_class_and_gets_operator_mesh_and_line():
    with dtorch.Graph():
        table = dtorch.ones(5, 2, device_mesh=MESH)
        ids = dtorch.distribute_tensor(torch.tensor([1, 99]), MESH, [Replicate()])
        bad = torch.nn.functional.embedding(ids, table)
        with pytest.raises(IndexError, match=r"(?s)aten.embedding.*on mesh\(.*=2\).*test_background_errors.py"):
            bad.to_torch()
        assert torch.equal((table + 1).to_torch(), torch.full((5, 2), 2.0))
