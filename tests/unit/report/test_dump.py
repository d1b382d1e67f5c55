"""Graph text, dumps and diffs: readable, the same bytes every time, never in the way of the run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden_files import check_golden
from graph_building import GraphBuilder, aten, collectives
from torch.fx import GraphModule

from dtorch.errors import InputError
from dtorch.ir.layout import PENDING, WHOLE, Pending, Split
from dtorch.ir.ops import integer, keep_first, local_begin, local_size
from dtorch.ir.snapshot import take_snapshot
from dtorch.passes.base import PassContext
from dtorch.passes.manager import PassManager
from dtorch.passes.pipeline import default_passes
from dtorch.report.diff import diff_snapshots, find_snapshot
from dtorch.report.dump import fresh_directory, graph_text, write_dumps

AXES = {"dp": 2, "tp": 2}
R, S0, S1 = WHOLE, Split(0), Split(1)


def attention_graph() -> GraphModule:
    """A global graph with what text must show: constants, slices, lists, several results, placements, no-ops."""
    b = GraphBuilder(AXES)
    x = b.input("x", 2, 8, spec=(S0, R))
    w = b.input("w", 8, 8, dtype=torch.float32, spec=(R, S0))
    y = b.call(aten.linear.default, x, w, meta={"spec": (S0, S1)})
    same = b.call(aten.linear.default, x, w, meta={"spec": (S0, S1)})
    cast = b.call(aten.to.dtype, b.call(aten.view.default, y, [2, 8], meta={"spec": (S0, S1)}), torch.bfloat16,
                  meta={"spec": (S0, S1)})  # fmt: skip
    scaled = b.call(aten.mul.Tensor, same, -0.0, meta={"spec": (S0, Split(1, 1, 4))})
    whole = b.place(b.place(b.place(scaled, (S0, R)), (S0, R)), (R, R))
    turned = b.call(aten.permute.default, whole, [1, 0], meta={"spec": (R, R)})
    pair = b.call(aten.topk.default, turned, 1, dim=0, meta={"spec": ((R, R), (R, R))})
    partial = b.call(aten.sum.dim_IntList, x, [0], True, meta={"spec": (PENDING, R)})
    largest = b.call(aten.amax.default, x, [0], meta={"spec": (Pending("max"), R)})
    b.call(aten.neg.default, y, meta={"spec": (S0, S1)})
    return b.done(cast, b.item(pair, 0, spec=(R, R)), partial, largest, None)


def local_graph() -> GraphModule:
    b = GraphBuilder(AXES)
    x = b.input("x", 3, 8)
    rows = b.call(local_size, 5, ((1, 1, 0),))
    begin = b.call(local_begin, 5, ((1, 1, 0),))
    end = b.call(integer, "add", rows, begin)
    gathered = b.collect("all_gather_into_tensor", x, 2, "dp")
    part = b.call(aten.slice.Tensor, gathered, 0, begin, end)
    b.collect("all_reduce", part, "sum", "tp")
    return b.done(b.call(keep_first, part, 1), b.collect("all_to_all_single", x, [1, 2], [2, 1], "tp"))


def scheduled_graph() -> GraphModule:
    b = GraphBuilder(AXES)
    x = b.input("x", 2, 4, storage="argument")
    y = b.call(aten.relu.default, x, meta={"stream": "compute", "storage": "pool"})
    meta = {"stream": "comm:tp", "storage": "pool", "after": (y.name,)}
    started = b.call(collectives["all_reduce"], y, "sum", "tp", meta=meta)
    meta = {"stream": "compute", "storage": "output", "after": (started.name,)}
    return b.done(b.call(collectives["wait_tensor"], started, meta=meta))


GRAPHS = {"global": attention_graph, "local": local_graph, "scheduled": scheduled_graph}


@pytest.mark.parametrize("level", GRAPHS)
def test_the_text_of_each_level(level: str) -> None:
    check_golden(f"text_{level}.py", graph_text(GRAPHS[level](), level))


def test_what_the_default_passes_do() -> None:
    graph_module = attention_graph()
    snapshots = [take_snapshot(graph_module, "propagate", "global")]
    manager = PassManager(default_passes(), PassContext((2, 2), ("dp", "tp")))
    manager.run(graph_module, "global")
    snapshots += manager.snapshots
    text = "".join(diff_snapshots(*pair, context=1) for pair in zip(snapshots, snapshots[1:], strict=False))
    check_golden("default_passes.diff", text)


def test_the_text_has_no_addresses_and_is_equal_in_another_process() -> None:
    script = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "import test_dump as t\n"
        "print(''.join(t.graph_text(make(), level) for level, make in t.GRAPHS.items()), end='')"
    )
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", script, str(here), str(here.parents[1])],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    text = "".join(graph_text(make(), level) for level, make in GRAPHS.items())
    assert other.stdout == text
    assert "0x" not in text and "/home" not in text


def test_only_changed_stages_are_written_and_numbers_show_the_gaps(tmp_path: Path) -> None:
    graph_module = attention_graph()
    before = take_snapshot(graph_module, "capture", "global")
    same = take_snapshot(graph_module, "nothing changed", "global")
    PassManager(default_passes(), PassContext((2, 2), ("dp", "tp"))).run(graph_module, "global")
    after = take_snapshot(graph_module, "global passes: all", "global")
    written = write_dumps(tmp_path / "deep" / "er", [before, same, after], {"model": "Tiny", "mesh": (2, 2)})
    assert [path.name for path in written] == ["000-capture.py", "002-global_passes_all.py", "summary.json"]
    assert written[0].read_text() == before.text()
    summary = json.loads(written[-1].read_text())
    assert summary["model"] == "Tiny"
    assert [stage["file"] for stage in summary["stages"]] == ["000-capture.py", "002-global_passes_all.py"]


def test_a_dump_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="could not write the dumps"):
        assert write_dumps(tmp_path / "file", [take_snapshot(attention_graph(), "a", "global")], {}) == ()


def test_fresh_directories_do_not_collide(tmp_path: Path) -> None:
    paths = [fresh_directory(tmp_path / "dumps", "Tiny LM") for _ in range(3)]
    assert [path.name for path in paths] == ["Tiny_LM-000", "Tiny_LM-001", "Tiny_LM-002"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        fresh_directory(tmp_path / "file", "Tiny")


def test_a_diff_shows_only_the_nodes_that_a_pass_touched() -> None:
    graph_module = attention_graph()
    before = take_snapshot(graph_module, "before", "global")
    node = next(n for n in graph_module.graph.nodes if n.target is aten.neg.default)
    graph_module.graph.erase_node(node)
    after = take_snapshot(graph_module, "after", "global")
    changed = [line for line in diff_snapshots(before, after).splitlines() if line[0] in "+-"]
    assert changed[:2] == ["--- before", "+++ after"]
    assert [line.split(" = ")[0] for line in changed[2:]] == ["-# global graph, 17 nodes", "+# global graph, 16 nodes",
                                                              "-%neg_default"]  # fmt: skip
    assert diff_snapshots(before, before) == ""


def test_a_wrong_snapshot_name_lists_the_names() -> None:
    snapshots = [take_snapshot(attention_graph(), stage, "global") for stage in ("capture", "propagate", "capture")]
    assert find_snapshot(snapshots, "capture") is snapshots[2]
    with pytest.raises(InputError, match="Did you mean 'capture'.*Snapshots: capture, propagate"):
        find_snapshot(snapshots, "captured")
