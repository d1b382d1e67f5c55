"""What a module does with values: branches on them, buffers and inputs it writes to, results that share memory.

In: modules with a habit each. Out: eager's results call after call, in whatever order, and weights that nothing
outside can corrupt.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from model_zoo import llama, noise
from null.agreement import assert_near, assert_same_bits, mesh_of
from torch import nn

import dtorch

SHAPES = [(1,), (2,), (3,), (2, 2)]
every_mesh = pytest.mark.parametrize("shape", SHAPES, ids=str)


class Linear(nn.Module):
    """The weights of the modules here: a linear (4 → 4) and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(4))


def module(function: Any) -> nn.Module:
    """A module with the weights of `Linear` and a function as its forward."""
    return type(function.__name__, (Linear,), {"forward": function})().eval()


def alongside(function: Any, shape: tuple[int, ...], **options: Any) -> tuple[nn.Module, Any]:
    """A module of its own, and the same compiled."""
    model = module(function)
    return copy.deepcopy(model), dtorch.compile(model, mesh_of(*shape), **options)


def eager(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


UP, DOWN = noise(3, 4).abs(), -noise(3, 4).abs()


# --- branches on values ----------------------------------------------------------------------------------------------


def branches(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return self.linear(x) * 2
    return self.linear(x) - 1


def nested_branches(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = x + 1
        if x.max() > 3:
            return self.linear(x)
        return x
    return -x


def takes_an_item(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) * round(x.sum().item())


def reads_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x)[[i for i, each in enumerate((x.sum(1) > 0).tolist()) if each]]


def sizes_by_a_value(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([self.linear(x), x.new_ones(int(x[0, 0] > 0) + 1, 4)])


def branches_on_what_weights_give(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    return y * 2 if bool(y.mean() > 0) else y - 1


def branches_on_a_weight(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) if self.linear.bias.sum() > 0 else -x


def branches_on_a_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return self.linear(x) if self.count % 2 == 1 else x


BRANCHING = [
    branches,
    nested_branches,
    takes_an_item,
    reads_a_list,
    sizes_by_a_value,
    branches_on_what_weights_give,
    branches_on_a_weight,
    branches_on_a_buffer,
]


@every_mesh
@pytest.mark.parametrize("function", BRANCHING)
@pytest.mark.parametrize("order", [(UP, DOWN, UP, 9 * UP), (DOWN, UP, DOWN, 9 * UP, DOWN)], ids=["up", "down"])
def test_each_value_takes_its_own_branch(function: Any, order: Any, shape: tuple[int, ...]) -> None:
    model, compiled = alongside(function, shape)
    for x in order:
        assert_near(compiled(x), eager(model, x))


def test_a_branch_seen_before_is_not_captured_again() -> None:
    _, compiled = alongside(branches, (2,))
    for x in (UP, DOWN, UP, DOWN, 2 * UP):
        compiled(x)
    info = compiled.cache_info()
    assert (info["captures"], info["hits"], info["programs"]) == (2, 3, 2)


@every_mesh
def test_an_update_turns_a_branch_that_depends_on_it(shape: tuple[int, ...]) -> None:
    model, compiled = alongside(branches_on_a_weight, shape)
    for value in (1.0, -1.0, 1.0):
        compiled.update("linear.bias", torch.full((4,), value))
        with torch.no_grad():
            model.linear.bias.fill_(value)
        assert_near(compiled(UP), eager(model, UP))


@pytest.mark.parametrize("function", BRANCHING)
def test_strict_refuses_every_kind_of_branch_with_its_line(function: Any) -> None:
    _, compiled = alongside(function, (2,), strict=True)
    with pytest.raises(dtorch.errors.DataDependentError, match=r"test_values.py:\d+"):
        compiled(UP)
    assert compiled.cache_info()["programs"] == 0


# --- buffers and inputs that are written to --------------------------------------------------------------------------


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    self.seen.mul_(0.5).add_(x.sum(0))
    return self.linear(x) + self.count * self.seen


def replaces_a_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = self.seen + x.mean(0)
    return x * self.seen


@every_mesh
@pytest.mark.parametrize("function", [counts, replaces_a_buffer])
def test_buffers_change_from_call_to_call(function: Any, shape: tuple[int, ...]) -> None:
    model, compiled = alongside(function, shape)
    for x in (UP, DOWN, noise(5, 4), UP):
        assert_near(compiled(x), eager(model, x))
    for name in ("count", "seen"):
        torch.testing.assert_close(compiled.state_dict()[name], model.state_dict()[name])
    compiled.update("seen", torch.ones(4))
    with torch.no_grad():
        model.seen.fill_(1)
    assert_near(compiled(UP), eager(model, UP))


def writes_to_its_input(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    x[0].mul_(2)
    return self.linear(x)


@every_mesh
def test_inputs_written_to_are_changed_for_the_caller(shape: tuple[int, ...]) -> None:
    model, compiled = alongside(writes_to_its_input, shape)
    mine, theirs = UP.clone(), UP.clone()
    for _ in range(2):
        assert_near(compiled(mine), eager(model, theirs))
        assert torch.equal(mine, theirs)
    wide, other = noise(3, 8), noise(3, 8)
    compiled(wide[:, ::2]), eager(model, other[:, ::2])
    assert torch.equal(wide, other)


# --- results that share memory ---------------------------------------------------------------------------------------


def gives_its_input(self: Any, x: torch.Tensor) -> Any:
    return x, x.t(), x[1:]


def gives_weights(self: Any, x: torch.Tensor) -> Any:
    return self.linear.weight, self.linear.bias[1:], self.seen, self.linear(x)


@every_mesh
def test_changing_a_result_never_changes_weights(shape: tuple[int, ...]) -> None:
    model, compiled = alongside(gives_weights, shape)
    expected = eager(model, UP)
    for _ in range(2):
        result = compiled(UP)
        assert_near(result, tuple(each.detach() for each in expected))
        for each in result:
            each.detach().fill_(7)


def gives_weights_in_disguise(self: Any, x: torch.Tensor) -> Any:
    w = self.linear.weight
    whole = w.t(), w.reshape(-1), w.to(x.dtype), w.contiguous(), w.expand(2, 4, 4), w.detach(), w[None], w.data
    return whole, {"pieces": [w[0], *w.split(2), w.diagonal(), self.linear.bias[:]]}


@every_mesh
def test_no_view_of_a_weight_leads_back_to_it(shape: tuple[int, ...]) -> None:
    model, compiled = alongside(gives_weights_in_disguise, shape)
    for _ in range(2):
        whole, rest = compiled(UP)
        assert_near((whole, rest), eager(model, UP))
        for each in (*whole, *rest["pieces"]):
            each.detach().zero_()
    assert torch.equal(compiled.state_dict()["linear.weight"], model.linear.weight)


def gives_constants(self: Any, x: torch.Tensor) -> Any:
    return torch.tensor([1.0, 2.0]), torch.arange(3), torch.zeros(2), torch.full((), 4), x * torch.tensor(2.0)


@every_mesh
def test_constants_are_new_at_each_call(shape: tuple[int, ...]) -> None:
    model, compiled = alongside(gives_constants, shape)
    for _ in range(2):
        result = compiled(UP)
        assert_near(result, eager(model, UP))
        for each in result:
            each.zero_()


@every_mesh
def test_results_that_are_the_input_have_its_values(shape: tuple[int, ...]) -> None:
    model, compiled = alongside(gives_its_input, shape)
    x = UP.clone()
    assert_near(compiled(x), eager(model, x))


@every_mesh
def test_changing_a_result_never_changes_the_next(shape: tuple[int, ...]) -> None:
    model, compiled = alongside(counts, shape)
    for _ in range(3):
        result = compiled(UP)
        assert_near(result, eager(model, UP))
        result.zero_()


@every_mesh
def test_changing_logits_never_changes_a_cache(shape: tuple[int, ...]) -> None:
    model, _, kwargs = llama()
    compiled = dtorch.compile(model, mesh_of(*shape))
    ids = kwargs["input_ids"]
    found = []
    for spoil in (False, True):
        held, logits = compiled.make_cache(8), []
        for position in range(4):
            result = compiled(input_ids=ids[:, position : position + 1], past_key_values=held, use_cache=True).logits
            logits.append(result.clone())
            if spoil:
                result.fill_(5)
        found.append(torch.cat(logits, 1))
    assert torch.equal(*found)


# --- kinds of arguments and results ----------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass
class Record:
    value: torch.Tensor
    note: str
    more: Any = None


def gives_everything(self: Any, x: torch.Tensor, *, flag: bool = False, extra: Any = None) -> Any:
    y = self.linear(x)
    return {
        "pair": Pair(y, 3),
        "record": Record(y + 1, "note", None if extra is None else extra + 1),
        "list": [y > 0, (y * 10).long(), y.sum(), y.shape[0], 2.5, "text", None, flag],
        "twice": (y, y),
    }


@every_mesh
@pytest.mark.parametrize("extra", [None, noise(2)], ids=["none", "tensor"])
def test_results_of_every_kind(extra: Any, shape: tuple[int, ...]) -> None:
    model, compiled = alongside(gives_everything, shape)
    found, wanted = compiled(UP, flag=True, extra=extra), eager(model, UP, flag=True, extra=extra)
    assert_near(found, wanted)
    assert type(found["record"]) is Record and found["record"].note == "note"
    assert_near(found["record"].value, wanted["record"].value)
    assert (found["record"].more is None) == (extra is None)
    assert found["list"][3:] == [3, 2.5, "text", None, True] and found["pair"].right == 3
    assert found["list"][0].dtype == torch.bool and found["list"][1].dtype == torch.int64
    assert found["list"][2].shape == ()
    assert found["twice"][0] is found["twice"][1]


def adds(self: Any, x: torch.Tensor, y: torch.Tensor, z: Any = None) -> torch.Tensor:
    return self.linear(x) + y * 2 if z is None else self.linear(x) + y * z


@every_mesh
def test_the_same_tensor_twice_and_other_arguments(shape: tuple[int, ...]) -> None:
    model, compiled = alongside(adds, shape)
    calls = [((UP, UP), {}), ((UP, DOWN), {}), ((UP,), {"y": DOWN}), ((UP, UP), {"z": 3}), ((UP, UP), {"z": 3.0})]
    calls += [((UP, UP), {"z": True}), ((UP, UP), {"z": torch.tensor(2.0)}), ((UP, UP), {"z": None})]
    for args, kwargs in calls * 2:
        assert_near(compiled(*args, **kwargs), eager(model, *args, **kwargs))


def plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(self.linear(x), -1)


@every_mesh
@pytest.mark.parametrize(
    "x",
    [
        noise(4, 3).t(),
        noise(6, 8)[::2, ::2],
        noise(1, 4).expand(3, 4),
        noise(3, 4).flip(0),
        noise(4, 4).t(),
        noise(0, 4),
        noise(2, 0, 4),
        noise(4),
        noise(1, 4),
    ],
    ids=["transposed", "strided", "expanded", "flipped", "square", "empty", "empty inside", "vector", "one row"],
)
def test_inputs_of_every_layout_and_size(x: torch.Tensor, shape: tuple[int, ...]) -> None:
    model, compiled = alongside(plain, shape)
    found = compiled(x)
    if x.numel() == 0:
        assert found.shape == eager(model, x).shape
    else:
        assert_near(found, eager(model, x))


@every_mesh
def test_scalars_go_in_and_out(shape: tuple[int, ...]) -> None:
    def scalars(self: Any, x: torch.Tensor) -> Any:
        return x * self.linear.weight.sum(), x > 0, x.long()

    model, compiled = alongside(scalars, shape)
    for value in (2.0, -1.0):
        assert_near(compiled(torch.tensor(value)), eager(model, torch.tensor(value)), 1e-5)


def test_gradients_are_not_recorded() -> None:
    _, compiled = alongside(plain, (2,))
    result = compiled(UP.clone().requires_grad_())
    assert not result.requires_grad and result.grad_fn is None


# --- surroundings ----------------------------------------------------------------------------------------------------


@every_mesh
def test_autocast_is_eagers_and_has_its_own_program(shape: tuple[int, ...]) -> None:
    model, compiled = alongside(plain, shape)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = compiled(UP), eager(model, UP)
        assert found.dtype == wanted.dtype
        assert_near(found, wanted, 1e-2)
        if shape == (1,):
            assert_same_bits(found, wanted)
        assert_near(compiled(UP), eager(model, UP))
    assert compiled.cache_info()["captures"] == 2


@every_mesh
def test_the_default_dtype_is_part_of_a_call(shape: tuple[int, ...]) -> None:
    def makes(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x.long() + torch.ones(4) * 0.5

    model, compiled = alongside(makes, shape)
    for dtype in (torch.float32, torch.float64, torch.float32):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            found, wanted = compiled(UP), eager(model, UP)
        finally:
            torch.set_default_dtype(before)
        assert found.dtype == wanted.dtype == dtype
        assert_near(found, wanted)
    assert compiled.cache_info()["captures"] == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradient_modes_make_no_difference(mode: Any) -> None:
    model, compiled = alongside(plain, (2,))
    with mode():
        found = compiled(UP)
    assert_near(found.clone(), eager(model, UP))
    assert_near(compiled(UP), eager(model, UP))


def test_threads_share_a_compiled_module() -> None:
    model, compiled = alongside(plain, (2,))
    inputs = [noise(2 + number % 4, 4) + number for number in range(24)]
    wanted = [eager(model, x) for x in inputs]
    found: dict[int, torch.Tensor] = {}
    failures: list[BaseException] = []

    def work(numbers: range) -> None:
        try:
            for number in numbers:
                found[number] = compiled(inputs[number])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(range(start, 24, 2),)) for start in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    for number, want in enumerate(wanted):
        assert_near(found[number], want)
    assert compiled.cache_info()["programs"] == 4


def test_threads_count_every_call_in_a_buffer() -> None:
    _, compiled = alongside(counts, (2,))
    compiled(UP)

    def work() -> None:
        for _ in range(20):
            compiled(UP)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert int(compiled.state_dict()["count"]) == 41


def test_many_shapes_keep_at_most_as_many_programs_as_the_option_says() -> None:
    model, compiled = alongside(plain, (2,))
    with dtorch.options.override(plan_cache_entries=3):
        for rows in (1, 2, 3, 4, 5, 1):
            assert_near(compiled(noise(rows, 4)), eager(model, noise(rows, 4)))
    assert compiled.cache_info()["programs"] == 3
