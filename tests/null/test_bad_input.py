"""Bad input: the error's class, what its message names, and that nothing is half done afterwards.

In: every mistake of which a user should be told. Out: an error of `dtorch.errors` that says what, where, why and
what next; the module (or a new one) works afterwards.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import llama, noise
from null.agreement import assert_near, mesh_of
from torch import nn

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard
from dtorch.errors import (
    CaptureError,
    DataDependentError,
    DTorchError,
    InputError,
    MeshError,
    PlacementError,
    ShardingError,
    ShardingWarning,
    UnsupportedError,
)
from dtorch.ir.spec import from_spec


class Two(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 4) → (rows, 4)."""
        return self.second(torch.relu(self.first(x)))


X = noise(3, 4)


def two(**options: Any) -> Any:
    return dtorch.compile(Two().eval(), options.pop("mesh", mesh_of(2)), **options)


def assert_works(compiled: Any) -> None:
    with torch.no_grad():
        assert_near(compiled(X), Two().eval()(X))


def line_of(function: Any, text: str) -> str:
    """`file.py:N` of the line in a function's source that holds a text: what messages must name."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return f"test_bad_input.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


# --- meshes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DeviceMesh("cpu", [0, 1, 1]), ["[1]", "more than once"]),
        (lambda: DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=["tp", "tp"]), ["'tp'", "more than once"]),
        (lambda: dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=["tp"]), ["1 mesh_dim_names", "(2, 2)"]),
        (lambda: dtorch.init_device_mesh("cpu", (0,)), ["positive"]),
        (lambda: dtorch.init_device_mesh("gpu", (2,)), ["'gpu'", "cuda"]),
        (lambda: mesh_of(2)["dp"], ["'dp'", "'tp'"]),
    ],
)
def test_a_mesh_that_cannot_be(make: Any, words: list[str]) -> None:
    with pytest.raises(MeshError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_mesh_of_devices_that_are_not_there() -> None:
    with pytest.raises(MeshError, match="no 'cuda' device"):
        dtorch.init_device_mesh("cuda", (2,))


# --- placements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["placements", "inputs"])
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([Shard(0), Shard(1)], ["2 placements", "mesh(tp=2)"]),
        ({"dp": Shard(0)}, ["'dp'", "'tp'"]),
        ({"tp": 0}, ["Shard(0)"]),
        ({"tp": Shard}, ["parentheses"]),
        ({"tp": Partial()}, ["Partial"]),
        ("tp", ["list"]),
    ],
    ids=str,
)
def test_placements_that_fit_no_mesh(what: str, asked: Any, words: list[str]) -> None:
    name = "first.weight" if what == "placements" else "x"
    with pytest.raises(PlacementError) as caught:
        two(**{what: {name: asked}})
    assert all(word in str(caught.value) for word in [*words, name]), str(caught.value)


def test_a_pin_beyond_the_rank_of_a_weight() -> None:
    with pytest.raises(PlacementError) as caught:
        two(placements={"first.bias": {"tp": Shard(1)}})
    assert "first.bias" in str(caught.value) and "Shard(1)" in str(caught.value) and "Shard(0)" in str(caught.value)


def test_a_pin_beyond_the_rank_of_an_input() -> None:
    compiled = two(inputs={"x": {"tp": Shard(2)}})
    with pytest.raises(PlacementError) as caught:
        compiled(X)
    assert "x" in str(caught.value) and "Shard(2)" in str(caught.value)


def test_a_pin_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(PlacementError) as caught:
        two(placements={"frist.weight": {"tp": Shard(0)}, "second.weight": {"tp": Shard(1)}, "zzz": {"tp": Shard(0)}})
    text = str(caught.value)
    assert "'frist.weight'" in text and "first.weight" in text and "'zzz'" in text and "second.weight'" not in text


def test_placements_of_inputs_count_from_the_end_too() -> None:
    compiled = two(inputs={"x": {"tp": Shard(-1)}})
    assert_works(compiled)
    (given,) = [item for item in compiled.plan().inputs if item.kind == "user"]
    assert from_spec(given.spec) == (Shard(1),)


@pytest.mark.parametrize("given", [[Shard(0)], Shard(0), "first.weight"], ids=str)
@pytest.mark.parametrize("what", ["placements", "inputs"])
def test_placements_that_name_nothing_are_refused(what: str, given: Any) -> None:
    with pytest.raises(PlacementError, match=f"{what} must be a dict"):
        two(**{what: given})


def test_an_input_that_forward_does_not_have() -> None:
    with pytest.raises(PlacementError, match="inputs.*'y'"):
        two(inputs={"y": {"tp": Shard(0)}})


def test_an_input_that_kwargs_would_take_is_refused_when_it_is_nearly_an_argument() -> None:
    model = llama()[0]
    with pytest.raises(PlacementError, match="'input_idz' .nearest: input_ids"):
        dtorch.compile(model, mesh_of(2), inputs={"input_idz": {"tp": Shard(0)}})
    with pytest.raises(PlacementError, match="inputs must be a dict"):
        dtorch.compile(model, mesh_of(2), inputs=[Shard(0)])


def test_a_mesh_without_names_takes_lists_only() -> None:
    with pytest.raises(PlacementError, match="mesh_dim_names"):
        two(mesh=mesh_of(2, names=None), placements={"first.weight": {"tp": Shard(0)}})


# --- arguments of compile --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp_size": 2}, ["tp_size", "axis named tp"]),
        ({"tensor_parallel_size": 2}, ["axis named tp"]),
        ({"ulysses_degree": 2}, ["ulysses_cp"]),
        ({"plan": {}}, ["placements="]),
        ({"placement": {}}, ["placements"]),
        ({"wieghts": {}}, ["weights"]),
        ({"mode": "fast"}, ["'fast'", "default"]),
    ],
    ids=str,
)
def test_arguments_that_compile_does_not_have(options: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        two(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("numerics", ["exact", "Bitwise", 3])
def test_numerics_that_are_not_known(numerics: Any) -> None:
    with pytest.raises(DTorchError, match="bitwise"):
        two(numerics=numerics)


def test_check_is_not_there_yet() -> None:
    with pytest.raises(UnsupportedError, match="check"):
        two(check=True)


@pytest.mark.parametrize("model", [lambda x: x, 3, Two], ids=["function", "number", "class"])
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match="torch.nn.Module"):
        dtorch.compile(model, mesh_of(2))


@pytest.mark.parametrize("mesh", [(2,), 2, "cpu", None], ids=str)
def test_what_is_no_mesh_is_refused(mesh: Any) -> None:
    with pytest.raises(InputError, match="init_device_mesh"):
        dtorch.compile(Two().eval(), mesh)


def test_a_compiled_module_is_not_compiled_again() -> None:
    with pytest.raises(InputError, match="compiled already"):
        dtorch.compile(two(), mesh_of(2))


# --- training mode ---------------------------------------------------------------------------------------------------


def test_training_mode_with_dropout_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    with pytest.raises(InputError) as caught:
        dtorch.compile(model, mesh_of(2))
    assert "training mode" in str(caught.value) and "1" in str(caught.value) and "model.eval()" in str(caught.value)
    compiled = dtorch.compile(model.eval(), mesh_of(2))
    with torch.no_grad():
        assert_near(compiled(X), model(X))


def test_training_mode_without_randomness_is_taken() -> None:
    model = Two()
    assert model.training
    with torch.no_grad():
        assert_near(dtorch.compile(model, mesh_of(2))(X), model(X))


def test_dropout_called_as_a_function_in_training_mode_is_refused() -> None:
    class Functional(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, 0.5, self.training)

    with pytest.raises(DTorchError, match=r"(?s)eval\(\)"):
        dtorch.compile(Functional(), mesh_of(2))(X)


# --- inputs of a call ------------------------------------------------------------------------------------------------


def test_other_shapes_dtypes_and_values_compile_again() -> None:
    model = Two().eval()
    compiled = dtorch.compile(model, mesh_of(2))
    for x in (X, noise(5, 4), noise(2, 3, 4), noise(4)):
        with torch.no_grad():
            assert_near(compiled(x), model(x))
    assert compiled.cache_info()["captures"] == 4


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (noise(3, 5), ["[3, 5]"]),
        (X.double(), ["double", "float"]),
        (torch.ones(3, 4, dtype=torch.long), ["long", "float"]),
    ],
    ids=["shape", "dtype", "integers"],
)
def test_an_input_that_the_model_cannot_take_fails_at_the_models_line(x: torch.Tensor, words: list[str]) -> None:
    compiled = two()
    assert_works(compiled)
    with pytest.raises(RuntimeError) as caught:
        compiled(x)
    frames = {f"{Path(str(each.path)).name}:{each.lineno + 1}" for each in caught.traceback}
    # What metadata shows fails while the forward is recorded, what only a kernel sees when the plan runs: then the
    # message has the line.
    line = line_of(Two.forward, "return")
    assert line in frames or line in str(caught.value)
    assert all(word in str(caught.value).lower() for word in words), str(caught.value)
    assert_works(compiled)
    assert compiled.cache_info()["programs"] == 1


def test_an_input_on_another_device_is_named() -> None:
    compiled = two()
    with pytest.raises(InputError) as caught:
        compiled(torch.empty(3, 4, device="meta"))
    assert "x" in str(caught.value) and "meta" in str(caught.value) and "cpu" in str(caught.value)
    assert_works(compiled)


@pytest.mark.parametrize("call", [lambda f: f(), lambda f: f(X, X), lambda f: f(y=X)])
def test_a_call_that_forward_does_not_take_is_a_type_error(call: Any) -> None:
    compiled = two()
    with pytest.raises(TypeError):
        call(compiled)
    assert_works(compiled)


def test_a_recorded_symbol_is_no_input() -> None:
    compiled = two()
    with pytest.raises(DTorchError):
        compiled(next(iter(compiled.parameters())))
    assert_works(compiled)


def test_nothing_to_look_at_before_the_first_call() -> None:
    compiled = two()
    for look in (compiled.passes, compiled.graph, compiled.plan, compiled.placements):
        with pytest.raises(InputError, match="call the module once"):
            look()


# --- ops without a rule ----------------------------------------------------------------------------------------------

library = torch.library.Library("dtorch_test_bad_input", "DEF")
library.define("unknown(Tensor x) -> Tensor")
library.impl("unknown", lambda x: x.flip(0) * 2, "CompositeExplicitAutograd")
torch.library.register_fake("dtorch_test_bad_input::unknown", lambda x: torch.empty_like(x))


class Unknown(nn.Module):
    """An op that nobody wrote a rule for, between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 4) → (rows, 4)."""
        inner = torch.relu(self.first(x))
        inner = torch.ops.dtorch_test_bad_input.unknown(inner)
        return self.second(inner)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
def test_an_op_without_a_rule_runs_whole_with_a_warning(shape: tuple[int, ...]) -> None:
    model = Unknown().eval()
    with pytest.warns(ShardingWarning) as caught:
        compiled = dtorch.compile(model, mesh_of(*shape))
        result = compiled(X)
    with torch.no_grad():
        assert_near(result, model(X))
    (text,) = {str(each.message) for each in caught if each.category is ShardingWarning}
    assert "dtorch_test_bad_input" in text and "unknown" in text and "register_sharding_rule" in text
    assert line_of(Unknown.forward, "ops.") in text, text
    assert any(unit in text for unit in (" B", "KiB", "MiB", "bytes")), text


def test_an_op_without_a_rule_is_no_matter_on_one_device() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardingWarning)
        dtorch.compile(Unknown().eval(), mesh_of(1))(X)


def test_a_rule_of_the_users_own_is_used() -> None:
    other = torch.library.Library("dtorch_test_own_rule", "DEF")
    other.define("double(Tensor x) -> Tensor")
    other.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("dtorch_test_own_rule::double", lambda x: torch.empty_like(x))
    dtorch.register_sharding_rule("dtorch_test_own_rule::double", "... -> ...")

    class Own(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.ops.dtorch_test_own_rule.double(torch.relu(self.first(x))))

    model = Own().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardingWarning)
        compiled = dtorch.compile(model, mesh_of(2))
        with torch.no_grad():
            assert_near(compiled(X), model(X))
    assert sum(each.kernel.startswith("_c10d") for each in compiled.plan().instructions) == 2  # one, and its wait


def test_a_malformed_rule_is_refused() -> None:
    with pytest.raises(ShardingError):
        dtorch.register_sharding_rule("aten::relu", "a b")


# --- what a graph cannot hold ----------------------------------------------------------------------------------------


class Branching(Two):
    """Branches on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 4) → (rows, 4)."""
        if x.sum() > 0:
            x = x + 1
        return super().forward(x)


def test_strict_names_the_line_that_branches_on_a_value() -> None:
    compiled = dtorch.compile(Branching().eval(), mesh_of(2), strict=True)
    with pytest.raises(DataDependentError) as caught:
        compiled(X)
    text = str(caught.value)
    assert line_of(Branching.forward, "if x.sum") in text, text
    assert "torch.where" in text or "strict" in text, text
    assert compiled.cache_info()["programs"] == 0


def test_dynamic_sizes_name_the_line_that_branches_on_a_value() -> None:
    compiled = dtorch.compile(Branching().eval(), mesh_of(2), dynamic=True)
    with pytest.raises(DataDependentError) as caught:
        compiled(X)
    number = line_of(Branching.forward, "if x.sum").partition(":")[2]
    assert f'test_bad_input.py", line {number}' in str(caught.value) and "dynamic=False" in str(caught.value)
    assert compiled.cache_info()["programs"] == 0


def test_an_exception_of_the_model_comes_through_as_itself() -> None:
    class Picky(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 13:
                raise LookupError("thirteen")
            return super().forward(x)

    compiled = dtorch.compile(Picky().eval(), mesh_of(2))
    with pytest.raises(LookupError, match="thirteen"):
        compiled(noise(13, 4))
    assert_works(compiled)


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x[0, :1]])
            return self.seen.sum() + x

    compiled = dtorch.compile(Growing().eval(), mesh_of(2))
    with pytest.raises(CaptureError, match="seen"):
        compiled(X)


def test_the_model_is_as_it_was_after_a_failed_compile() -> None:
    model, _, kwargs = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PlacementError):
        dtorch.compile(model, mesh_of(2), placements={"nothing": {"tp": Replicate()}}, release=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert_near(dtorch.compile(model, mesh_of(2))(**kwargs), model(**kwargs))


def test_a_module_that_is_distributed_already_is_not_compiled():
    mesh = mesh_of(2)
    model = dtorch.distribute_module(nn.Sequential(nn.Linear(4, 6)), mesh)
    with pytest.raises(InputError, match=r"0\.weight is a dtorch\.Tensor already.*distribute_module"):
        dtorch.compile(model, mesh)


def test_dynamic_takes_three_values():
    with pytest.raises(InputError, match="dynamic='yes'.*None, True, False"):
        dtorch.compile(nn.Linear(4, 6).eval(), mesh_of(2), dynamic="yes")


def test_one_star_stays_within_a_name_and_two_cross_dots():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 6)), nn.Linear(6, 4)).eval()
    placed = dtorch.compile(model, mesh_of(2), placements={"*.weight": {"tp": Shard(1)}, "**.bias": {"tp": Shard(0)}})
    placed(torch.ones(2, 4))
    found = placed.placements()
    assert found["1.weight"] == (Shard(1),) and found["0.0.bias"] == found["1.bias"] == (Shard(0),)
    with pytest.raises(PlacementError, match=r"\*\*\.q_proj"):
        dtorch.compile(model, mesh_of(2), placements={"*.*.*.weight": {"tp": Shard(1)}})
