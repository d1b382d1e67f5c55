"""Dead code: nodes and collectives without readers go, effects stay."""

import torch
from graph_building import GraphBuilder, aten, collectives, nodes_of

from dtorch.passes.base import PassContext
from dtorch.passes.dead_code import DeadCode, DeadCollectives


def test_chains_of_dead_nodes_go_and_inputs_stay() -> None:
    b = GraphBuilder()
    x, _ = b.input("x", 2, 2), b.input("unused", 2)
    b.call(aten.neg.default, b.call(aten.cos.default, x))
    graph_module = b.done(b.call(aten.relu.default, x))
    assert DeadCode().run(graph_module, PassContext()) == 2
    assert [node.op for node in graph_module.graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]
    assert DeadCode().run(graph_module, PassContext()) == 0


def test_what_writes_draws_or_checks_stays() -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 2)
    b.call(aten.bernoulli.default, x)
    b.call(aten.copy_.default, x, x)
    b.call(aten._assert_async.msg, b.call(aten.all.default, x), "positive")
    graph_module = b.done(x)
    assert DeadCode().run(graph_module, PassContext()) == 0


def test_dropout_that_is_off_may_go() -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 2)
    b.call(aten.dropout.default, x, 0.5, False)
    assert DeadCode().run(b.done(x), PassContext()) == 1


def test_a_dead_collective_goes_with_its_wait_and_what_fed_it() -> None:
    b = GraphBuilder({"tp": 2})
    x = b.input("x", 2, 2)
    b.collect("all_reduce", b.call(aten.neg.default, x), "sum", "tp")
    alive = b.collect("all_gather_into_tensor", x, 2, "tp")
    graph_module = b.done(alive)
    assert DeadCollectives().run(graph_module, PassContext((2,), ("tp",))) == 3
    assert not nodes_of(graph_module, collectives["all_reduce"])
    assert len(nodes_of(graph_module, collectives["wait_tensor"])) == 1


def test_unused_results_of_a_multi_output_op_go() -> None:
    b = GraphBuilder()
    x = b.input("x", 4, 2)
    halves = b.call(aten.split.Tensor, x, 2)
    first, _ = b.item(halves, 0), b.item(halves, 1)
    assert DeadCode().run(b.done(first), PassContext()) == 1
    assert isinstance(first.meta["val"], torch.Tensor)
