"""The programs that the reference documents show, on CPU devices: what they print, return and assert."""

import asyncio
import unittest

import torch

import dtorch
from dtorch.distributed_spec import Replicate, Shard, init_device_mesh
from dtorch.test.test_util import assert_tensor_allclose


def test_a_tensor_in_two_parts_prints_whole_with_its_mesh_and_placements():
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.rand((4, 3), device_mesh=mesh, placements=[dtorch.Shard(0)])
    text = f"{x=}"
    assert "shape=torch.Size([4, 3]), dtype=torch.float32" in text
    assert "device_mesh=DeviceMesh('cpu', [0, 1]), placements=[Shard(dim=0)]" in text


def test_a_tensor_of_one_device_is_made_by_device_or_by_mesh():
    a = dtorch.rand((4, 2), device="cpu")
    b = dtorch.rand((4, 2), device_mesh=dtorch.DeviceMesh("cpu", [0]))
    assert a.device_mesh == b.device_mesh
    assert a.shape == b.shape == (4, 2)


def test_ones_in_every_placement_of_one_axis():
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    for placement, local in ((dtorch.Shard(0), (2, 2)), (dtorch.Partial(), (4, 2)), (dtorch.Replicate(), (4, 2))):
        a = dtorch.ones((4, 2), device_mesh=mesh, placements=[placement])
        assert a.to_local(1).shape == local
        assert torch.equal(a.to_torch(), torch.ones(4, 2))
    assert repr(a) == (
        "tensor([[1., 1.],\n        [1., 1.],\n        [1., 1.],\n        [1., 1.]])\n"
        "shape=torch.Size([4, 2]), dtype=torch.float32,\n"
        "device_mesh=DeviceMesh('cpu', [0, 1]), placements=[Replicate()]"
    )


def test_ones_on_a_mesh_of_two_axes():
    mesh = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]])
    a = dtorch.ones((4, 2), device_mesh=mesh, placements=[dtorch.Shard(0), dtorch.Shard(1)])
    assert a.to_local((1, 0)).shape == (2, 1)
    assert "DeviceMesh('cpu', [[0, 1], [2, 3]]), placements=[Shard(dim=0), Shard(dim=1)]" in repr(a)


def test_a_torch_tensor_goes_to_the_devices_and_back():
    torch_x = torch.rand((2, 2), dtype=torch.float16)
    dtorch_x = dtorch.Tensor(torch_x, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]), placements=[dtorch.Shard(1)])
    back = dtorch_x.to_torch()
    assert type(back) is torch.Tensor
    assert back.dtype == torch.float16 and torch.equal(back, torch_x)


class TestTensor(unittest.TestCase):
    def test_a_sum_takes_the_placement_of_its_cut_input(test_case):
        device_mesh = init_device_mesh(device_type="cpu", mesh_shape=(2,))
        torch_x = torch.rand(3, 4, 5, dtype=torch.float16)
        torch_y = torch.rand(4, 1, dtype=torch.float16)
        torch_z = torch_x + torch_y
        dtorch_x = dtorch.Tensor(torch_x, device_mesh=device_mesh, placements=[Shard(1)])
        dtorch_y = dtorch.Tensor(torch_y, device_mesh=device_mesh, placements=[Replicate()])
        dtorch_z = dtorch_x + dtorch_y
        assert_tensor_allclose(test_case, torch_z, dtorch_z)
        test_case.assertTrue(dtorch_z.device_mesh == device_mesh)
        test_case.assertTrue(dtorch_z.placements == [Shard(1)])
        dtorch_x = dtorch_x.redistribute(placements=[Shard(0)])
        test_case.assertTrue(dtorch_x.placements == [Shard(0)])
        dtorch_z = dtorch_x + dtorch_y
        assert_tensor_allclose(test_case, torch_z, dtorch_z)
        test_case.assertTrue(dtorch_z.placements == [Shard(0)])


def test_a_future_is_waited_for_polled_and_awaited():
    x = dtorch.ones((3, 3), device_mesh=dtorch.DeviceMesh("cpu", [0, 1]), placements=[dtorch.Shard(0)])
    future = (x @ x).to_torch_async()
    future.wait()
    assert future.is_ready() and future.wait_for(1)
    assert torch.equal(future.get(), torch.full((3, 3), 3.0))

    async def read():
        return await (x + x).to_torch_async()

    assert torch.equal(asyncio.run(read()), torch.full((3, 3), 2.0))


def test_a_stage_hands_its_activation_to_the_next_stage_by_redistribute():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    first, second = mesh.unbind("pp")
    x = dtorch.randn(4, 6, device_mesh=first, placements=[Shard(1)])
    y = x.redistribute(device_mesh=second, placements=[Shard(0)])
    assert y.device_mesh == second and y.placements == [Shard(0)]
    assert torch.equal(y.to_torch(), x.to_torch())
