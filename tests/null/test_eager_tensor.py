"""`dtorch.Tensor` as users meet it: placements, reading, copying, errors on their own line."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import InputError, PlacementError, ShardingError, UnsupportedError
from dtorch.test.test_util import assert_tensor_allclose, assert_tensor_equal

TP = dtorch.init_device_mesh("cpu", (4,), mesh_dim_names=["tp"])
GRID = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
PLAIN = torch.arange(15.0).reshape(5, 3)


def dist(value=PLAIN, *placements, mesh=TP):
    return dtorch.distribute_tensor(value, mesh, list(placements) or [Shard(0)])


def test_a_type_is_named_as_torch_names_it():
    assert dist().type() == PLAIN.type() and dist(PLAIN.long()).type() == "torch.LongTensor"
    assert dist().type("torch.IntTensor").type() == "torch.IntTensor" and dist().type(torch.half).dtype == torch.half


# --- placements and moving ----------------------------------------------------------------------------------------


def test_placements_equal_lists_and_tuples_and_hash_as_tuples():
    x = dist()
    assert x.placements == [Shard(0)] and x.placements == (Shard(0),) and x.placements != [Shard(1)]
    assert hash(x.placements) == hash((Shard(0),)) and repr(x.placements) == "[Shard(dim=0)]"


@pytest.mark.parametrize("before", [Shard(0), Shard(1), Replicate(), Partial(), Partial("avg"), Partial("max")])
@pytest.mark.parametrize("after", [Shard(0), Shard(1), Replicate(), Partial()])
def test_redistribute_keeps_the_value(before, after):
    moved = dist(PLAIN, before).redistribute(placements=[after])
    assert moved.placements == [after]
    assert torch.equal(moved.to_torch(), PLAIN)


def test_redistribute_goes_to_a_mesh_of_another_shape():
    moved = dist().redistribute(GRID, [Shard(1), Shard(0)])
    assert moved.device_mesh == GRID and torch.equal(moved.to_torch(), PLAIN)
    back = moved.redistribute_like(dist())
    assert back.device_mesh == TP and back.placements == [Shard(0)] and torch.equal(back.to_torch(), PLAIN)
    assert dist().redistribute(GRID).placements == [Replicate(), Replicate()]


def test_redistribute_by_dict_goes_by_names():
    x = dist(PLAIN, Shard(0), Replicate(), mesh=GRID)
    assert x.redistribute_by_dict({"dp": Shard(1), "tp": Shard(0), "pp": Shard(9)}).placements == [Shard(1), Shard(0)]
    assert x.redistribute_by_dict({"tp": Shard(1)}, "keep").placements == [Shard(0), Shard(1)]
    assert x.redistribute_by_dict({"tp": Shard(1)}, "replicate").placements == [Replicate(), Shard(1)]
    assert x.redistribute_by_dict({"tp": Shard(1)}, device_mesh=TP).placements == [Shard(1)]
    with pytest.raises(PlacementError, match="'dp'"):
        x.redistribute_by_dict({"tp": Shard(1)})
    with pytest.raises(PlacementError, match="raise_error, replicate, keep"):
        x.redistribute_by_dict({"tp": Shard(1)}, "other")
    with pytest.raises(PlacementError, match="names"):
        x.redistribute_by_dict({}, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))


def test_check_placement_names_both():
    x = dist()
    x.check_placement([Shard(0)])
    x.check_placement({"tp": Shard(-2)})
    with pytest.raises(PlacementError, match=r"Shard\(dim=0\).*Replicate"):
        x.check_placement([Replicate()])


def test_to_local_shows_each_part():
    x = dist()
    assert [x.to_local(at).shape[0] for at in range(4)] == [2, 2, 1, 0]
    assert torch.equal(torch.cat([x.to_local(at) for at in range(4)]), PLAIN)
    partial = dist(PLAIN, Partial())
    assert torch.equal(partial.to_local(), PLAIN) and not partial.to_local(3).any()
    with pytest.raises(PlacementError, match="coordinate"):
        x.to_local(4)


# --- reading ------------------------------------------------------------------------------------------------------


def test_python_reads_the_whole_value():
    x = dist()
    total = x.sum()
    assert total.item() == 105.0 and float(total) == 105.0 and int(total) == 105 and bool(total > 100)
    assert x.tolist() == PLAIN.tolist() and len(x) == 5 and [row.tolist() for row in x] == PLAIN.tolist()
    assert np.array_equal(x.numpy(), PLAIN.numpy()) and np.array_equal(np.asarray(x), PLAIN.numpy())
    assert f"{total:.1f}" == "105.0" and 14.0 in x and 15.0 not in x
    assert torch.equal(torch.from_dlpack(x), PLAIN)
    assert torch.equal(torch.tensor([total, 1.0]), torch.tensor([105.0, 1.0]))
    assert [10, 20, 30][x[0, 1].long()] == 20


def test_a_long_tensor_prints_as_torch_elides_it():
    text = repr(dist(torch.arange(5000.0)))
    assert "..." in text and len(text) < 500 and "shape=torch.Size([5000])" in text


def test_reading_does_not_share_memory():
    x = dist(PLAIN.clone(), Replicate())
    x.to_torch().zero_()
    assert torch.equal(x.full_tensor(), PLAIN)


# --- copies -------------------------------------------------------------------------------------------------------


def test_deepcopy_is_independent_in_both_directions():
    x = dist(PLAIN.clone())
    twin = copy.deepcopy(x)
    x.add_(1)
    twin.mul_(2)
    assert torch.equal(x.to_torch(), PLAIN + 1) and torch.equal(twin.to_torch(), PLAIN * 2)
    weight = torch.nn.Parameter(x)
    assert isinstance(copy.deepcopy(weight), torch.nn.Parameter)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()])
def test_pickle_and_torch_save_carry_value_mesh_and_placements(placement):
    x = dist(PLAIN, placement).requires_grad_()
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    for back in (pickle.loads(pickle.dumps(x)), torch.load(buffer)["x"]):
        assert back.placements == [placement] and back.device_mesh == TP and back.requires_grad
        assert torch.equal(back.to_torch(), PLAIN)


def test_data_takes_another_value_and_dtype():
    x = dist()
    x.data = dist(PLAIN.half(), Replicate())
    assert x.dtype == torch.float16 and x.placements == [Replicate()]
    assert torch.equal((x + 1).to_torch(), PLAIN.half() + 1)


def test_modules_with_distributed_parameters_run_and_change_dtype():
    plain = torch.nn.Linear(3, 6)
    module = copy.deepcopy(plain)
    for name, weight in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(dist(weight.detach(), Shard(0))))
    given = dist(PLAIN, Replicate())
    result = module(given)
    assert result.placements == [Shard(1)]
    assert_tensor_allclose(None, plain(PLAIN), result)
    module.double()
    assert module.weight.dtype == torch.float64 and isinstance(module.weight, dtorch.Tensor)
    assert_tensor_allclose(None, plain.double()(PLAIN.double()), module(given.double()))


# --- dtypes and devices -------------------------------------------------------------------------------------------


def test_casts_keep_placements_and_the_same_device_is_no_change():
    x = dist()
    assert x.to(torch.int64).placements == [Shard(0)] and x.half().dtype == torch.float16
    assert x.to("cpu") is x and x.cpu() is x and x.to(PLAIN) is x and x.to(x.dtype) is x
    assert x.to("cpu", torch.float64).dtype == torch.float64


@pytest.mark.parametrize("move", [lambda x: x.to("cuda"), lambda x: x.cuda(), lambda x: x.to("meta")])
def test_another_kind_of_device_is_a_redistribute(move):
    with pytest.raises(InputError, match="redistribute"):
        move(dist())


# --- errors -------------------------------------------------------------------------------------------------------


def test_a_shape_error_names_operator_placed_arguments_and_line():
    with pytest.raises(RuntimeError) as caught:
        dist(torch.zeros(4, 3)) @ dist(torch.zeros(5, 2), Replicate())
    text = str(caught.value)
    assert text.startswith("aten.mm(f32[4,3][S(0)], f32[5,2][R]) on mesh(tp=4): ")
    assert "test_eager_tensor.py" in text and "test_a_shape_error" in text


def test_errors_keep_the_class_that_torch_gives_them():
    with pytest.raises(IndexError, match="on mesh"):
        dist()[7]
    with pytest.raises(IndexError):
        dist().sum(5)


def test_a_failed_call_leaves_the_graph_usable():
    x = dist()
    y = x + 1
    with pytest.raises(RuntimeError):
        x @ x
    assert torch.equal((y * 2).to_torch(), (PLAIN + 1) * 2)


@pytest.mark.parametrize(
    "write",
    [
        lambda real, x: real.__setitem__(0, x[0]),
        lambda real, x: real.add_(x),
        lambda real, x: torch.add(x, 1, out=real),
        lambda real, x: real.copy_(x),
    ],
)
def test_writing_into_a_plain_tensor_names_both(write):
    real = torch.zeros(5, 3)
    with pytest.raises(RuntimeError, match=r"on mesh\(tp=4\) into a plain torch.Tensor of shape \(5, 3\).*new_zeros"):
        write(real, dist())
    assert not real.any()


def test_tensors_of_two_meshes_need_a_redistribute():
    with pytest.raises(ShardingError, match=r"mesh\(tp=4\) and on mesh\(dp=2, tp=2\).*redistribute"):
        dist() + dist(PLAIN, Replicate(), Replicate(), mesh=GRID)


def test_plain_tensors_are_replicated_in_the_mix():
    x = dist()
    assert_tensor_equal(None, PLAIN + PLAIN, x + PLAIN)
    assert_tensor_equal(None, PLAIN.flip(0) - PLAIN, PLAIN.flip(0) - x)
    assert (x + PLAIN).placements == [Shard(0)]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().backward(),
        lambda x: torch.autograd.backward(x.sum()),
        lambda x: torch.autograd.grad(x.sum(), x),
        lambda x: x.retain_grad(),
        lambda x: x.register_hook(print),
        lambda x: x.set_(x),
        lambda x: x.apply_(abs),
        lambda x: x.resize_(3),
    ],
)
def test_what_is_not_there_says_so(call):
    with pytest.raises(UnsupportedError):
        call(dist())


def test_explicit_redistribution_raises_instead_of_moving():
    a, b = dist(torch.zeros(4, 4), Shard(0)), dist(torch.zeros(4, 4), Shard(1))
    with dtorch.explicit_redistribution(), pytest.raises(ShardingError, match="explicit"):
        a + b
    assert (a + b).shape == (4, 4)


# --- assertions for users' tests ----------------------------------------------------------------------------------


def test_assertions_fail_with_both_described():
    with pytest.raises(AssertionError, match=r"f32\[5,3\]\[S\(0\)\] on mesh\(tp=4\)"):
        assert_tensor_allclose(None, PLAIN + 1, dist())
    assert_tensor_allclose(None, PLAIN + 1e-3, dist(), atol=1e-2)
    with pytest.raises(AssertionError):
        assert_tensor_equal(None, PLAIN + 1e-3, dist())
    with pytest.raises(AssertionError):
        assert_tensor_equal(None, PLAIN.double(), dist())


# --- random writes ------------------------------------------------------------------------------------------------


def test_random_writes_draw_torchs_numbers_through_views_too():
    x, plain = dist(PLAIN.clone()), PLAIN.clone()
    flat, plain_flat = x.view(-1), plain.view(-1)
    for write in (lambda t: t[1:3].normal_(), lambda t: t.bernoulli_(0.5), lambda t: torch.nn.init.xavier_uniform_(t)):
        torch.manual_seed(3)
        write(plain)
        torch.manual_seed(3)
        write(x)
        assert torch.equal(x.to_torch(), plain) and torch.equal(flat.to_torch(), plain_flat)


def test_a_copied_value_is_the_targets_own():
    x, y = dist(torch.zeros(4, 3)), dist(torch.ones(4, 3))
    x.copy_(y)
    dtorch.sync()
    y.add_(1)
    assert torch.equal(x.to_torch(), torch.ones(4, 3)) and torch.equal(y.to_torch(), torch.full((4, 3), 2.0))


WRITES = {
    "a method": lambda plain: plain.add_(1),
    "its data": lambda plain: plain.data.mul_(2).add_(1),
    "a NumPy array": lambda plain: np.add(plain.numpy(), 1, out=plain.numpy()),
    "other data": lambda plain: setattr(plain, "data", plain.reshape(-1)[:3] + 1),
    "the sign of zero": lambda plain: plain.data.copy_(-plain),
    "a NaN": lambda plain: plain.data.fill_(float("nan")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64])
def test_a_plain_tensor_counts_as_it_is_at_the_call_however_it_was_written(write, dtype):
    if dtype is torch.bfloat16 and write is WRITES["a NumPy array"]:
        pytest.skip("NumPy has no bfloat16")
    if dtype is torch.int64 and write is WRITES["a NaN"]:
        pytest.skip("integers have no NaN")
    plain, x = torch.zeros(5, 3).to(dtype), dist(torch.ones(3).to(dtype), Replicate())
    for _ in range(3):
        for function in (torch.add, torch.divide):
            got, want = function(x, plain), function(torch.ones(3).to(dtype), plain)
            write(plain)
            torch.testing.assert_close(got.to_torch(), want, equal_nan=True)


def test_a_plain_tensor_made_in_inference_mode_may_be_written_there():
    with torch.inference_mode():
        plain = torch.zeros(3)
        for count in range(3):
            assert (dist() + plain).to_torch()[0].tolist() == [count, 1 + count, 2 + count]
            plain.add_(1)


def test_a_view_may_be_the_last_of_thousands():
    x = dist()
    view = x
    for _ in range(3000):
        view = view.view(5, 3)
    x.add_(1)
    assert torch.equal(view.to_torch(), PLAIN + 1)
    view.mul_(2)
    assert torch.equal(x.to_torch(), (PLAIN + 1) * 2)


UNFIT = {
    "torch.sparse_coo": lambda: PLAIN.to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(PLAIN, 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([PLAIN[0], PLAIN[1, :2]]),
    "meta device": lambda: PLAIN.to("meta"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_plain_tensors_that_no_device_can_get_are_refused_by_kind(name):
    with pytest.raises(UnsupportedError, match=rf"test_eager_tensor\.py.*{name}"):
        dist() + UNFIT[name]()


@pytest.mark.parametrize("index", [7, 1.5, (0, 0, 0)])
def test_an_index_that_torch_refuses_is_named_as_one(index):
    with pytest.raises(IndexError, match=r"^__getitem__\(f32\[5,3\]\[S\(0\)\]\)"):
        dist()[index]


INACTIVE = {
    "a function": lambda x: torch.nn.functional.dropout(x, training=False),
    "a module": torch.nn.Dropout().eval(),
    "an operator": lambda x: torch.dropout(x, 0.5, False),
    "probability zero": lambda x: torch.nn.functional.dropout(x, 0.0),
    "twice": lambda x: torch.dropout(torch.dropout(x, 0.5, False), 0.5, False),
    "channels": lambda x: torch.feature_dropout(x, 0.5, False),
}


@pytest.mark.parametrize("name", INACTIVE)
def test_inactive_dropout_gives_its_input_back_as_torch_does(name):
    for _ in range(3):
        plain, x = PLAIN.clone(), dist()
        same, kept = INACTIVE[name](plain), INACTIVE[name](x)
        assert (kept is x) == (same is plain)
        same.add_(1), kept.add_(1)
        assert torch.equal(x.to_torch(), plain)
        got, want = x * 2, plain * 2
        assert torch.equal(INACTIVE[name](got).add_(1).to_torch(), INACTIVE[name](want).add_(1))
        assert torch.equal(got.to_torch(), want)


LISTS = {
    "_foreach_add_": lambda f, xs: f(xs, 1.5),
    "_foreach_mul_": lambda f, xs: f(xs, [2.0, 3.0]),
    "_foreach_sub_": lambda f, xs: f(xs, [x * 2 for x in xs], alpha=3),
    "_foreach_div_": lambda f, xs: f(xs, torch.tensor(4.0)),
    "_foreach_copy_": lambda f, xs: f(xs, [x + 1 for x in xs]),
    "_foreach_zero_": lambda f, xs: f(xs),
    "_foreach_sqrt_": lambda f, xs: f(xs),
    "_foreach_lerp_": lambda f, xs: f(xs, [x * x for x in xs], 0.5),
    "_foreach_addcdiv_": lambda f, xs: f(xs, [x + 1 for x in xs], [x + 2 for x in xs], value=0.5),
    "_foreach_clamp_max_": lambda f, xs: f(xs, 3.0),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_tensors_are_written_in_place(name):
    function = getattr(torch, name)
    for _ in range(3):
        plain, x = PLAIN.clone(), dist()
        LISTS[name](function, [plain[1:3], plain[4]])
        LISTS[name](function, [x[1:3], x[4]])
        assert torch.equal(x.to_torch(), plain)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch._foreach_add_([dist(PLAIN.long())], 0.5)
