"""Meshes: what makes one, sub-meshes, equality, repr, and every way to get one wrong."""

import copy
import pickle

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtorch import options
from dtorch.errors import MeshError
from dtorch.mesh import DeviceMesh, init_device_mesh


@pytest.mark.parametrize(
    "ids",
    [
        [[0, 1], [2, 3]],
        ((0, 1), (2, 3)),
        [range(2), range(2, 4)],
        torch.arange(4).view(2, 2),
        numpy.arange(4).reshape(2, 2),
    ],
    ids=["lists", "tuples", "ranges", "tensor", "array"],
)
def test_ids_may_be_lists_ranges_tensors_or_arrays(ids):
    mesh = DeviceMesh("cpu", ids)
    assert (mesh.shape, mesh.device_ids, mesh.ndim, mesh.size()) == ((2, 2), (0, 1, 2, 3), 2, 4)
    assert mesh == DeviceMesh("cpu", [[0, 1], [2, 3]])
    assert torch.equal(mesh.mesh, torch.tensor([[0, 1], [2, 3]]))


def test_a_range_is_a_one_dimensional_mesh():
    assert DeviceMesh("cpu", range(2, 6)).device_ids == (2, 3, 4, 5)


def test_repr_is_that_of_the_reference():
    assert repr(DeviceMesh("cpu", [[0, 1], [2, 3]])) == "DeviceMesh('cpu', [[0, 1], [2, 3]])"
    assert repr(DeviceMesh("cpu", [0], mesh_dim_names=["tp"])) == "DeviceMesh('cpu', [0], mesh_dim_names=('tp',))"
    assert len(repr(init_device_mesh("cpu", (8, 64)))) < 100
    assert init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")).summary == "mesh(dp=2, tp=4)"
    assert init_device_mesh("cpu", (2, 4)).summary == "mesh(2, 4)"


def test_init_device_mesh_counts_up_and_takes_a_list_of_names():
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=["dp", "tp"])
    assert mesh == DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert (mesh.size("tp"), mesh.size(0), mesh.size(-1), mesh.axis("dp")) == (3, 2, 3, 0)


def test_a_sub_mesh_by_name_is_the_slice_at_coordinate_zero():
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert mesh["tp"] == DeviceMesh("cpu", [0, 1], mesh_dim_names=["tp"])
    assert mesh["pp", "tp"] == DeviceMesh("cpu", [[0, 1], [4, 5]], mesh_dim_names=["pp", "tp"])
    assert mesh["tp", "pp"] == DeviceMesh("cpu", [[0, 4], [1, 5]], mesh_dim_names=["tp", "pp"])


def test_unbind_gives_one_mesh_for_each_coordinate():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    assert [stage.device_ids for stage in mesh.unbind("pp")] == [(0, 1), (2, 3)]
    assert [stage.device_ids for stage in mesh.unbind(1)] == [(0, 2), (1, 3)]
    assert mesh.unbind("pp")[0].mesh_dim_names == ("tp",)
    assert DeviceMesh("cpu", [3, 5]).unbind(0) == [DeviceMesh("cpu", [3]), DeviceMesh("cpu", [5])]


def test_equality_and_hash_go_by_type_ids_shape_and_names():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    same = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert mesh == same and hash(mesh) == hash(same) and len({mesh, same}) == 1
    others = [
        init_device_mesh("cpu", (2, 2)),
        init_device_mesh("cpu", (4,)),
        DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "tp")),
        DeviceMesh._make("cuda", (0, 1, 2, 3), (2, 2), ("dp", "tp")),
    ]
    assert all(mesh != other for other in others) and mesh != "mesh"
    assert pickle.loads(pickle.dumps(mesh)) == copy.deepcopy(mesh) == mesh


def test_a_mesh_cannot_be_changed():
    with pytest.raises(AttributeError, match="make a new one"):
        DeviceMesh("cpu", [0]).shape = (2,)


def test_both_spellings_of_ulysses_find_the_axis():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysess_cp", "ring_cp"))
    assert mesh.axis("ulysses_cp") == mesh.axis("ulysess_cp") == 0
    assert mesh.mesh_dim_names == ("ulysess_cp", "ring_cp")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
