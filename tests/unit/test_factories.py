"""Factories: torch's values for torch's arguments, wherever the tensor lies."""

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import InputError, MeshError, PlacementError, UnsupportedError

MESH = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=["tp"])
GRID = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
EXACT = {
    "zeros": ((4, 5),),
    "ones": (4, 5),
    "full": ((4, 5), 2.5),
    "arange": (3, 17, 2),
    "linspace": (0.0, 1.0, 7),
    "logspace": (0.0, 1.0, 7),
    "eye": (4, 5),
}
RANDOM = {"rand": (4, 5), "randn": ((4, 5),), "randint": (3, 9, (4, 5)), "randperm": (11,)}


def placements_of(ndim, mesh=MESH):
    return [[Replicate()], [Partial()], *[[Shard(dim)] for dim in range(ndim)]]


@pytest.mark.parametrize("name", EXACT)
def test_a_factory_of_known_values_equals_torchs_in_every_placement(name):
    wanted = getattr(torch, name)(*EXACT[name])
    for placements in placements_of(wanted.dim()):
        made = getattr(dtorch, name)(*EXACT[name], device_mesh=MESH, placements=placements)
        assert made.placements == placements and made.dtype == wanted.dtype and made.stride() == wanted.stride()
        assert torch.equal(made.to_torch(), wanted)


@pytest.mark.parametrize("name", RANDOM)
def test_a_seed_gives_torchs_numbers_in_every_placement(name):
    torch.manual_seed(5)
    wanted = getattr(torch, name)(*RANDOM[name])
    after = torch.rand(())
    for placements in placements_of(wanted.dim()):
        torch.manual_seed(5)
        made = getattr(dtorch, name)(*RANDOM[name], device_mesh=MESH, placements=placements)
        assert torch.equal(made.to_torch(), wanted) and torch.equal(torch.rand(()), after)
    generator = torch.Generator().manual_seed(7)
    first = getattr(dtorch, name)(*RANDOM[name], generator=generator, device_mesh=GRID)
    assert torch.equal(first.to_torch(), getattr(torch, name)(*RANDOM[name], generator=generator.manual_seed(7)))


@pytest.mark.parametrize("name", ["zeros_like", "ones_like", "empty_like", "rand_like", "randn_like"])
def test_a_like_factory_takes_shape_strides_mesh_and_placements_from_its_input(name):
    plain = torch.randn(5, 4).t()
    x = dtorch.distribute_tensor(plain, MESH, [Shard(1)])
    torch.manual_seed(1)
    wanted = getattr(torch, name)(plain)
    torch.manual_seed(1)
    made = getattr(dtorch, name)(x)
    assert made.placements == [Shard(1)] and made.device_mesh == MESH and made.stride() == wanted.stride()
    if name != "empty_like":
        assert torch.equal(made.to_torch(), wanted)


def test_full_like_and_randint_like_take_their_own_arguments():
    x = dtorch.zeros(3, 2, device_mesh=MESH, placements=[Shard(0)])
    assert torch.equal(dtorch.full_like(x, 4).to_torch(), torch.full((3, 2), 4.0))
    torch.manual_seed(2)
    drawn = dtorch.randint_like(x, 10).to_torch()
    torch.manual_seed(2)
    assert torch.equal(drawn, torch.randint_like(torch.zeros(3, 2), 10))


def test_torchs_own_like_functions_draw_the_same_numbers_without_reading():
    x = dtorch.zeros(3, 2, device_mesh=MESH, placements=[Shard(0)])
    torch.manual_seed(2)
    drawn = torch.rand_like(x)
    torch.manual_seed(2)
    assert drawn.placements == [Shard(0)] and torch.equal(drawn.to_torch(), torch.rand(3, 2))


def test_a_sharded_constant_is_made_in_parts():
    x = dtorch.zeros(6, 2, device_mesh=MESH, placements=[Shard(0)])
    x.to_torch()
    assert dtorch.default_graph().segments()[-1] is not None
    assert x.to_local(2).shape == (2, 2)


