"""`assert_no_recompile` and `expect_collectives`: what they count, of compiled modules and of eager code."""

from __future__ import annotations

import pytest
import torch
from null.agreement import mesh_of
from torch import nn

import dtorch
from dtorch import Replicate, Shard

MESH = mesh_of(2)


def layers():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    return dtorch.compile(model, MESH, placements={"0.weight": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}})


def test_a_call_of_another_shape_is_a_recompile():
    compiled = layers()
    compiled(torch.ones(2, 8))
    with dtorch.assert_no_recompile():
        compiled(torch.zeros(2, 8))
    with pytest.raises(AssertionError, match="1 programs were compiled .*\n.*Sequential"):
        with dtorch.assert_no_recompile():
            compiled(torch.ones(3, 8))


def test_collectives_are_counted_at_every_run():
    compiled = layers()
    for _ in range(2):  # compiled, and found again
        with dtorch.expect_collectives(all_reduce=1):
            compiled(torch.ones(2, 8))
    with pytest.raises(AssertionError, match="expected collectives: all_reduce=1; there ran: all_reduce=2"):
        with dtorch.expect_collectives(all_reduce=1):
            compiled(torch.ones(2, 8))
            compiled(torch.ones(2, 8))
    with pytest.raises(AssertionError, match="expected collectives: none; there ran: all_reduce=1"):
        with dtorch.expect_collectives():
            compiled(torch.ones(2, 8))


def test_eager_work_inside_counts_though_nobody_reads_it_and_work_before_does_not():
    x = dtorch.distribute_tensor(torch.ones(4, 8), MESH, [Shard(1)])
    w = dtorch.distribute_tensor(torch.ones(8, 3), MESH, [Shard(0)])
    before = (x @ w).redistribute(placements=[Replicate()])
    with dtorch.expect_collectives():
        pass
    with dtorch.expect_collectives(all_reduce=1):
        inside = (x @ w).redistribute(placements=[Replicate()])
    with dtorch.assert_no_recompile():
        again = (x @ w).redistribute(placements=[Replicate()])
    assert torch.equal(before.to_torch(), inside.to_torch()) and torch.equal(inside.to_torch(), again.to_torch())
    with pytest.raises(AssertionError, match="test_watch.py"):
        with dtorch.assert_no_recompile():
            kept = (x @ w).exp()
    assert torch.equal(kept.to_torch(), again.to_torch().exp())


def test_an_error_inside_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        with dtorch.expect_collectives(all_reduce=1):
            1 / 0
