"""Programs that were made to break the compiler: each stands for a kind of mistake that gave a wrong result or a crash.

In: modules and meshes of awkward sizes. Out: eager's results, or an error that says what is not possible.
"""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from null.agreement import assert_near, mesh_of
from torch import nn
from torch.nn import functional as F

import dtorch
from dtorch.errors import CaptureError, InputError, PlacementError, UnsupportedError

meshes = pytest.mark.parametrize("shape", [(1,), (3,), (5,), (2, 3, 2)], ids=str)


class Module(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.weight = nn.Parameter(torch.randn(7, 7))
        self.register_buffer("mean", torch.randn(7))
        self.register_buffer("variance", torch.ones(7))
        self.plain = torch.zeros(7)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def compiled_of(model: nn.Module, shape: tuple[int, ...]) -> Any:
    return dtorch.compile(model.eval(), dtorch.init_device_mesh("cpu", shape))


@meshes
def test_strided_windows_of_a_gathered_value_are_those_of_eager(shape: tuple[int, ...]) -> None:
    model = Module(lambda self, x: torch.as_strided(x @ self.weight, (3, 4), (7, 2)))
    x = torch.randn(5, 7)
    assert_near(compiled_of(model, shape)(x), model(x))


@meshes
@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_running_statistics_are_written_back(norm: Any, shape: tuple[int, ...]) -> None:
    model = Module(lambda self, x: norm(x, self.mean, self.variance, None, None, True, 0.3))
    expected, compiled, x = copy.deepcopy(model), compiled_of(model, shape), torch.randn(5, 7, 4)
    for _ in range(2):
        assert_near(compiled(x), expected(x))
    for name, value in expected.state_dict().items():
        assert_near(compiled.state_dict()[name], value)


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_channel_dimension_cut_twice_leaves_no_device_with_an_empty_convolution(layer: Any) -> None:
    model = layer(3, 7, 3).eval()  # 7 on 2 are 4 and 3; 4 on 3 are 2, 2 and none
    x = torch.randn(5, 3, 6, 6)
    assert_near(compiled_of(model, (2, 3, 2))(x), model(x))


@meshes
def test_tensors_made_by_forward_may_be_read_and_then_written(shape: tuple[int, ...]) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(5, 7).tril()
        made = x.new_ones(5, 7).tril()
        total = float(made.sum())
        made[:, 2] = x[:, 1]
        return x * mask + made * total

    model, x = Module(forward), torch.randn(5, 7)
    assert_near(compiled_of(model, shape)(x), model(x))


def test_a_longformer_encoder_runs() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        attention_window=4, pad_token_id=1,
    )  # fmt: skip
    model, ids = transformers.LongformerModel(config).eval(), torch.randint(3, 61, (3, 8))
    with torch.no_grad():
        assert_near(compiled_of(model, (2, 2))(ids).last_hidden_state, model(ids).last_hidden_state)


def test_a_plain_tensor_attribute_that_forward_writes_into_is_refused() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        result = x + self.plain
        self.plain.add_(1)
        return result

    with pytest.raises(CaptureError, match="plain tensor attribute plain and writes into it.*register_buffer"):
        compiled_of(Module(forward), (1,))(torch.randn(5, 7))


def test_arguments_that_overlap_are_refused_where_forward_writes_into_one() -> None:
    model = Module(lambda self, x, y: x.add_(1) + y)
    compiled, whole = compiled_of(model, (1,)), torch.randn(6, 7)
    with pytest.raises(InputError, match="shares memory"):
        compiled(whole[:5], whole[1:])
    halves = torch.randn(5, 14)
    wanted = copy.deepcopy(halves)
    assert_near(compiled(halves[:, ::2], halves[:, 1::2]), model(wanted[:, ::2], wanted[:, 1::2]))
    assert_near(halves, wanted)


def test_a_write_under_vmap_that_changes_a_shape_is_no_wrong_result() -> None:
    model, x = Module(lambda self, x: torch.vmap(lambda row: row @ self.weight)(x)), torch.randn(5, 7)
    try:
        found = compiled_of(model, (1,))(x)
    except CaptureError:
        return
    assert_near(found, model(x))


