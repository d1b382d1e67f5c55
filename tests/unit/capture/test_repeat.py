"""Calls that come again: what walks an edge, what must not, and the tables that the short ways rest on."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import dtorch
from dtorch import torch_private
from dtorch.capture import overrides, repeat
from dtorch.capture.eager import EagerRecorder
from dtorch.capture.turns import IN_A_ROW, Turn
from dtorch.errors import ShardingError

ROUNDS = 5  # found the long way, by its key, by its edge


@pytest.fixture(autouse=True)
def own_graph() -> Iterator[None]:
    """No traces of other tests: a state's edge is replaced a few times only."""
    with dtorch.Graph():
        yield


def placed(value: torch.Tensor, size: int = 1, placement: Any = None) -> Any:
    mesh = dtorch.init_device_mesh("cpu", (size,))
    tensor = dtorch.distribute_tensor(value, mesh, [placement or dtorch.Replicate()])
    for _ in range(IN_A_ROW):  # this thread has the short way
        with tensor.recorder.turn:
            pass
    return tensor


X, W, B = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions of all calls that no edge walked."""
    seen: list[Any] = []
    plain = EagerRecorder.quick_call

    def quick_call(self: Any, function: Any, args: tuple, kwargs: Any) -> Any:
        seen.append(function)
        return plain(self, function, args, kwargs)

    monkeypatch.setattr(EagerRecorder, "quick_call", quick_call)
    return seen


def program(x: Any, w: Any, b: Any) -> Any:
    y = F.linear(x, w, b)
    y = F.layer_norm(y, (4,), b, b) * 0.5
    y = torch.cat((y[..., :2], -y[..., 2:]), dim=-1).view(4, 4).transpose(0, 1)
    y = y.to(torch.float32).pow(2).mean(-1, keepdim=True) + y.contiguous()
    y = torch.rsqrt(y.abs() + 1) @ w
    return F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.0, is_causal=True)


def test_a_program_that_comes_again_walks_edges_from_the_third_time_on(slow: list[Any]) -> None:
    given = [placed(each) for each in (X, W, B)]
    want = program(X, W, B)
    for turn in range(ROUNDS):
        slow.clear()
        got = program(*given)
        assert turn < 2 or not slow, slow
        torch.testing.assert_close(got.to_torch(), want, rtol=0, atol=0)


def test_plain_tensors_take_the_way_by_the_key() -> None:
    x, misses = placed(X), []
    for _ in range(ROUNDS):
        y = x.relu()
        for _ in range(3):
            y = torch.arange(4.0) * y
        before = x.recorder.hits + x.recorder.misses
        torch.testing.assert_close(y.to_torch(), X.relu() * torch.arange(4.0) ** 3)
        misses.append(before)
    assert misses[-1] == misses[-2]  # the way that expands calls was not taken again


def test_a_plain_tensor_that_died_is_not_kept_on_the_devices() -> None:
    x = placed(X)
    for _ in range(5):
        (x + torch.ones(4)).to_torch()
    gc.collect()
    assert not len(x.recorder.plain)




CALLS = [
    lambda x, w, i: x * (2, 2.0, True)[i],
    lambda x, w, i: x + (0.0, -0.0, 1.0)[i],
    lambda x, w, i: x * (0.0, -0.0, float("nan"))[i],
    lambda x, w, i: x.sum((0, 1, -1)[i]),
    lambda x, w, i: x.sum(*((0,), (0, True), (1, False))[i]),
    lambda x, w, i: x.mean(-1, keepdim=(True, False, True)[i]),
    lambda x, w, i: x[((..., slice(None, 2)), (..., slice(None, 3)), (slice(None), slice(0, 3)))[i]],
    lambda x, w, i: x[(1, True, slice(1, 2))[i]],
    lambda x, w, i: x.view(((4, 4), (2, 8), [16])[i]),
    lambda x, w, i: x.to((torch.float32, torch.float64, torch.bfloat16)[i]),
    lambda x, w, i: torch.cat(((x, w), (w, x), (x, x))[i], dim=0),
    lambda x, w, i: F.linear(*((x, w), (w, x), (w, w))[i]),
    lambda x, w, i: F.linear(x, w, (None, w[0], x[0])[i]),
    lambda x, w, i: (x, w, x)[i] - (w, x, x)[i],
    lambda x, w, i: torch.clamp(x, **({"min": 0.1}, {"max": 0.1}, {"min": 0.1, "max": 0.2})[i]),
    lambda x, w, i: F.gelu(x, approximate=("none", "tanh", "none")[i]),
    lambda x, w, i: (x / w, x * w, x.t())[i],
]


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("fresh", [False, True])
def test_calls_that_differ_in_one_argument_are_not_taken_for_each_other(function: Any, fresh: bool) -> None:
    """`fresh`: the arguments come into the trace with the very call."""
    for i in [0] * ROUNDS + [1, 2] * ROUNDS + [0]:
        x, w = placed(X), placed(W)
        want = function(X if fresh else X + 1, W if fresh else W + 1, i)
        got = function(x if fresh else x + 1, w if fresh else w + 1, i)
        assert got.dtype is want.dtype and got.shape == want.shape and got.stride() == want.stride()
        torch.testing.assert_close(got.to_torch(), want, rtol=0, atol=0, equal_nan=True)
        zeros = want == 0
        assert torch.equal(torch.signbit(got.to_torch()[zeros]), torch.signbit(want[zeros]))


def test_a_view_that_was_written_below_is_derived_again_before_it_is_used() -> None:
    for _ in range(ROUNDS):
        x, plain = placed(X) + 0, X + 0
        results = []
        for y in (x, plain):
            row = y[0]
            before = row * 2
            y.mul_(3)
            results.append((before, row * 2, row.sum()))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got.to_torch(), want)


def test_autocast_and_the_default_dtype_are_asked_by_calls_that_come_again() -> None:
    x, w, n = placed(X), placed(W), placed(torch.arange(4))

    def both() -> tuple[Any, Any, Any]:
        y = x + 1
        return F.linear(y, w).dtype, (n + 1).mul(0.5).dtype, (y @ w).dtype

    for _ in range(ROUNDS):
        assert both() == (torch.float32,) * 3
        x.recorder.flush()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert both() == (torch.bfloat16, torch.float32, torch.bfloat16)
    x.recorder.flush()
    torch.set_default_dtype(torch.float64)
    try:
        assert both() == (torch.float32, torch.float64, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_function_mode_hears_of_calls_that_come_again() -> None:
    class Listens(TorchFunctionMode):
        heard: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            self.heard.append(func)
            return func(*args, **(kwargs or {}))

    x = placed(X)
    for _ in range(ROUNDS):
        (-(x + 1)).view(16).to(torch.float32).contiguous().to_torch()
    with Listens() as mode:
        (-(x + 1)).view(16).to(torch.float32).contiguous()
    names = [getattr(each, "__name__", "") for each in mode.heard]
    assert [name for name in names if name in ("add", "neg", "view", "to", "contiguous")] == [
        "add", "neg", "view", "to", "contiguous",
    ]  # fmt: skip


def test_explicit_redistribution_is_asked_by_calls_that_come_again() -> None:
    x, w = placed(X, 2, dtorch.Shard(0)), placed(W, 2, dtorch.Shard(1))
    for _ in range(ROUNDS):
        ((x * 2) + w).to_torch()
    with dtorch.explicit_redistribution(), pytest.raises(ShardingError, match="explicit"):
        (x * 2) + w


def test_an_operation_recorded_by_a_finalizer_in_the_middle_of_another_is_kept_apart() -> None:
    x, w, found = placed(X), placed(W), []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            found.append(w * 3 + 1)

    old = gc.get_threshold()
    try:
        for turn in range(30):
            gc.set_threshold(1 + turn % 3)
            Cycle()
            y = F.linear(x + 1, w)
            z = y.view(16) * 2
            torch.testing.assert_close(z.to_torch(), F.linear(X + 1, W).view(16) * 2)
    finally:
        gc.set_threshold(*old)
    gc.collect()
    assert found
    for each in found:
        torch.testing.assert_close(each.to_torch(), W * 3 + 1)


def test_threads_that_record_on_one_graph_hand_the_short_way_on() -> None:
    x = placed(X)
    errors: list[BaseException] = []

    def work(number: int, rounds: int) -> None:
        try:
            for _ in range(rounds):
                y = x
                for _ in range(20):
                    y = y * 0.5 + number
                want = X
                for _ in range(20):
                    want = want * 0.5 + number
                torch.testing.assert_close(y.to_torch(), want)
        except BaseException as error:  # noqa: BLE001  (shown by the assertion below)
            errors.append(error)

    for number in range(3):  # one after the other
        thread = threading.Thread(target=work, args=(number, 5))
        thread.start()
        thread.join()
        assert x.recorder.turn.owner == thread.ident
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number, 30)) for number in range(4)]  # at the same time
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors[0]
    work(0, 5)
    assert x.recorder.turn.owner == threading.get_ident()


def test_traces_longer_than_where_loops_are_looked_for_walk_edges_too(slow: list[Any]) -> None:
    x, w = placed(X), placed(W)
    for turn in range(ROUNDS):
        slow.clear()
        y = torch.relu(x)
        for _ in range(300):
            y = y * w + 1
        assert turn < 2 or len(slow) < 10
        y.to_torch()


def test_the_functions_said_to_be_cast_by_none_have_no_rule_of_autocast() -> None:
    for name in repeat.CAST_BY_NONE:
        packet = getattr(torch.ops.aten, {"__getitem__": "slice", "type": "to"}.get(name, name), None)
        if packet is None:
            assert name in ("float", "double", "half", "bfloat16"), name  # conversions
            continue
        for overload in packet.overloads():
            assert not torch_private.autocast_reaches(getattr(packet, overload)), (name, overload)


@pytest.mark.parametrize("name", overrides.OPERATORS)
def test_the_table_of_operators_says_what_torch_says(name: str) -> None:
    class Listens(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            return func

    tensor = torch.ones(2, 2).as_subclass(Listens)
    others = () if name == "__neg__" else (tensor,)
    assert getattr(torch.Tensor, name)(tensor, *others) is overrides.OPERATORS[name]


def test_who_enters_waits_for_the_owner_that_is_on_the_short_way() -> None:
    turn, entered = Turn(), threading.Event()
    for _ in range(IN_A_ROW):
        with turn:
            pass
    assert turn.owner == threading.get_ident()
    turn.busy = True

    def enter() -> None:
        with turn:
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.1) and turn.owner is None  # the owner sees on its next look that it is none any more
    turn.busy = False
    thread.join()
    assert entered.is_set()
