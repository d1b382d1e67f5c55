"""What modules do beside computing: outputs of all types, mutation, buffers, factories, hooks, autocast, ties,
reads."""

import collections
import copy
import dataclasses
import threading
import typing

import pytest
import torch
import torch.nn.functional as F
from interpreting import assert_same, captured, run_traced
from torch import nn

from dtorch.capture.host import make_host
from dtorch.capture.module import capture_module
from dtorch.errors import CaptureError, DataDependentError


class Calls(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def check(function, *args, **kwargs):
    """A function of tensors, captured and run, equals eager, also in what it does to its arguments."""
    model = function if isinstance(function, nn.Module) else Calls(function)
    model.eval()
    eager_args, eager_kwargs, eager_model = copy.deepcopy((args, kwargs, model))
    with torch.no_grad():
        expected = eager_model(*eager_args, **eager_kwargs)
    traced = captured(model, args, kwargs)
    result = run_traced(traced, model, args, kwargs)
    assert_same(result, expected)
    assert_same((args, kwargs), (eager_args, eager_kwargs))
    assert_same(dict(model.state_dict()), dict(eager_model.state_dict()))
    return traced


def kinds(traced):
    return [spec.kind for spec in traced.signature.inputs]


def targets(traced):
    return [str(node.target) for node in traced.graph.graph.nodes if node.op == "call_function"]


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    hidden: tuple | None = None
    loss: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    scale: float = 2.0


class Pair(typing.NamedTuple):
    a: torch.Tensor
    b: int


class Box:
    def __init__(self, value):
        self.value = value
        self.more = [value * 2, None]


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: Out(x + 1),
        lambda x: Out(x + 1, (x, x * 2)),
        lambda x: Frozen(x + 1),
        lambda x: Pair(x * 2, 3),
        lambda x: collections.OrderedDict(h=[x + 1, {"z": x.sum()}], none=None, flag=True),
        lambda x: (x.max(1), [x.sort(0)]),
        lambda x: {"a": (), "b": [], 3: x + 1, "c": "text", "d": 1.5},
        lambda x: collections.defaultdict(list, a=x + 1),
        lambda x: x,
        lambda x: (x, x),
        lambda x: None,
        lambda x: (x + 1, torch.ones(3), torch.tensor([1, 2])),
    ],
)
def test_results_keep_their_containers(function):
    check(function, x)


def test_objects_of_unknown_classes_come_back_with_results_in_them():
    model = Calls(lambda x: (Box(x + 1), Slots(x * 3)))
    result = run_traced(captured(model, (x,)), model, (x,))
    assert type(result[0]) is Box and torch.equal(result[0].value, x + 1) and result[0].more[1] is None
    assert torch.equal(result[0].more[0], (x + 1) * 2) and torch.equal(result[1].value, x * 3)


def test_an_object_returned_twice_stays_one():
    def function(x):
        inner = [x + 1]
        return inner, inner, inner[0]

    model = Calls(function)
    first, second, tensor = run_traced(captured(model, (x,)), model, (x,))
    assert first is second and first[0] is tensor


def test_python_arguments_choose_the_branch():
    def function(x, kind="a", *, scale=1.0):
        return x + 1 if kind == "a" else x * scale

    check(function, x)
    check(function, x, kind="b", scale=3.0)
    check(function, x, "b")


def test_nested_arguments_come_in():
    check(lambda d, t: d["a"] + t[0][1] + d["b"][0], {"a": x, "b": [x * 2]}, ((None, x), 5))


def test_inputs_written_in_place_are_written_back():
    def function(x):
        y = x + 0
        z = x.clone()
        w = x.contiguous() * 1
        x.add_(1)
        return y, z, w, x

    traced = check(function, x.clone())
    assert [spec.mutates for spec in traced.signature.outputs] == [None, None, None, None, "args_0"]
    assert traced.signature.outputs[3].aliases == "args_0"