def test_threads_that_compile_at_once_do_not_see_each_others_fake_kernels() -> None:
    model = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.GELU(), nn.Linear(13, 7)).eval()
    compiled, failures = compiled_of(model, (2, 2)), []

    def work(rows: int) -> None:
        try:
            for extra in range(4):
                x = torch.randn(rows + 6 * extra, 7)
                assert_near(compiled(x), model(x))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_packed_sequences_follow_the_lengths_of_each_call() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(7, 5, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            result, last = self.gru(packed)
            return nn.utils.rnn.pad_packed_sequence(result, batch_first=True)[0], last

    torch.manual_seed(0)
    model, x = Packed().eval(), torch.randn(3, 6, 7)
    compiled = compiled_of(model, (2,))
    for lengths in ([6, 2, 4], [1, 3, 5], [6, 2, 4]):
        for found, wanted in zip(compiled(x, torch.tensor(lengths)), model(x, torch.tensor(lengths)), strict=True):
            assert_near(found, wanted)


def test_scripted_modules_are_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(7, 7), torch.jit.script(nn.Linear(7, 7)))
    with pytest.raises(UnsupportedError, match="1 is a RecursiveScriptModule of torch.jit"):
        compiled_of(model, (2,))(torch.randn(5, 7))


def test_a_buffer_that_is_a_view_of_another_one_may_be_read_but_not_written() -> None:
    def module(function: Any) -> Module:
        model = Module(function)
        model.register_buffer("part", model.mean[2:5])
        return model

    reads, x = module(lambda self, x: x + self.mean + self.part.sum()), torch.randn(5, 7)
    assert_near(compiled_of(reads, (2,))(x), reads(x))
    with pytest.raises(CaptureError, match="writes into mean, which shares memory with part"):
        compiled_of(module(lambda self, x: x + self.mean.add_(1) + self.part.sum()), (2,))(x)


def test_cond_branches_on_the_value_of_each_call():
    class Branch(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + torch.ones(2), lambda x: x - 1, (x,))

    x = torch.ones(3, 2)
    compiled = dtorch.compile(Branch(), mesh_of(2))
    for _ in range(2):
        assert torch.equal(compiled(x), x + 1) and torch.equal(compiled(-x), -x - 1)


def test_as_strided_beyond_its_view_is_refused():
    class Beyond(nn.Module):
        def forward(self, x):
            return x[1:].as_strided((3, 2), (2, 1), 0)

    with pytest.raises(UnsupportedError, match=r"as_strided .* a view of another tensor"):
        dtorch.compile(Beyond(), mesh_of(2))(torch.ones(3, 2))


def test_a_key_that_is_no_name_is_refused():
    with pytest.raises(PlacementError, match="not 0"):
        dtorch.compile(nn.Linear(2, 2).eval(), mesh_of(2), inputs={0: {"tp": dtorch.Shard(0)}})


def every_placement(tensor: torch.Tensor, ndim: int) -> list[list[Any]]:
    one = [dtorch.Replicate(), *(dtorch.Shard(dim) for dim in range(tensor.dim()))]
    return [[first, *[second] * (ndim - 1)] for first in one for second in (one if ndim > 1 else one[:1])]


def assert_same_bits(function: Any, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Eager dtorch and a compiled module give torch's bits for every placement of the input."""
    mesh, wanted = dtorch.init_device_mesh("cpu", shape), function(tensor.clone())
    for placements in every_placement(tensor, len(shape)):
        found = function(dtorch.distribute_tensor(tensor.clone(), mesh, placements)).to_torch()
        assert found.dtype is wanted.dtype and torch.equal(found, wanted), placements
    model = Module(lambda self, x: function(x))
    assert torch.equal(compiled_of(model, shape)(tensor.clone()), wanted)


small_meshes = pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)], ids=str)
LOOK_AT_STRIDES = {
    "view_as_complex": torch.view_as_complex,
    "view_as_complex of a transposed tensor": lambda x: torch.view_as_complex(x.transpose(0, 1)),
    "view_as_complex of an expanded tensor": lambda x: torch.view_as_complex(x[:1].expand(5, 8, 2)).clone(),
    "a wider dtype": lambda x: x.view(torch.float64),
    "a narrower dtype": lambda x: x.view(torch.int16),
    "kron": lambda x: torch.kron(x[:, :, 0], x[:3, :, 1]),
    "as_strided of a transposed tensor": lambda x: x.transpose(0, 2).as_strided((3, 4), (7, 2)).clone(),
    "as_strided of an expanded tensor": lambda x: x[0].expand(3, 8, 2).as_strided((4, 2), (2, 1)).clone(),
    "as_strided of windows": lambda x: x.unfold(1, 3, 1).as_strided((2, 3), (3, 1)).clone(),
    "as_strided_copy": lambda x: torch.as_strided_copy(x, (3, 4), (7, 2)),
}