def test_coordinate_and_position_are_inverse(shape):
    mesh = init_device_mesh("cpu", shape)
    assert [mesh.coordinate(position) for position in range(mesh.size())] == mesh.coordinates()
    for position, coordinate in enumerate(mesh.coordinates()):
        assert mesh.position(coordinate) == position
        assert mesh.mesh[coordinate].item() == mesh.device_ids[position]


def test_a_mesh_of_512_devices_has_sub_meshes():
    mesh = init_device_mesh("cpu", (8, 64), mesh_dim_names=("dp", "tp"))
    assert mesh.size() == 512 and mesh["tp"].size() == 64
    assert len({hash(each) for each in mesh.unbind("dp")}) == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceMesh("cpu", [0, 1, 1]), r"\[1\] stand more than once"),
        (lambda: DeviceMesh("cpu", []), "empty"),
        (lambda: DeviceMesh("cpu", [[], []]), "empty"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), "ragged"),
        (lambda: DeviceMesh("cpu", [0, [1]]), "ragged"),
        (lambda: DeviceMesh("cpu", [[0], 1]), "ragged"),
        (lambda: DeviceMesh("cpu", 2), "list of device ids"),
        (lambda: DeviceMesh("cpu", "01"), "list of device ids"),
        (lambda: DeviceMesh("cpu", [0, -1]), "at least 0"),
        (lambda: DeviceMesh("cpu", [0.0]), "integers"),
        (lambda: DeviceMesh("cpu", [True]), "integers"),
        (lambda: DeviceMesh("cpu", torch.tensor(3)), "list of device ids"),
        (lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp", "tp")), "one for each axis"),
        (lambda: init_device_mesh("cpu", (1, 1), mesh_dim_names=("tp", "tp")), "'tp' stands more than once"),
        (lambda: init_device_mesh("cpu", (1, 1), mesh_dim_names=("ulysess_cp", "ulysses_cp")), "more than once"),
        (lambda: init_device_mesh("cpu", (1,), mesh_dim_names=(1,)), "must be strings"),
        (lambda: init_device_mesh("cpu", ()), "positive integers"),
        (lambda: init_device_mesh("cpu", (2, 0)), "positive integers"),
        (lambda: init_device_mesh("cpu", 2.5), "positive integers"),
        (lambda: init_device_mesh("cpu", None), "positive integers"),
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=5), "must be strings"),
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=["tp_size"]), "calls this axis 'tp'"),
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=["tensor_parallel_size"]), "calls this axis 'tp'"),
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=["ulysses_degree"]), "calls this axis 'ulysses_cp'"),
        (lambda: DeviceMesh("cpus", [0]), "did you mean 'cpu'.*'cuda'"),
        (lambda: DeviceMesh("cpu:0", [0]), "write 'cpu' and put ids"),
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])["pt"], "did you mean 'tp'"),
        (lambda: init_device_mesh("cpu", (2,))["tp"], "has no names"),
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])["tp", "tp"], "named twice"),
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])[0], "by axis name"),
        (lambda: init_device_mesh("cpu", (2,)).size(1), "has 1 axes"),
        (lambda: init_device_mesh("cpu", (2,)).coordinate(2), "not within"),
    ],
)
def test_a_wrong_mesh_is_refused_with_the_reason(make, message):
    with pytest.raises(MeshError, match=message):
        make()


def test_cuda_without_cuda_says_so_and_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeshError, match=r"no 'cuda' device on this machine.*DeviceMesh\('cpu'"):
        DeviceMesh("cuda", [0])


def test_cuda_ids_must_exist_unless_devices_are_virtual(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert DeviceMesh("cuda", [0, 1]).size() == 2
    with pytest.raises(MeshError, match=r"\[2\] are not there: ids go from 0 to 1.*DTORCH_DTENSOR_IN_SAME_DEVICE"):
        DeviceMesh("cuda", [0, 2])
    with options.override(same_device=True):
        assert init_device_mesh("cuda", (8,)).size() == 8
        with pytest.raises(MeshError, match="DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE"):
            init_device_mesh("cuda", (9,))