def test_writes_through_views_reach_the_base_and_other_views():
    def function(a):
        b = a.view(24)
        c = b[3:17]
        d = a.transpose(0, 1)
        c.add_(1)
        d[0] = 5
        e = c * 2
        a[:, 2].zero_()
        a[1:3, ::2] *= 3
        return a, b, c, d, e

    check(function, x.clone())


def test_chunks_written_in_place():
    def function(a):
        p, q = a.chunk(2, -1)
        p += q
        p *= 2
        return a, p, q

    check(function, x.clone())


def test_out_arguments_and_inplace_functions():
    def function(a):
        out = torch.empty_like(a)
        torch.add(a, 1, out=out)
        b = F.relu(out, inplace=True)
        out.masked_fill_(a > 0, -1.0)
        out[a < 0] = 7.0
        return b, out

    check(function, x.clone())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.register_buffer("kv", torch.zeros(6, 4), persistent=False)
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.kv[self.n % 6] = x
        self.n += 1
        self.mean = 0.9 * self.mean + 0.1 * x
        return self.kv.sum(0) + self.n + self.mean


def test_buffers_written_or_assigned_are_written_back():
    model, other = Counting().eval(), Counting().eval()
    host = make_host(other)
    for value in torch.randn(8, 4):
        expected = model(value)
        traced = capture_module(host, (value,))
        assert_same(run_traced(traced, other, (value,)), expected)
    assert {spec.mutates for spec in traced.signature.outputs} == {None, "n", "kv", "mean"}
    assert int(other.n) == 8 and host.module.calls == 0


def test_factories_are_recorded_without_data():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(16, 8)

        def forward(self, ids):
            b, t = ids.shape
            h = self.e(ids) + self.e(torch.arange(t, device=ids.device))[None]
            mask = torch.full((t, t), float("-inf"), device=h.device, dtype=h.dtype).triu(1)
            a = (h @ h.mT) * h.shape[-1] ** -0.5 + mask
            more = torch.linspace(0, 1, t) + torch.eye(t)[0] + torch.tensor(2.5) + torch.zeros(t)
            rest = h.new_zeros(h.shape) + torch.zeros_like(h) + torch.ones(t, 1).to(h) + more[:, None]
            return a.softmax(-1) @ h + rest

    traced = check(Model(), torch.randint(0, 16, (4, 6)))
    assert not traced.constants


def test_plain_tensors_become_constants_once_and_as_they_were():
    table = torch.arange(6.0)

    def function(x):
        first = x + table
        table.add_(1)
        return first + table * table

    model = Calls(function)
    before = table.clone()
    traced = captured(model, (x,))
    table.copy_(before)
    with torch.no_grad():
        expected = model(x)
    assert_same(run_traced(traced, model, (x,)), expected)
    assert len(traced.constants) == 2


def test_tied_weights_are_one_input():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.fc, self.head = nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 30, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.fc(self.emb(ids))))

    traced = check(Tied(), torch.randint(0, 30, (2, 7)))
    (tied,) = [spec for spec in traced.signature.inputs if spec.tied]
    assert tied.target == "emb.weight" and tied.tied == ("head.weight",) and tied.requires_grad


def test_unused_weights_are_no_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x, never=None):
            self.unused(x)
            return self.used(x)

    traced = check(Model(), x, x * 2)
    assert [spec.target for spec in traced.signature.inputs] == ["x", "never", "used.weight", "used.bias"]


def test_hooks_fire_once_and_their_changes_count():
    model, seen = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), []
    model[0].register_forward_hook(lambda module, args, out: out + 1)
    model[2].register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    traced = captured(model, (x,))
    assert seen == [(4, 8)]
    assert_same(run_traced(traced, model, (x,)), model(x).detach())


def test_autocast_at_the_call_decides_dtypes():
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    host = make_host(model)
    for _ in range(2):
        with torch.no_grad():
            plain = model(x)
            assert_same(run_traced(capture_module(host, (x,)), model, (x,)), plain)
            with torch.autocast("cpu", torch.bfloat16):
                cast = model(x)
                traced = capture_module(host, (x,))
            assert cast.dtype == torch.bfloat16
            assert_same(run_traced(traced, model, (x,)), cast)


