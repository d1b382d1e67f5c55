"""Plans on simulated devices: in-place instructions on shared registers, rows that are cut, weights that need grad."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch.ir.layout import WHOLE, Split
from dtorch.ir.plan import Instruction, Plan, PlanInput, PlanOutput, Ref
from dtorch.runtime.simulate import SimulatedRuntime


def test_an_instruction_in_place_writes_into_a_copy_for_each_coordinate_that_shares_its_operand() -> None:
    """`b` varies along the axis and the register that `add_` writes into does not."""
    inputs = tuple(
        PlanInput(name, "user", name, register, shape, torch.float32, spec)
        for register, (name, shape, spec) in enumerate([("a", (2,), (WHOLE,)), ("b", (4,), (Split(0),))])
    )
    doubled = Instruction("aten.mul.Tensor", (Ref(0), 2.0), (), 2, (), "compute", (), 0)
    added = Instruction("aten.add_.Tensor", (Ref(2), Ref(1)), (), 3, (2,), "compute", (), 0)
    outputs = (PlanOutput("c", 3, (4,), torch.float32, (Split(0),)),)
    runtime = SimulatedRuntime((2,))
    plan = Plan((2,), ("tp",), inputs, (doubled, added), outputs, 4, ("here",))
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])
    given = [runtime.place(each, item.spec) for each, item in zip((a, b), inputs, strict=True)]
    (result,) = runtime.load(plan).run(given)
    assert runtime.gather(result, (4,), torch.float32, (Split(0),)).tolist() == [12.0, 24.0, 32.0, 44.0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_row_that_is_whole_meets_a_row_that_is_cut(count: int) -> None:
    mesh = dtorch.init_device_mesh("cpu", (count,), mesh_dim_names=["tp"])
    x, y = torch.randn(1, 3), torch.randn(1, 3)
    for placements in ([dtorch.Shard(0)], [dtorch.Shard(1)], [dtorch.Replicate()]):
        whole = dtorch.distribute_tensor(x, mesh, [dtorch.Replicate()]) * 2.0
        cut = dtorch.distribute_tensor(y, mesh, placements)
        assert torch.equal((whole.exp() + cut).to_torch(), (x * 2.0).exp() + y)


class LastOf(torch.nn.Module):
    """A linear layer of a slice without bias: torch chooses its kernel by whether the weight requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, -1:, :])


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_linear_layer_of_a_slice_has_eagers_bits(requires_grad: bool) -> None:
    torch.manual_seed(0)
    model = LastOf().requires_grad_(requires_grad)
    x = torch.randn(2, 7, 64)
    mesh = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=["tp"])
    with torch.no_grad():
        assert torch.equal(dtorch.compile(model, mesh)(x), model(x))
