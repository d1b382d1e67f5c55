"""dtorch.nn: parallel layers equal torch.nn's with the same weights; distribute_module and its state dicts."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import dtorch
from dtorch.errors import InputError, MeshError, PlacementError
from dtorch.placements import Partial, Replicate, Shard

MESHES = {
    "1": (("tp",), (1,)),
    "2": (("tp",), (2,)),
    "3": (("tp",), (3,)),
    "2x2": (("dp", "tp"), (2, 2)),
}


@pytest.fixture(params=MESHES)
def mesh(request):
    names, shape = MESHES[request.param]
    return dtorch.init_device_mesh("cpu", shape, mesh_dim_names=names)


def pair(plain, made, mesh):
    """The plain layer and the parallel one with its weights, on one device bit for bit what `check` compares."""
    made.load_state_dict(plain.state_dict())
    return plain, made


def check(got, want, mesh):
    assert type(got) is dtorch.Tensor and got.dtype == want.dtype
    if mesh.size() == 1:
        assert torch.equal(got.to_torch().detach(), want.detach())
    else:
        torch.testing.assert_close(got.to_torch().detach(), want.detach())


LINEARS = {
    "ColumnParallelLinear": (0, True, lambda ndim: Shard(ndim - 1)),
    "ColumnParallelLinearWithReplicateOutput": (0, True, lambda ndim: Replicate()),
    "RowParallelLinear": (1, False, lambda ndim: Partial()),
    "RowParallelLinearWithReplicateOutput": (1, False, lambda ndim: Replicate()),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
@pytest.mark.parametrize("sizes", [(8, 12), (7, 5), (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("name", LINEARS)
def test_a_parallel_linear_layer_equals_torchs(name, sizes, bias, mesh):
    dim, bias_is_cut, output = LINEARS[name]
    plain = nn.Linear(*sizes, bias=bias)
    _, layer = pair(plain, getattr(dtorch.nn, name)(*sizes, bias, device_mesh=mesh), mesh)
    tp = mesh.axis("tp")
    assert mesh.size() == 1 or layer.weight.placements[tp] == Shard(dim)
    assert not bias or layer.bias.placements[tp] == (Shard(0) if bias_is_cut else Replicate())
    for shape in ((sizes[0],), (4, sizes[0]), (2, 3, sizes[0])):
        x = torch.randn(shape)
        want = plain(x)
        got = layer(x)
        check(got, want, mesh)
        if mesh.size() > 1 and sizes != (1, 3):  # a sum over one feature is none: its result comes as it likes
            assert got.placements[tp] == output(want.dim())
        for placed in (Replicate(), Shard(0), Shard(len(shape) - 1), Partial()):
            placements = [Replicate()] * mesh.ndim
            placements[tp] = placed
            check(layer(dtorch.distribute_tensor(x, mesh, placements)), want, mesh)


def test_a_batch_cut_over_dp_stays_cut_through_a_parallel_mlp():
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
    torch.manual_seed(0)
    up = dtorch.nn.ColumnParallelLinear(6, 10, device_mesh=mesh)
    down = dtorch.nn.RowParallelLinear(10, 6, device_mesh=mesh)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
    x = torch.randn(5, 6)
    hidden = up(dtorch.distribute_tensor(x, mesh, [Shard(0), Replicate()]))
    assert hidden.placements == [Shard(0), Shard(1)]
    got = down(dtorch.nn.functional.gelu(hidden))
    assert got.placements == [Shard(0), Partial()]
    check(got, plain(x), mesh)


@pytest.mark.parametrize("sizes", [(12, 8), (7, 5), (2, 3)], ids=str)
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("name", ["VocabParallelEmbedding", "ParallelEmbedding"])
def test_a_parallel_embedding_equals_torchs(name, sizes, padding, mesh):
    plain = nn.Embedding(*sizes, padding_idx=padding)
    _, layer = pair(plain, getattr(dtorch.nn, name)(*sizes, padding, device_mesh=mesh), mesh)
    tp = mesh.axis("tp")
    assert layer.weight.placements[tp] == Shard(0 if name == "VocabParallelEmbedding" else 1)
    for shape in ((), (5,), (2, 3)):
        ids = torch.randint(0, sizes[0], shape)
        got = layer(ids)
        check(got, plain(ids), mesh)
        assert torch.equal(got.to_torch(), plain(ids)), "a lookup is exact on every mesh"
        placed = Replicate() if name == "VocabParallelEmbedding" else Shard(len(shape))
        assert mesh.size() == 1 or got.placements[tp] == placed


def test_parameters_start_with_the_values_of_torch_for_a_seed(mesh):
    kinds = {
        nn.Linear(5, 7): lambda: dtorch.nn.RowParallelLinear(5, 7, device_mesh=mesh),
        nn.Embedding(5, 7): lambda: dtorch.nn.VocabParallelEmbedding(5, 7, device_mesh=mesh),
    }
    for plain, make in kinds.items():
        torch.manual_seed(1)
        plain.reset_parameters()
        torch.manual_seed(1)
        layer = make()
        for _ in range(2):
            for name, value in plain.state_dict().items():
                assert torch.equal(layer.state_dict()[name], value)
            torch.manual_seed(1)
            layer.reset_parameters()


def test_the_axis_is_found_by_name_or_index_and_a_mesh_without_it_keeps_weights_whole():
    dp = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["dp"])
    layer = dtorch.nn.ColumnParallelLinear(4, 4, device_mesh=dp)
    assert layer.weight.placements == [Replicate()] and "axis=None" in repr(layer)
    assert dtorch.nn.ColumnParallelLinear(4, 4, device_mesh=dp, axis="dp").weight.placements == [Shard(0)]
    unnamed = dtorch.init_device_mesh("cpu", (2,))
    assert dtorch.nn.ColumnParallelLinear(4, 4, device_mesh=unnamed).weight.placements == [Shard(0)]
    plane = dtorch.init_device_mesh("cpu", (2, 2))
    assert dtorch.nn.ColumnParallelLinear(4, 4, device_mesh=plane, axis=-1).weight.placements == [Replicate(), Shard(0)]
    with pytest.raises(MeshError, match="no names"):
        dtorch.nn.ColumnParallelLinear(4, 4, device_mesh=plane)


def test_layers_take_the_mesh_and_dtype_of_guards():
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
    with dtorch.device_mesh_guard(mesh), dtorch.dtype_guard(torch.bfloat16):
        layer = dtorch.nn.RowParallelLinear(4, 4)
        other = dtorch.nn.RowParallelLinear(4, 4, dtype=torch.float64)
    assert layer.device_mesh == mesh and layer.weight.dtype == torch.bfloat16 and other.weight.dtype == torch.float64
    assert "axis=\"tp\"" in repr(layer) and "mesh(tp=2)" in repr(layer)


# --- functional ---------------------------------------------------------------------------------------------------


def test_every_other_name_is_torchs():
    assert dtorch.nn.functional.gelu is nn.functional.gelu and dtorch.nn.LayerNorm is nn.LayerNorm
    for module in (dtorch.nn, dtorch.nn.functional):
        with pytest.raises(AttributeError, match="nor has torch.nn"):
            module.no_such_name


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [None, 0, 1, 2], ids=lambda dim: f"cut{dim}")
@pytest.mark.parametrize("axis", ["tp", "cp", "ulysses_cp", "ring_cp"])
@pytest.mark.parametrize("devices", [2, 3])
def test_attention_equals_torchs_however_its_inputs_are_cut(devices, axis, dim, causal):
    mesh = dtorch.init_device_mesh("cpu", (devices,), mesh_dim_names=[axis])
    placed = [Replicate() if dim is None else Shard(dim)]
    q, k, v = (torch.randn(2, 4, 7, 5) for _ in range(3))
    want = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    parts = [dtorch.distribute_tensor(each, mesh, placed) for each in (q, k, v)]
    got = dtorch.nn.functional.scaled_dot_product_attention(*parts, is_causal=causal)
    check(got, want, mesh)
    if axis == "ulysses_cp" and dim == 2:
        assert got.placements == placed


@pytest.mark.parametrize("mask", [(7, 7), (2, 1, 7, 7), (2, 4, 7, 7)], ids=str)
def test_attention_over_ulysses_takes_masks_and_grouped_keys(mask):
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["ulysses_cp"])
    bias = torch.randn(mask)
    for heads in (4, 2):
        q, k, v = torch.randn(2, 4, 7, 5), torch.randn(2, heads, 7, 5), torch.randn(2, heads, 7, 5)
        want = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=heads != 4)
        parts = [dtorch.distribute_tensor(each, mesh, [Shard(2)]) for each in (q, k, v)]
        for given in (bias, dtorch.distribute_tensor(bias, mesh, [Shard(len(mask) - 2)])):
            got = dtorch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=given, enable_gqa=heads != 4)
            check(got, want, mesh)


# --- distribute_module --------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two names of one weight, a buffer of each kind, and a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("steps", torch.arange(3), persistent=False)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids))) * self.scale + self.steps.sum()


PLACED = {"embed.weight": {"tp": Shard(0)}, "norm.*": {"tp": Replicate()}}


def test_distribute_module_replaces_tensors_in_place_and_keeps_ties(mesh):
    torch.manual_seed(0)
    plain = Tied().eval()
    module = copy.deepcopy(plain)
    assert dtorch.distribute_module(module, mesh, PLACED) is module
    assert all(type(each) is dtorch.Tensor for each in (*module.parameters(), *module.buffers()))
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.placements[mesh.axis("tp")] == Shard(0)
    assert module.scale.placements == [Replicate()] * mesh.ndim
    assert isinstance(module.scale, nn.Parameter) and not module.scale.requires_grad
    assert list(dict(module.named_parameters())) == list(dict(plain.named_parameters()))
    ids = torch.tensor([0, 5, 2, 2])
    check(module(ids), plain(ids), mesh)


def test_state_dict_gathers_full_torch_tensors_with_ties_shared(mesh):
    plain = Tied()
    module = dtorch.distribute_module(copy.deepcopy(plain), mesh, PLACED)
    found, want = module.state_dict(), plain.state_dict()
    assert list(found) == list(want) and found._metadata == want._metadata
    for name, value in want.items():
        assert type(found[name]) is torch.Tensor and torch.equal(found[name], value) and not found[name].requires_grad
    assert found["head.weight"] is found["embed.weight"]
    assert module.state_dict()["embed.weight"] is not found["embed.weight"]
    assert list(module.norm.state_dict(prefix="n.")) == [f"n.{name}" for name in plain.norm.state_dict()]
    assert module.state_dict(keep_vars=True)["scale"] is module.scale
    assert type(nn.Sequential(module).state_dict()["0.embed.weight"]) is torch.Tensor


def test_a_state_dict_goes_through_torch_save_into_a_plain_module_and_back(mesh):
    module = dtorch.distribute_module(Tied(), mesh, PLACED).eval()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    plain = Tied().eval()
    plain.load_state_dict(torch.load(file))
    ids = torch.tensor([1, 2, 3])
    check(module(ids), plain(ids), mesh)
    with torch.no_grad():
        for value in plain.parameters():
            value.mul_(1.5)
    before = dict(module.named_parameters())
    assert str(module.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert all(value is before[name] for name, value in module.named_parameters()), "the objects stay"
    assert module.embed.weight.placements[mesh.axis("tp")] == Shard(0)
    check(module(ids), plain(ids), mesh)


def test_loading_by_assignment_places_the_new_parameters():
    mesh = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=["tp"])
    module = dtorch.distribute_module(nn.Linear(4, 5), mesh, {"weight": {"tp": Shard(0)}})
    plain = nn.Linear(4, 5, dtype=torch.float64)
    module.load_state_dict(plain.state_dict(), assign=True)
    assert isinstance(module.weight, nn.Parameter) and module.weight.dtype == torch.float64
    assert module.weight.placements == [Shard(0)]
    assert torch.equal(module.state_dict()["weight"], plain.weight)


def test_loading_reports_missing_unexpected_and_misshapen_keys_as_torch_does():
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
    module = dtorch.nn.ColumnParallelLinear(3, 4, device_mesh=mesh)
    with pytest.raises(RuntimeError, match="Missing key.*bias(.|\n)*Unexpected key.*extra"):
        module.load_state_dict({"weight": torch.zeros(4, 3), "extra": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict({"weight": torch.zeros(3, 3), "bias": torch.zeros(4)})
    keys = module.load_state_dict({"weight": torch.ones(4, 3)}, strict=False)
    assert keys.missing_keys == ["bias"] and torch.equal(module.state_dict()["weight"], torch.ones(4, 3))


def test_a_distributed_module_is_copied_pickled_and_converted(mesh):
    module = dtorch.distribute_module(Tied(), mesh, PLACED).eval()
    want = module.state_dict()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.head.weight is other.embed.weight is not module.embed.weight
        assert mesh.size() == 1 or other.embed.weight.placements == module.embed.weight.placements
        assert all(torch.equal(value, want[name]) for name, value in other.state_dict().items())
        other.load_state_dict({name: value + 1 for name, value in want.items()})
        assert torch.equal(other.state_dict()["scale"], want["scale"] + 1)
    assert torch.equal(module.state_dict()["scale"], want["scale"])
    module.double()
    assert module.embed.weight.dtype == torch.float64
    assert mesh.size() == 1 or module.embed.weight.placements[mesh.axis("tp")] == Shard(0)
    assert module.state_dict()["norm.running_mean"].dtype == torch.float64
    assert module.head.weight is module.embed.weight


def test_a_module_is_distributed_again_elsewhere():
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
    other = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=["tp"])
    module = dtorch.distribute_module(nn.Linear(4, 5), mesh, {"weight": {"tp": Shard(0)}})
    want = module.state_dict()
    dtorch.distribute_module(module, other, {"weight": [Shard(1)]})
    assert module.weight.device_mesh == other and module.weight.placements == [Shard(1)]
    assert len(module._state_dict_hooks) == 1
    assert all(torch.equal(value, want[name]) for name, value in module.state_dict().items())


def test_a_layers_buffers_are_updated_by_its_own_code(mesh):
    plain = nn.BatchNorm1d(3).train()
    module = dtorch.distribute_module(copy.deepcopy(plain), mesh)
    x = torch.randn(8, 3)
    check(module(x), plain(x), mesh)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)


def test_mistakes_are_named():
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
    with pytest.raises(PlacementError, match="'haed.weight' .nearest: head.weight"):
        dtorch.distribute_module(Tied(), mesh, {"haed.weight": {"tp": Shard(0)}})
    with pytest.raises(PlacementError, match="one tied parameter"):
        dtorch.distribute_module(Tied(), mesh, {"head.weight": {"tp": Shard(0)}, "embed.weight": {"tp": Shard(1)}})
    with pytest.raises(InputError, match="meta device.*: weight, bias"):
        dtorch.distribute_module(nn.Linear(2, 2, device="meta"), mesh)
    with pytest.raises(MeshError, match="DeviceMesh"):
        dtorch.distribute_module(nn.Linear(2, 2), "cpu")
    with pytest.raises(InputError, match="torch.nn.Module"):
        dtorch.distribute_module(torch.zeros(2), mesh)


def test_a_distributed_parameter_is_no_view_and_neither_is_its_copy():
    parameter = dtorch.distribute_tensor(nn.Parameter(torch.ones(4)), dtorch.init_device_mesh("cpu", (1,)), [Shard(0)])
    for each in (parameter, copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert isinstance(each, nn.Parameter) and each.requires_grad and each.base is None
        assert each.placements == [Shard(0)]