def test_submodules_under_torch_compile_run_as_written():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.compile(nn.Linear(6, 8), backend="eager")
            self.b = nn.Linear(8, 4)
            self.act = torch.compile(lambda t: F.gelu(t) * 2, backend="eager")

        def forward(self, x):
            return self.b(self.act(self.a(x)))

    model = Model().eval()
    traced = captured(model, (x,))
    assert_same(run_traced(traced, model, (x,)), model(x).detach())


def test_attributes_that_cannot_be_copied_are_shared():
    model = nn.Sequential(nn.Linear(6, 3)).eval()
    model.lock, model[0].lock = threading.Lock(), threading.Lock()
    host = make_host(model)
    assert host.module is not model and host.module[0] is not model[0] and host.module.lock is model.lock
    assert_same(run_traced(capture_module(host, (x,)), model, (x,)), model(x).detach())


def test_parameters_stay_parameters_in_the_host():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(6))
            self.register_buffer("b", torch.randn(6))

        def forward(self, x):
            assert isinstance(self.w, nn.Parameter) and not isinstance(self.b, nn.Parameter)
            assert self.w.requires_grad and not self.b.requires_grad and self.w.device.type == "cpu"
            assert len(list(self.parameters())) == 1 and not self.w.is_meta
            return x * self.w + self.b

    check(Model(), x)


def test_reads_of_constants_are_computed_at_once():
    def function(x):
        lengths = torch.tensor([3, 1])
        if (lengths > 2).any() and torch.arange(4).sum() == 6:
            x = x * lengths.max().item()
        return x[:, : int(lengths[0])]

    traced = capture_module(Calls(function).eval(), (x,))
    assert_same(run_traced(traced, Calls(function), (x,)), function(x))
    assert not traced.reads


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, mask):
        h = self.fc(x)
        h = h.masked_fill(mask[..., None] == 0, -1.0) if (mask == 0).any() else h * 2
        n = int(mask.sum().item())
        return h[:, : max(1, n % 4)]


def test_reads_specialise_the_graph_and_are_listed():
    model, x = Branching().eval(), torch.randn(2, 5, 8)
    masks = torch.ones(2, 5), torch.ones(2, 5)
    masks[1][0, 3:] = 0
    for mask in masks:
        traced = captured(model, (x, mask))
        assert_same(run_traced(traced, model, (x, mask)), model(x, mask).detach())
        assert [read.request.what for read in traced.reads] == ["bool()", "item()"]
        assert all(read.request.only_user_inputs for read in traced.reads)
        assert "_traced" not in traced.reads[0].request.where and "(mask == 0).any()" in traced.reads[0].request.where
        assert [spec.name for spec in traced.reads[0].request.program.signature.inputs] == ["mask"]


def test_a_read_without_an_answer_names_the_line_and_what_to_do():
    with pytest.raises(DataDependentError, match=r"if \(mask == 0\)\.any\(\).*bool\(\).*mask.*torch\.where"):
        capture_module(Branching().eval(), (torch.randn(2, 5, 8), torch.ones(2, 5)))


def test_reads_of_weights_say_so():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return x * 2 if self.gate > 0 else x

    traced = check(Model(), x)
    assert not traced.reads[0].request.only_user_inputs


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x[:, 0] > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x[torch.nonzero(x[:, 0] > 0, as_tuple=True)] * 2,
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.unique((x > 0).long()),
        lambda x: torch.zeros(int((x > 0).sum()), 2),
        lambda x: x[: (x[:, 0] > 0).sum()],
        lambda x: [row * 2 for row in x],
        lambda x: x.repeat_interleave((x[:, 0] > 0).long() + 1, 0),
        lambda x: torch.split(x, (x[:, 0] > 0).long().tolist() + [int((x[:, 0] <= 0).sum())])[0],
    ],
)
def test_shapes_that_depend_on_data_hold_for_the_values_read(function):
    check(function, x)


