"""`compile(dynamic=...)`: how often a model is captured when sizes vary, and that values are right at every size.

In: models called with tensors of varying sizes. Out: eager's results; captures counted by `cache_info()`.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from model_zoo import ZOO, token_ids
from null.agreement import assert_near, mesh_of
from torch import nn

import dtorch
from dtorch.compiled import captures as captures_module
from dtorch.errors import ShardingError

MESH = mesh_of(2)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.table = torch.arange(8.0)

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return x * self.table + self.down(torch.relu(self.up(x))) * scale


def agrees(compiled: Any, model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Compare with eager; how many captures there were so far."""
    with torch.no_grad():
        assert_near(compiled(*args, **kwargs), model(*args, **kwargs))
    return compiled.cache_info()["captures"]


def counted(model: nn.Module, calls: list[Any], **options: Any) -> list[int]:
    """Captures after each call."""
    compiled = dtorch.compile(model.eval(), MESH, **options)
    return [agrees(compiled, model, *(call if isinstance(call, tuple) else (call,))) for call in calls]


def sizes(*batches: int) -> list[torch.Tensor]:
    return [torch.randn(batch, 8) for batch in batches]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    dtorch.options.logger("recompiles")  # the first one in a process sets levels
    caplog.set_level(logging.INFO, logger="dtorch.recompiles")
    return lambda word: [each for each in (r.getMessage() for r in caplog.records) if word in each]


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was handed to torch.export."""
    seen: list[Any] = []
    original = captures_module.export_module

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["dynamic_shapes"])
        return original(*args, **kwargs)

    monkeypatch.setattr(captures_module, "export_module", watched)
    return seen


# --- how often --------------------------------------------------------------------------------------------------------


def test_the_second_size_is_the_last_that_needs_a_capture(told: Any) -> None:
    assert counted(Mixer(), sizes(4, 6, 8, 3, 5, 4, 100)) == [1, 2, 2, 2, 2, 2, 2]
    assert told("captured for") == ["Mixer: captured for any size of x [0]; further ones need no capture"]


def test_false_captures_each_size_and_true_the_first_for_all(exports: list[Any]) -> None:
    assert counted(Mixer(), sizes(4, 6, 8, 4), dynamic=False) == [1, 2, 3, 3] and exports == []
    assert counted(Mixer(), sizes(4, 6, 8, 4), dynamic=True) == [1, 1, 1, 1] and exports == [True]


def test_one_size_is_never_exported(exports: list[Any]) -> None:
    assert counted(Mixer(), sizes(4, 4, 4)) == [1, 1, 1] and exports == []


def test_only_dims_that_differed_are_open_and_another_one_is_opened_later(exports: list[Any]) -> None:
    calls = [torch.randn(*shape) for shape in ((4, 5, 8), (4, 6, 8), (4, 7, 8), (3, 9, 8), (5, 2, 8))]
    assert counted(Mixer(), calls) == [1, 2, 2, 3, 3]
    assert [list(each["x"]) for each in exports] == [[1], [0, 1]]


def test_plain_values_and_dtypes_are_kinds_of_their_own() -> None:
    calls: list[Any] = [(x, scale) for scale in (1.0, 0.5) for x in sizes(4, 6, 8)]
    assert counted(Mixer(), calls) == [1, 2, 2, 3, 4, 4]


def test_other_strides_of_a_size_are_captured_for_themselves() -> None:
    calls = [*sizes(4, 6), torch.randn(8, 5).t(), torch.randn(8, 7).t(), *sizes(9)]
    assert counted(Mixer(), calls) == [1, 2, 3, 3, 3]


def test_converted_weights_are_captured_again() -> None:
    model = nn.Sequential(nn.Embedding(128, 8), nn.Linear(8, 4)).eval()
    compiled = dtorch.compile(model, MESH)
    for length in (4, 6, 8):
        compiled(token_ids(2, length))
    model.double()
    compiled.double()
    assert [agrees(compiled, model, token_ids(2, length)) for length in (4, 6, 8)] == [3, 4, 4]


def test_parts_of_a_model_do_not_share_captures() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.other(self.one(x))

    model = Two().eval()
    for dynamic in (None, True):
        compiled = dtorch.compile(model, MESH, dynamic=dynamic)
        parts = compiled.part("one"), compiled.part("other")
        for x in sizes(4, 6, 8):
            agrees(compiled, model, x)
            agrees(parts[0], model.one, x)
            agrees(parts[1], model.other, x)


# --- right at every size ----------------------------------------------------------------------------------------------


def test_sizes_of_0_and_1_are_captured_for_themselves() -> None:
    assert counted(Mixer(), sizes(4, 1, 6, 0, 8, 1)) == [1, 2, 3, 4, 4, 4]
    assert counted(Mixer(), sizes(1, 4, 6, 0, 1)) == [1, 2, 2, 3, 3]


def test_what_broadcasts_at_size_1_is_right() -> None:
    class Outer(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return (x + y).squeeze(0)

    shapes = [(4, 4), (6, 6), (5, 1), (1, 5), (1, 1), (3, 3), (2, 1)]
    counted(Outer(), [(torch.randn(a, 8), torch.randn(b, 8)) for a, b in shapes])


@pytest.mark.parametrize("dynamic", [None, True])
def test_code_that_branches_on_sizes_is_right_on_both_sides(dynamic: bool | None) -> None:
    class Sides(nn.Module):
        def forward(self, x: Any) -> Any:
            if x.shape[0] > 5:
                return x * 2
            if x.shape[0] % 2:
                return x - 1
            return x + x.shape[0]

    counted(Sides(), sizes(2, 4, 3, 7, 6, 5, 9, 8), dynamic=dynamic)


def test_a_size_that_the_model_needs_as_a_number_stays_fixed_and_is_tried_once(told: Any, exports: list[Any]) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * float(int(x.shape[0]) ** 2)

    assert counted(Fixed(), sizes(4, 6, 8, 3)) == [1, 2, 3, 4]
    assert len(exports) == 1 and len(told("is captured for itself")) == 1


def test_numbers_in_results_are_those_of_the_call() -> None:
    class Counting(nn.Module):
        def forward(self, x: Any) -> Any:
            return {"sum": x.sum(), "n": x.shape[0], "shape": x.shape}

    model = Counting().eval()
    for options in ({}, {"dynamic": False}):
        compiled = dtorch.compile(model, MESH, **options)
        for x in sizes(4, 6, 8):
            found = compiled(x)
            assert (found["n"], found["shape"]) == (x.shape[0], x.shape) and type(found["n"]) is int


def test_a_model_that_reads_values_is_never_exported(exports: list[Any]) -> None:
    class Branching(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2 if x.sum() > 0 else x - 1

    model = Branching().eval()
    compiled = dtorch.compile(model, MESH)
    for x in sizes(4, 6, 8):
        agrees(compiled, model, x.abs())
        agrees(compiled, model, -x.abs())
    assert exports == []


def test_what_torch_export_cannot_do_is_captured_size_by_size(told: Any, exports: list[Any]) -> None:
    class Listed(nn.Module):
        def forward(self, x: Any) -> Any:
            if torch.compiler.is_exporting():
                raise RuntimeError("not here")
            return x.cumsum(0)

    assert counted(Listed(), sizes(4, 6, 8, 6)) == [1, 2, 3, 3]
    assert len(exports) == 1 and len(told("is captured for itself")) == 1


def test_a_symbolic_capture_that_cannot_be_placed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dtorch.CompiledModule._build_program

    def build(self: Any, traced: Any, flat: Any) -> Any:
        if self._captures._kinds and any(kind.symbolic for kind in self._captures._kinds.values()):
            raise ShardingError("no")
        return original(self, traced, flat)

    monkeypatch.setattr(dtorch.CompiledModule, "_build_program", build)
    assert counted(Mixer(), sizes(4, 6, 8)) == [1, 3, 4]


def test_sizes_that_no_capture_holds_for_end_in_captures_of_each(exports: list[Any]) -> None:
    class Steps(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * (x.shape[0] // 4) if x.shape[0] % 4 else x + 1 if x.shape[0] % 3 else x - float(x.shape[0] > 20)

    counted(Steps(), sizes(4, 5, 8, 12, 24, 13, 16, 36, 48))
    assert len(exports) <= captures_module.EXPORTS


@pytest.mark.parametrize("how", ["in place", "replaced", "with an attribute"])
def test_buffers_and_arguments_that_are_written_are_written_at_every_size(how: str) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(8))
            self.last = 0

        def forward(self, x: Any, out: dict[str, Any]) -> Any:
            if how == "replaced":
                self.total = self.total + x.sum(0)
            else:
                self.total += x.sum(0)
            if how == "with an attribute":
                self.last = x.shape[0]
            out["x"].add_(1)
            out["new"] = x * 2
            return x + self.total

    model, twin = Writing().eval(), Writing().eval()
    compiled = dtorch.compile(model, MESH)
    for x in sizes(4, 6, 8, 3):
        first, second = {"x": torch.zeros(3)}, {"x": torch.zeros(3)}
        with torch.no_grad():
            assert_near(compiled(x, first), twin(x, second))
        assert torch.equal(first["x"], second["x"]) and torch.equal(first["new"], second["new"])
        assert torch.allclose(compiled.state_dict()["total"], twin.total, atol=1e-5)
    assert compiled.cache_info()["captures"] == (2 if how == "in place" else 4)


def test_a_state_that_only_some_sizes_set_is_not_hidden_in_a_symbolic_capture() -> None:
    class Longest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.longest = 5

        def forward(self, x: Any) -> Any:
            if x.shape[0] > self.longest:
                self.longest = x.shape[0]
            return x / self.longest

    compiled = dtorch.compile(Longest().eval(), MESH)
    for x in sizes(4, 6, 8, 3):
        assert torch.allclose(compiled(x), x / max(5, x.shape[0]))
    assert compiled.cache_info()["captures"] == 4


def test_replacing_a_buffer_is_refused_where_sizes_are_to_be_symbolic() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(8))

        def forward(self, x: Any) -> Any:
            self.total = self.total + x.sum(0)
            return self.total

    with pytest.raises(dtorch.errors.CaptureError, match="replaces total.*dynamic=False"):
        dtorch.compile(Replacing().eval(), MESH, dynamic=True)(sizes(4)[0])


# --- models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "t5_encoder"])
def test_models_are_captured_twice_for_all_batches_and_lengths(name: str) -> None:
    model, _, kwargs = ZOO[name](torch.float32 if name == "mixtral" else torch.float64)
    compiled = dtorch.compile(model, MESH)
    made = []
    for batch, length in ((2, 16), (3, 24), (2, 7), (5, 12)):
        call = {**kwargs, "input_ids": token_ids(batch, length)}
        if "attention_mask" in kwargs:
            call["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
        made.append(agrees(compiled, model, **call))
    assert made == [1, 2, 2, 2]


def test_a_growing_cache_is_captured_for_every_length() -> None:
    from transformers import DynamicCache

    model, _, _ = ZOO["llama"](torch.float64)
    compiled = dtorch.compile(model, MESH)
    mine, eager = DynamicCache(config=model.config), DynamicCache(config=model.config)
    made = []
    for length in (5, 2, 2, 2, 2, 2):
        ids = token_ids(2, length)
        with torch.no_grad():
            found = compiled(input_ids=ids, past_key_values=mine, use_cache=True)
            wanted = model(input_ids=ids, past_key_values=eager, use_cache=True)
        assert_near(found.logits, wanted.logits)
        assert found.past_key_values is mine and mine.get_seq_length() == eager.get_seq_length()
        made.append(compiled.cache_info()["captures"])
    assert made == [1, 2, 3, 3, 3, 3]
