"""The pass manager: order, records, metadata of new nodes, and passes that misbehave."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from graph_building import GraphBuilder, aten, nodes_of, run_graph, same_bits
from torch.fx import GraphModule

from dtorch.errors import PassError, VerifyError
from dtorch.ir.layout import WHOLE, Split
from dtorch.ir.snapshot import take_snapshot
from dtorch.options import Options
from dtorch.passes.base import FunctionPass, Pass, PassContext
from dtorch.passes.manager import PassManager
from dtorch.passes.pipeline import PassPipeline, default_passes


def graph() -> GraphModule:
    b = GraphBuilder()
    x = b.input("x", 2, 4, spec=(WHOLE,))
    meta = {"spec": (WHOLE,)}
    one, two = (b.call(aten.cos.default, x, meta=meta) for _ in range(2))
    return b.done(b.call(aten.mul.Tensor, one, two, meta=meta))


def pass_of(function: object, name: str = "mine", **facts: object) -> Pass:
    return FunctionPass(name=name, function=function, **facts)


def manage(*passes: Pass, context: PassContext | None = None, limit: int | None = None) -> PassManager:
    return PassManager(PassPipeline(passes), context or PassContext(), limit)


def cos_to_sin(graph_module: GraphModule, context: PassContext) -> int:
    nodes = nodes_of(graph_module, aten.cos.default)
    for node in nodes:
        with graph_module.graph.inserting_before(node):
            new = graph_module.graph.call_function(aten.sin.default, node.args)
        node.replace_all_uses_with(new)
        graph_module.graph.erase_node(node)
    context.log("sines")
    return len(nodes)


def test_the_default_pipeline_keeps_results_and_records_each_pass() -> None:
    graph_module = graph()
    expected = run_graph(graph_module, torch.ones(2, 4))
    manager = PassManager(default_passes(), PassContext())
    assert manager.run(graph_module, "global") == 1
    assert [record.name for record in manager.records] == [p.name for p in default_passes() if p.level == "global"]
    record = next(record for record in manager.records if record.rewrites)
    assert (record.name, record.nodes_before, record.nodes_after) == ("common_subexpressions", 5, 4)
    assert record.collectives == Counter()
    assert record.peak_bytes == 64
    assert [snapshot.stage for snapshot in manager.snapshots] == ["common_subexpressions"]
    assert same_bits(graph_module(torch.ones(2, 4))[0], expected[0])  # its code was generated again


def test_new_nodes_get_their_metadata() -> None:
    graph_module = graph()
    manager = manage(pass_of(cos_to_sin))
    manager.run(graph_module, "global")
    new = nodes_of(graph_module, aten.sin.default)[0]
    assert tuple(new.meta["val"].shape) == (2, 4)
    assert new.meta["where"].endswith("line 2")
    assert new.meta["spec"] == (WHOLE,)
    assert new.meta["origin"] == ("mine", "cos_default")
    assert manager.records[0].messages == ("sines",)


def test_only_passes_of_the_level_run_and_in_order() -> None:
    seen: list[str] = []

    def note(name: str, **facts: object) -> Pass:
        return pass_of(lambda graph_module, context: seen.append(name) or 0, name, **facts)

    manage(note("b"), note("c", level="local"), note("a")).run(graph(), "global")
    assert seen == ["b", "a"]


def test_the_limit_counts_optional_passes_only_over_all_levels() -> None:
    passes = [pass_of(lambda g, c: 0, name, required=name == "needed") for name in ("a", "needed", "b")]
    manager = manage(*passes, pass_of(lambda g, c: 0, "late", level="local"), limit=1)
    manager.run(graph(), "global")
    manager.run(graph(), "local")
    assert [bool(record.skipped) for record in manager.records] == [False, False, True, True]


def test_the_numerics_budget_skips_optional_passes_but_not_a_users_callable() -> None:
    ran: list[str] = []
    passes = (
        pass_of(lambda g, c: ran.append("loose") or 0, "loose", numerics="approximate"),
        pass_of(lambda g, c: ran.append("needed") or 0, "needed", numerics="approximate", required=True),
    )
    pipeline = PassPipeline(passes).append(lambda graph_module: ran.append("callable"))
    manager = PassManager(pipeline, PassContext(numerics="bitwise"))
    manager.run(graph(), "global")
    assert ran == ["needed", "callable"]
    assert "approximate is beyond bitwise" in manager.records[0].skipped


def test_a_users_callable_need_not_count() -> None:
    def double(graph_module: GraphModule) -> None:
        cos_to_sin(graph_module, PassContext())

    manager = PassManager(PassPipeline().append(double), PassContext())
    assert manager.run(graph(), "global") > 0
    assert len(manager.snapshots) == 1


def test_dead_nodes_that_a_users_callable_leaves_are_removed() -> None:
    def read_the_input(graph_module: GraphModule) -> None:
        node = nodes_of(graph_module, aten.mul.Tensor)[0]
        node.args = (node.args[0].args[0], node.args[0].args[0])

    graph_module = graph()
    PassManager(PassPipeline().append(read_the_input), PassContext()).run(graph_module, "global")
    assert not nodes_of(graph_module, aten.cos.default)


def erase_quietly(graph_module: GraphModule, context: PassContext) -> int:
    cos_to_sin(graph_module, context)
    return 0


def change_an_operand_quietly(graph_module: GraphModule, context: PassContext) -> int:
    node = nodes_of(graph_module, aten.mul.Tensor)[0]
    node.args = (node.args[0], node.args[0])
    return 0


def place_quietly(graph_module: GraphModule, context: PassContext) -> int:
    nodes_of(graph_module, aten.mul.Tensor)[0].meta["spec"] = (Split(0),)
    return 0


@pytest.mark.parametrize("function", [erase_quietly, change_an_operand_quietly, place_quietly])
def test_a_pass_that_changes_the_graph_and_says_zero_is_caught(function: object) -> None:
    with pytest.raises(PassError, match='"mine".*changed .* but returned 0'):
        manage(pass_of(function)).run(graph(), "global")


@pytest.mark.parametrize("result", [None, True, "2", 1.0, -1])
def test_a_pass_that_does_not_return_a_count_is_caught(result: object) -> None:
    with pytest.raises(PassError, match="not the count of its rewrites"):
        manage(pass_of(lambda g, c: result)).run(graph(), "global")


def test_a_pass_that_raises_is_named_with_the_node_it_looked_at() -> None:
    def careless(graph_module: GraphModule, context: PassContext) -> int:
        node = nodes_of(graph_module, aten.mul.Tensor)[0]
        raise KeyError(f"no idea about {node.name}")

    with pytest.raises(PassError) as caught:
        manage(pass_of(careless)).run(graph(), "global")
    message = str(caught.value)
    assert '"mine" (global) raised KeyError' in message
    assert "looking at %mul_tensor = aten.mul.Tensor(%cos_default, %cos_default_1)" in message
    assert "model.py:4 in forward" in message
    assert "DTORCH_DUMP" in message
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_invalid_graph_is_an_error_that_names_the_pass_and_where_the_dump_is(tmp_path: Path) -> None:
    def shrink(graph_module: GraphModule, context: PassContext) -> int:
        nodes_of(graph_module, aten.mul.Tensor)[0].meta.pop("val")
        return 1

    def shrink_and_change(graph_module: GraphModule, context: PassContext) -> int:
        change_an_operand_quietly(graph_module, context)
        return shrink(graph_module, context)

    context = PassContext(options=Options(dump=str(tmp_path / "dumps")))
    with pytest.raises(VerifyError) as caught:
        manage(pass_of(shrink_and_change), context=context).run(graph(), "global")
    message = str(caught.value)
    assert '"mine"' in message and "model.py:4" in message
    dumped = tmp_path / "dumps" / "failed-mine.py"
    assert str(dumped) in message
    assert "aten.mul.Tensor(%cos_default, %cos_default)" in dumped.read_text()


def test_a_new_node_that_cannot_be_called_on_its_operands_is_an_error() -> None:
    def transpose_one(graph_module: GraphModule, context: PassContext) -> int:
        node = nodes_of(graph_module, aten.mul.Tensor)[0]
        with graph_module.graph.inserting_before(node):
            turned = graph_module.graph.call_function(aten.t.default, (node.args[0],))
            node.replace_all_uses_with(graph_module.graph.call_function(aten.add.Tensor, (turned, node.args[1])))
        return 1

    with pytest.raises(VerifyError, match="aten.add.Tensor cannot be called on its operands"):
        manage(pass_of(transpose_one)).run(graph(), "global")


def test_verification_can_be_switched_off() -> None:
    def break_it(graph_module: GraphModule, context: PassContext) -> int:
        change_an_operand_quietly(graph_module, context)
        nodes_of(graph_module, aten.mul.Tensor)[0].meta.pop("where")
        nodes_of(graph_module, aten.mul.Tensor)[0].meta["spec"] = (Split(9),)
        return 1

    manage(pass_of(break_it), context=PassContext(options=Options(verify=False))).run(graph(), "global")
    with pytest.raises(VerifyError):
        manage(pass_of(break_it)).run(graph(), "global")


def test_a_snapshot_rebuilds_the_graph_of_its_moment() -> None:
    graph_module = graph()
    before = take_snapshot(graph_module, "capture", "global")
    text = before.text()
    manager = PassManager(default_passes(), PassContext())
    manager.run(graph_module, "global")
    assert take_snapshot(before.graph_module(), "again", "global").text() == text
    assert manager.snapshots[-1].text() != text
    assert same_bits(before.graph_module()(torch.ones(2, 4))[0], graph_module(torch.ones(2, 4))[0])


def test_passes_that_change_nothing_leave_no_snapshots() -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 4, spec=(WHOLE,))
    x = b.call(aten.relu.default, x, meta={"spec": (WHOLE,)})
    manager = manage(*[pass_of(lambda g, c: 0, f"nothing{i}") for i in range(10)])
    manager.run(b.done(x), "global")
    assert len(manager.records) == 10 and not manager.snapshots