def test_dropout_in_training_mode_says_to_call_eval():
    with pytest.raises(CaptureError, match=r"model\.eval\(\)"):
        capture_module(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).train(), (x,))


@pytest.mark.parametrize(
    "function", [lambda x: x + torch.rand(6), lambda x: torch.randn_like(x), lambda x: x.bernoulli()]
)
def test_random_operations_are_refused(function):
    with pytest.raises(CaptureError, match="random"):
        capture_module(Calls(function).eval(), (x,))


def test_writing_into_a_plain_tensor_names_both_and_the_way_out():
    plain = torch.zeros(4, 6)

    def function(x):
        plain[0] = x[0]
        return plain

    with pytest.raises(CaptureError, match=r"plain torch\.Tensor of shape \(4, 6\).*new_zeros"):
        capture_module(Calls(function).eval(), (x,))
    assert plain.eq(0).all()


def test_memory_cannot_be_asked_for():
    with pytest.raises(CaptureError, match=r"data_ptr\(\)"):
        capture_module(Calls(lambda x: x.data_ptr()).eval(), (x,))
    with pytest.raises(DataDependentError, match=r"numpy\(\)"):
        capture_module(Calls(lambda x: x.numpy()).eval(), (x,))


def test_a_symbol_kept_from_an_earlier_call_is_refused():
    kept = []

    def function(x):
        kept.append(x + 1)
        return x + kept[0]

    model = Calls(function).eval()
    captured(model, (x,))
    with pytest.raises(CaptureError, match="earlier call"):
        captured(model, (x,))


def test_hidden_state_in_a_plain_attribute_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = torch.zeros(6)

        def forward(self, x):
            self.state = self.state + x[0]
            return self.state

    with pytest.raises(CaptureError, match="attribute state.*register_buffer"):
        capture_module(Model().eval(), (x,))


def test_attributes_that_a_forward_sets_are_put_back():
    class Model(nn.Module):
        def forward(self, x):
            self.last = x + 1
            return self.last * 2

    host = make_host(Model().eval())
    for _ in range(2):
        capture_module(host, (x,))
    assert not hasattr(host.module, "last")


def test_symbols_print_without_values():
    seen = []
    captured(Calls(lambda x: (seen.append(f"{x}"), x)[1]).eval(), (x,))
    assert seen[0].startswith("dtorch.Tensor(shape=[4, 6], dtype=torch.float32")


def test_vmap_over_captured_tensors():
    check(lambda x: torch.vmap(lambda a: a.sum(0) * 2)(x), x)


def test_vmap_with_a_captured_tensor_as_masks_use_it():
    def function(mask):
        inner = torch.vmap(lambda batch, key: mask[batch, key], in_dims=(None, 0))
        return torch.vmap(inner, in_dims=(0, None))(torch.arange(2), torch.arange(3))

    check(function, torch.tensor([[0, 1, 1], [1, 1, 1]]).bool())


def test_modules_made_inside_and_deep_copies():
    check(lambda x: copy.deepcopy(x) + nn.Parameter(x * 2), x)


def test_mark_static_address_is_harmless():
    check(lambda x: (torch._dynamo.mark_static_address(x), x + 1)[1], x)


@pytest.mark.parametrize("module", [nn.LSTM(6, 5, batch_first=True), nn.MultiheadAttention(6, 2, batch_first=True)])
def test_library_modules(module):
    y = x[None]
    model = Calls(lambda y: module(y, y, y) if isinstance(module, nn.MultiheadAttention) else module(y)[0])
    model.add_module("inner", module)
    model.function = lambda y: (
        model.inner(y, y, y, need_weights=False)[0] if isinstance(module, nn.MultiheadAttention) else model.inner(y)[0]
    )
    with torch.no_grad():
        expected = model.eval()(y)
    torch.testing.assert_close(run_traced(captured(model, (y,)), model, (y,)), expected)