@small_meshes
@pytest.mark.parametrize("name", LOOK_AT_STRIDES)
def test_ops_that_look_at_strides_find_those_of_torch(name: str, shape: tuple[int, ...]) -> None:
    assert_same_bits(LOOK_AT_STRIDES[name], torch.randn(5, 8, 2), shape)


@small_meshes
def test_a_write_through_as_strided_goes_where_torch_writes(shape: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 2).clone()
        y.as_strided((3, 4), (16, 2)).zero_()
        return y

    assert_same_bits(function, torch.randn(5, 8, 2), shape)


@pytest.mark.parametrize("placement", [dtorch.Replicate(), dtorch.Shard(1)], ids=str)
def test_as_strided_between_the_elements_of_a_view_is_refused(placement: Any) -> None:
    x = dtorch.distribute_tensor(torch.randn(5, 8, 2), dtorch.init_device_mesh("cpu", (2,)), [placement])
    with pytest.raises(UnsupportedError, match=r"test_adversarial.py.* reads between the tensor's elements"):
        x[::2].as_strided((20,), (1,)).to_torch()


def write_one_row(x: torch.Tensor) -> Any:
    x.expand(2, 5, 7)[1].zero_()
    return x


def write_a_column(x: torch.Tensor) -> Any:
    y = x * 2
    rows = y.unsqueeze(1).expand(5, 3, 7)
    part = rows[:, 2, 1:6:2]
    part.mul_(-3).add_(0.5)
    y.add_(1)
    part[1:3, 0] = float("nan")
    return torch.cat([y.flatten(), rows.flatten(), part.flatten()]).nan_to_num(7.0)


def write_below_a_view(x: torch.Tensor) -> Any:
    y = x.clone()
    y.t()[1:4].expand(2, 3, 5)[0].t().copy_(x[:, :3])
    y[0].expand(4, 7)[3, 2:].sub_(1)
    return y


def write_a_window(x: torch.Tensor) -> Any:
    y = x.clone()
    windows = y.unfold(1, 3, 1)
    windows[:, 2].neg_()
    windows[1, 4] += x[0, :3]
    return torch.cat([y.flatten(), windows.flatten()])


def write_twice_expanded(x: torch.Tensor) -> Any:
    y = x.clone()
    first = y[:, :1].expand(5, 4)
    first[:, 2].expand(3, 5)[1, 1:].fill_(-0.0)
    torch.broadcast_tensors(y, x.new_zeros(2, 5, 7))[0][0, 2:].abs_()
    return torch.cat([y.flatten(), first.flatten()])


def write_the_expanded(x: torch.Tensor) -> Any:
    y = x.clone()
    rows = y.expand(3, 5, 7)
    rows[1, 2:4] = x[0]
    rows[2, 0, 3] = -0.0
    rows[0, 0, 4] = float("nan")
    windows = y.unfold(0, 3, 2)
    windows[1].fill_(2)
    y[4].unsqueeze(0).expand(2, 7)[:, 1:3].zero_()
    return torch.cat([y.flatten(), rows.flatten(), windows.flatten()]).nan_to_num(7.0)


@small_meshes
@pytest.mark.parametrize(
    "function",
    [write_the_expanded, write_one_row, write_a_column, write_below_a_view, write_a_window, write_twice_expanded],
)
def test_writes_below_an_expanded_tensor_reach_its_base(function: Any, shape: tuple[int, ...]) -> None:
    assert_same_bits(function, torch.randn(5, 7), shape)


def test_writes_into_elements_that_share_memory_are_refused() -> None:
    x = dtorch.distribute_tensor(torch.randn(5, 7), dtorch.init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match=r"(?s)refers to a single memory location.*test_adversarial.py"):
        x.expand(2, 5, 7).add_(1)
    before, z = x.to_torch(), dtorch.distribute_tensor(torch.randn(5, 2), x.device_mesh)
    with pytest.raises(UnsupportedError, match="read as another dtype"):
        torch.view_as_complex(z).expand(3, 5)[0].zero_()
    assert torch.equal(x.to_torch(), before)
