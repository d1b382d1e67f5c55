"""Segments of eager code, looked at as compiled modules are: graphs, differences, tables, dumps, the recompiles log.

In: a few operations on a Graph of their own. Out: what `graph.segments()`, DTORCH_DUMP and DTORCH_LOGS show of them.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import InputError

MESH = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])


def rows(count: int = 4) -> Any:
    return dtorch.distribute_tensor(torch.ones(count, 3), MESH, [Shard(0)])


def work(x: Any, n: int = 1, extra: Callable[[Any], Any] = lambda x: x) -> Any:
    scaled = x * 2
    return (extra(scaled) + n).sum()


def one_segment() -> Any:
    with dtorch.Graph() as graph:
        assert work(rows()).item() == 36
    (segment,) = graph.segments()
    return segment


# --- looking ---------------------------------------------------------------------------------------------------------


def test_a_segment_shows_what_a_compiled_module_shows() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return work(x)

    compiled = dtorch.compile(Model(), MESH)
    compiled(torch.ones(4, 3))
    segment = one_segment()
    for name in ("passes", "graph", "graph_text", "diff", "plan", "placements"):
        assert callable(getattr(compiled, name)) and callable(getattr(segment, name))
    stages = ["capture", "lower", "schedule"]
    assert list(segment.passes().snapshots) == [*stages, "reuse_in_place"]
    assert set(stages) <= {record.name for record in segment.passes()} <= {each.name for each in compiled.passes()}
    assert type(segment.plan()) is type(compiled.plan()) and str(segment.passes()).startswith("pass ")


def test_the_graph_at_every_stage_is_a_graph_module() -> None:
    segment = one_segment()
    for stage in segment.passes().snapshots:
        graph = segment.graph(at=stage)
        assert isinstance(graph, torch.fx.GraphModule)
        graph.graph.lint()
    assert segment.graph("capture")(torch.ones(4, 3))[0].item() == 36
    assert "f32[4, 3] [S(0)]" in segment.graph_text("capture") and "f32[2, 3]" in segment.graph_text("lower")
    difference = segment.diff("capture", "lower")
    assert difference.startswith("--- capture\n+++ lower\n") and "-# global graph" in difference
    with pytest.raises(InputError, match="(?s)'lower'.*capture, lower, schedule"):
        segment.graph("lowered")


def test_placements_are_public_ones_of_what_comes_in_and_goes_out() -> None:
    assert one_segment().placements() == {"in0": (Shard(0),), "sum_default": (Partial("sum"),)}


def test_a_segment_knows_the_lines_it_was_recorded_from() -> None:
    segment = one_segment()
    first, second = segment.lines()
    assert first.endswith("in work: scaled = x * 2") and "test_segments.py:" in first
    assert second.endswith("in work: return (extra(scaled) + n).sum()")
    assert segment.steps == 3 and "on mesh(tp=2): 3 steps, " in repr(segment)


def test_only_the_last_segments_are_kept_and_numbers_go_on() -> None:
    with dtorch.Graph() as graph:
        x = rows()
        for n in range(70):
            work(x, n).item()
            work(x, n).item()  # found again: no segment of its own
    numbers = [segment.number for segment in graph.segments()]
    assert numbers == list(range(6, 70))
    assert ", 69)" in graph.segments()[-1].graph_text("capture")


# --- dumps -----------------------------------------------------------------------------------------------------------


def read_dumps(folder: Path) -> dict[str, Any]:
    return {each.name: json.loads((each / "summary.json").read_text()) for each in sorted(folder.iterdir())}


def test_the_option_dumps_every_segment_into_a_folder_of_its_own(tmp_path: Path) -> None:
    with dtorch.Graph() as graph, dtorch.options.override(dump=str(tmp_path)):
        work(rows()).item()
        work(rows()).item()
        work(rows(), 2).item()
    found = read_dumps(tmp_path)
    assert list(found) == ["segment-000", "segment-001"]
    for segment, (name, summary) in zip(graph.segments(), found.items(), strict=True):
        assert summary["mesh"] == "mesh(tp=2)" and summary["plan"] == segment.plan().digest
        assert (summary["number"], summary["steps"]) == (segment.number, 3)
        assert summary["lines"] == list(segment.lines())
        files = {each["stage"]: each["file"] for each in summary["stages"]}
        assert list(files) == list(segment.passes().snapshots)
        assert sorted(each.name for each in (tmp_path / name).glob("*.py")) == sorted(files.values())
        for stage, file in files.items():
            assert (tmp_path / name / file).read_text() == segment.graph_text(stage)
        assert {"capture", "lower", "schedule", "emit"} <= {each["name"] for each in summary["passes"]}


def test_segments_of_two_graphs_do_not_overwrite_each_other(tmp_path: Path) -> None:
    with dtorch.options.override(dump=str(tmp_path)):
        for _ in range(2):
            with dtorch.Graph():
                work(rows()).item()
    assert [summary["number"] for summary in read_dumps(tmp_path).values()] == [0, 0]


def test_options_hold_for_what_was_recorded_under_them_on_whatever_thread_it_is_compiled(tmp_path: Path) -> None:
    compiled_on = []
    with dtorch.Graph() as graph:
        journal_add = graph.controller.journal.add

        def add(trace: Any, compiled: Any) -> None:
            compiled_on.append(threading.current_thread())
            journal_add(trace, compiled)

        graph.controller.journal.add = add
        with dtorch.options.override(dump=str(tmp_path)):
            future = work(rows()).to_torch_async()
            while not future.is_ready():  # wait() would run it on this thread
                pass
        work(rows(), 2).item()  # recorded outside: not dumped
    assert compiled_on[0] is not threading.current_thread()
    assert list(read_dumps(tmp_path)) == ["segment-000"] and len(graph.segments()) == 2


def test_a_folder_that_cannot_be_written_to_warns_and_the_value_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with dtorch.Graph(), dtorch.options.override(dump=str(tmp_path / "file")):
        with pytest.warns(UserWarning, match="could not write the dumps"):
            assert work(rows()).item() == 36


# --- the log ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """Runs something on a fresh graph; what the recompiles log said, a line a segment."""

    def run(code: Callable[[], None]) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="dtorch.recompiles"), dtorch.Graph():
            code()
        return [record.getMessage() for record in caplog.records if record.name == "dtorch.recompiles"]

    return run


def test_the_log_names_number_steps_and_lines(told: Any) -> None:
    (line,) = told(lambda: [work(rows()).item() for _ in range(3)])
    assert line.startswith("segment 0: 3 steps, ") and line.endswith("the first of its graph")
    first, last = line.split(" to ")
    assert "test_segments.py:" in first and "scaled = x * 2" in first
    assert "test_segments.py:" in last and "return (extra(scaled) + n).sum()" in last


@pytest.mark.parametrize(
    ("again", "why"),
    [
        (
            lambda: work(rows(), 2).item(),
            r"unlike segment 0 in .*aten.add.Tensor\(%x0, 2\).*was .*\(%x0, 1\).*\.py:\d+",
        ),
        (lambda: work(rows(2)).item(), r"in an input f32\[2, 3\] \[S\(0\)\], which was an input f32\[4, 3\]"),
        (
            lambda: work(rows().redistribute(placements=[Replicate()])).item(),
            r"unlike segment 0 in redistribute \[S\(0\)\] to \[R\], which was .*aten.mul",
        ),
        (lambda: work(rows(), 1, torch.relu).item(), r"unlike segment 0 in .*aten.relu.*which was .*aten.add"),
        (lambda: (work(rows()) * 3).item(), r"goes on where segment 0 ended, with .*aten.mul.Tensor\(%x0, 3\)"),
        (lambda: (rows() * 2).to_torch(), r"ends where segment 0 goes on with .*aten.add"),
        (lambda: torch.softmax(rows(), -1).to_torch(), r"; first time seen$"),
    ],
    ids=["number", "shape", "placement", "operation", "longer", "shorter", "new"],
)
def test_the_log_tells_what_is_new(told: Any, again: Callable[[], Any], why: str) -> None:
    def code() -> None:
        work(rows()).item()
        again()

    line = told(code)[-1]
    assert line.startswith("segment 1: ") and re.search(why, line), line


def test_the_log_tells_of_equal_steps_with_other_results(told: Any) -> None:
    def code() -> None:
        for keep in (True, False):
            scaled = rows() * 2
            total = scaled.sum()
            if not keep:
                del scaled
            total.item()

    line = told(code)[-1]
    assert "the steps of segment 0 for other results: 1 (test_segments.py:" in line and "which were 2 (" in line


def test_the_log_compares_with_the_nearest_segment(told: Any) -> None:
    def code() -> None:
        work(rows()).item()
        work(rows(), 1, torch.relu).item()
        torch.softmax(rows(), -1).to_torch()
        work(rows(), 5, torch.relu).item()

    assert "unlike segment 1 in " in told(code)[-1]