def test_a_recorded_factory_meets_a_value_that_enters_later():
    held = dtorch.distribute_tensor(torch.ones(3, 2), MESH, [Shard(0)])
    assert torch.equal((dtorch.full((3, 2), 2.0, device_mesh=MESH) + held).to_torch(), torch.full((3, 2), 3.0))


def test_tensor_takes_numbers_lists_arrays_and_tensors():
    assert torch.equal(dtorch.tensor([[1, 2], [3, 4]]).to_torch(), torch.tensor([[1, 2], [3, 4]]))
    assert torch.equal(dtorch.tensor(torch.ones(2).numpy()).to_torch(), torch.ones(2))
    cut = dtorch.Tensor([1.0, 2.0], device_mesh=MESH, placements=[Shard(0)])
    assert torch.equal(cut.to_torch(), torch.tensor([1.0, 2.0]))
    x = dtorch.tensor(3.0)
    assert torch.equal(dtorch.tensor([x, 4.0]).to_torch(), torch.tensor([3.0, 4.0]))


def test_the_constructor_copies():
    plain = torch.zeros(3)
    x = dtorch.from_torch(plain)
    plain.add_(1)
    assert torch.equal(x.to_torch(), torch.zeros(3))
    read = x.to_torch()
    read.add_(1)
    assert torch.equal(x.to_torch(), torch.zeros(3))


def test_the_constructor_takes_a_distributed_tensor_to_another_place():
    x = dtorch.distribute_tensor(torch.arange(6.0), MESH, [Shard(0)])
    y = dtorch.Tensor(x, device_mesh=GRID, placements=[Shard(0), Partial()])
    assert y.device_mesh == GRID and torch.equal(y.to_torch(), torch.arange(6.0))
    assert not y.to_local((0, 1)).any()


def test_requires_grad_is_kept_and_parameters_stay_parameters():
    x = dtorch.zeros(3, requires_grad=True)
    assert x.requires_grad and x.to_torch().requires_grad
    weight = dtorch.distribute_tensor(torch.nn.Parameter(torch.ones(4)), MESH, [Shard(0)])
    assert isinstance(weight, torch.nn.Parameter) and isinstance(weight, dtorch.Tensor) and weight.requires_grad


def test_guards_give_mesh_placements_and_dtype():
    assert dtorch.default_device_mesh() == dtorch.DeviceMesh("cpu", [0])
    with dtorch.device_mesh_guard(MESH, [Shard(0)]), dtorch.dtype_guard(torch.bfloat16):
        x = dtorch.rand(4, 2)
        assert x.device_mesh == MESH and x.placements == [Shard(0)] and x.dtype == torch.bfloat16
        assert dtorch.zeros(2).dtype == torch.bfloat16 and dtorch.arange(3).dtype == torch.int64
        assert dtorch.tensor([1.0]).dtype == torch.bfloat16 and dtorch.full((2,), 1).dtype == torch.int64
        assert dtorch.zeros(2, dtype=torch.float64).dtype == torch.float64
        assert dtorch.rand(2, device="cpu").device_mesh == dtorch.DeviceMesh("cpu", [0])
    assert dtorch.zeros(2).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: dtorch.rand(2, device="cpu", device_mesh=MESH), InputError, "exclude each other"),
        (lambda: dtorch.rand(2, device_mesh="cpu"), MeshError, "not a dtorch.DeviceMesh"),
        (lambda: dtorch.zeros(2, device_mesh=MESH, placements=[Shard(1)]), PlacementError, "beyond"),
        (lambda: dtorch.zeros(2, out=torch.zeros(2)), UnsupportedError, "out"),
        (lambda: dtorch.zeros(2, layout=torch.sparse_coo), UnsupportedError, "layout"),
        (lambda: dtorch.Tensor(2, 3), InputError, "dtorch.empty"),
        (lambda: dtorch.Tensor(torch.zeros(2, device="meta")), InputError, "meta"),
        (lambda: dtorch.rand(2, device="meta"), MeshError, "cpu, cuda"),
        (lambda: dtorch.Tensor(torch.eye(2).to_sparse()), UnsupportedError, "dense"),
    ],
)
def test_a_wrong_call_says_what_to_do(call, error, says):
    with pytest.raises(error, match=says):
        call()
