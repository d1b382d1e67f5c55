"""What a user sees of a compilation: dumps, graphs by stage, differences, the table of passes, the plan as JSON.

In: small models. Out: files and texts; a wrong name lists the right ones; a folder that cannot be written to is no
reason to stop.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import ZOO, llama, mlp
from null.agreement import assert_near, assert_same_bits, mesh_of

import dtorch
from dtorch.errors import DTorchError, InputError, PlanError
from dtorch.ir.plan import Plan
from dtorch.runtime.simulate import SimulatedRuntime

STAGES = ["capture", "propagate", "lower", "schedule"]


def called(*shape: int, **options: Any) -> Any:
    """A compiled MLP after one call."""
    model, args, _ = mlp()
    compiled = dtorch.compile(model, mesh_of(*shape), **options)
    compiled(*args)
    return compiled


# --- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_the_graph_at_every_stage_is_a_graph_module(stage: str) -> None:
    graph = called(2).graph(at=stage)
    assert isinstance(graph, torch.fx.GraphModule)
    graph.graph.lint()
    assert any(node.op == "call_function" for node in graph.graph.nodes)


def test_the_global_graph_has_logical_shapes_and_the_local_one_parts() -> None:
    compiled = called(2)
    before, after = compiled.graph_text("propagate"), compiled.graph_text("lower")
    assert "[128, 64]" in before.replace(",", ", ").replace("  ", " ") and "all_reduce" not in before
    assert "[64, 64]" in after.replace(",", ", ").replace("  ", " ") and "all_reduce" in after


def test_a_captured_graph_runs_and_gives_eagers_result() -> None:
    model, args, _ = mlp()
    compiled = called(2)
    graph = compiled.graph("capture")
    names = [item.target for item in compiled._last.compiled.traced.signature.inputs]
    tensors = dict(model.named_parameters())
    given = [tensors[name] if name in tensors else args[0] for name in names]
    with torch.no_grad():
        assert torch.equal(graph(*given)[0], model(*args))


def test_snapshots_are_pictures() -> None:
    compiled = called(2)
    text = compiled.graph_text("lower")
    graph = compiled.graph("lower")
    for node in reversed(list(graph.graph.nodes)):
        node.meta.clear()
    assert compiled.graph_text("lower") == text


def test_a_diff_shows_what_a_stage_did() -> None:
    compiled = called(2)
    text = compiled.diff("capture", "lower")
    assert any(line.startswith("+") and "all_reduce" in line for line in text.splitlines())
    assert text.startswith("--- ") and "\n+++ " in text
    assert not compiled.diff("lower", "lower").strip()


@pytest.mark.parametrize("look", [lambda c: c.graph(at="lowered"), lambda c: c.diff("capture", "lowered")])
def test_a_wrong_stage_lists_the_right_ones(look: Any) -> None:
    compiled = called(2)
    with pytest.raises(InputError) as caught:
        look(compiled)
    assert "lowered" in str(caught.value) and all(stage in str(caught.value) for stage in STAGES)


def test_the_table_of_passes_names_everything() -> None:
    compiled = called(2)
    table = compiled.passes()
    assert [each.name for each in table if each.name in STAGES] == STAGES
    assert table["lower"].collectives == {"all_reduce": 1}
    for record in table:
        assert record.level in ("global", "local", "scheduled", "plan")
        assert record.numerics in ("bitwise", "reassociates", "approximate") and record.time_ms >= 0
    assert table["capture"].time_ms > 0 and table["capture"].numerics == "bitwise"
    text = str(table)
    assert all(word in text for word in ["pass", "level", "numerics", "rewrites", "time", "peak", "collectives"])
    assert all(stage in text for stage in table.snapshots)
    for stage in table.snapshots:
        compiled.graph(at=stage)
    with pytest.raises(InputError, match="common_subexpressions"):
        table["common_subexpresions"]


def test_passes_and_graphs_are_of_the_program_last_used() -> None:
    model, args, _ = mlp()
    compiled = dtorch.compile(model, mesh_of(2))
    compiled(*args)
    first = compiled.graph_text("capture")
    compiled(args[0][:2])
    assert compiled.graph_text("capture") != first
    compiled(*args)
    assert compiled.graph_text("capture") == first


def test_user_passes_are_in_the_table_and_in_the_result() -> None:
    def halve(graph_module: torch.fx.GraphModule) -> int:
        for node in list(graph_module.graph.nodes):
            if node.target is torch.ops.aten.gelu.default:
                node.target = torch.ops.aten.relu.default
        return 1

    model, args, _ = mlp()
    compiled = dtorch.compile(model, mesh_of(2), passes=[halve])
    with torch.no_grad():
        wanted = model[2](torch.relu(model[0](*args)))
    assert_near(compiled(*args), wanted)
    assert compiled.passes()["halve"].rewrites == 1
    assert "relu" in compiled.diff("capture", "halve")


# --- dumps -----------------------------------------------------------------------------------------------------------


def assert_dumped(folder: Path) -> None:
    (made,) = folder.iterdir()
    summary = json.loads((made / "summary.json").read_text())
    assert summary["mesh"] == "mesh(tp=2)" and summary["title"] == "Sequential"
    files = [each["file"] for each in summary["stages"]]
    assert files and sorted(each.name for each in made.glob("*.py")) == sorted(files)
    assert [each["stage"] for each in summary["stages"]][0] == "capture"
    assert {each["name"] for each in summary["passes"]} >= set(STAGES)
    assert any("all_reduce" in (made / name).read_text() for name in files)


def test_dump_writes_every_stage(tmp_path: Path) -> None:
    called(2, dump=tmp_path / "made" / "here")
    assert_dumped(tmp_path / "made" / "here")


def test_the_option_dumps_too(tmp_path: Path) -> None:
    with dtorch.options.override(dump=str(tmp_path / "out")):
        called(2)
    assert_dumped(tmp_path / "out")


def test_the_environment_variable_dumps_too(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import torch, dtorch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()\n"
        "dtorch.compile(model, dtorch.init_device_mesh('cpu', (2,), mesh_dim_names=['tp']))(torch.ones(2, 4))\n"
    )
    environment = os.environ | {"DTORCH_DUMP": str(tmp_path / "out")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
    assert_dumped(tmp_path / "out")


def test_compilations_do_not_overwrite_each_other(tmp_path: Path) -> None:
    model, args, _ = mlp()
    compiled = dtorch.compile(model, mesh_of(2), dump=tmp_path)
    compiled(*args), compiled(args[0][:2]), compiled(*args)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(os.name != "posix", reason="paths of POSIX")
def test_a_folder_that_cannot_be_written_to_warns_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, args, _ = mlp()
    compiled = dtorch.compile(model, mesh_of(2), dump=tmp_path / "file")
    with pytest.warns(UserWarning, match="could not write the dumps"):
        found = compiled(*args)
    with torch.no_grad():
        assert_near(found, model(*args))


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(2)
    assert not list(tmp_path.iterdir())


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "cnn", "llama_cached", "mixtral", "t5_encoder"])
def test_a_plan_read_back_from_json_runs_equally(name: str, shape: tuple[int, ...]) -> None:
    model, args, kwargs = ZOO[name]()
    compiled = dtorch.compile(model, mesh_of(*shape))
    expected = compiled(*args, **kwargs)
    plan = compiled.plan()
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest and again.launch_digest == plan.launch_digest
    program = compiled._last
    program.loaded = SimulatedRuntime(plan.mesh_shape).load(again)
    assert_same_bits(compiled(*args, **kwargs), expected)


def test_equal_compilations_make_equal_plans() -> None:
    digests = {called(2, 2).plan().digest for _ in range(3)}
    assert len(digests) == 1
    assert called(2).plan().digest not in digests


def test_what_is_no_plan_is_refused() -> None:
    for text in ("", "{}", "[]", '{"format": 0}', '{"format": 1}'):
        with pytest.raises(PlanError):
            Plan.from_json(text)


def test_placements_are_public_ones() -> None:
    placed = called(2, 2).placements()
    assert placed["0.weight"] == (dtorch.Replicate(), dtorch.Shard(0))


def test_a_module_prints_what_it_is() -> None:
    model, args, _ = mlp()
    compiled = dtorch.compile(model, mesh_of(2))
    assert "Sequential on mesh(tp=2), 0 programs" in repr(compiled)
    compiled(*args)
    assert "1 programs" in repr(compiled)


def test_logs_tell_why_a_call_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    compiled = called(2)
    with caplog.at_level(logging.INFO, logger="dtorch.recompiles"):
        compiled(mlp()[1][0][:2])
    assert "shape (2, 7, 64), was (4, 7, 64)" in caplog.text


def test_errors_of_user_passes_name_the_pass() -> None:
    def broken(graph_module: torch.fx.GraphModule) -> int:
        raise ZeroDivisionError("oops")

    with pytest.raises((DTorchError, ZeroDivisionError), match="(?s)broken|oops"):
        called(2, passes=[broken])


def test_a_dump_of_a_llama_has_the_users_lines() -> None:
    model, _, kwargs = llama()
    compiled = dtorch.compile(model, mesh_of(2))
    compiled(**kwargs)
    assert "modeling_llama.py:" in compiled.graph_text("capture")
    assert "modeling_llama.py:" in compiled.graph_text("lower")
