"""Live ranges: shared memory, collectives' operands, tuples, and the peak against a slow oracle."""

import random
import sys

import torch
from graph_building import GraphBuilder, aten, collectives, nodes_of
from torch.fx import Graph

from dtorch.ir.liveness import live_ranges, peak_bytes

TENSOR = 2 * 4 * 4  # bytes of f32[2, 4]


def test_a_chain_holds_two_values_at_a_time_and_arguments_do_not_count() -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 4)
    for _ in range(5):
        x = b.call(aten.relu.default, x)
    graph = b.done(x).graph
    assert live_ranges(graph).curve_bytes() == [0, TENSOR, *[2 * TENSOR] * 4, TENSOR]
    assert peak_bytes(graph) == 2 * TENSOR
    assert live_ranges(graph).argument_bytes() == TENSOR


def test_a_view_keeps_its_base_alive_and_takes_no_bytes() -> None:
    b = GraphBuilder()
    base = b.call(aten.relu.default, b.input("x", 2, 4))
    view = b.call(aten.t.default, base)
    other = b.call(aten.neg.default, b.call(aten.reshape.default, view, [8]))  # a transpose reshaped is a copy
    graph = b.done(other, view).graph
    assert live_ranges(graph).storages[view] == live_ranges(graph).storages[base]
    assert live_ranges(graph).curve_bytes() == [0, TENSOR, TENSOR, 2 * TENSOR, 3 * TENSOR, 2 * TENSOR]


def test_a_collectives_operand_lives_until_its_wait() -> None:
    b = GraphBuilder({"tp": 2})
    x = b.call(aten.relu.default, b.input("x", 2, 4))
    started = b.call(collectives["all_gather_into_tensor"], x, 2, "tp")
    y = b.call(aten.ones_like.default, b.input("y", 2, 4))
    b.call(collectives["wait_tensor"], started)
    graph = b.done(y).graph
    ranges = live_ranges(graph)
    wait = list(graph.nodes).index(nodes_of(graph.owning_module, collectives["wait_tensor"])[0])
    assert [ranges.last[s] for s in (*ranges.storages[x], *ranges.storages[started])] == [wait, wait]


def test_results_of_a_multi_output_op_live_each_for_itself() -> None:
    b = GraphBuilder()
    both = b.call(aten.topk.default, b.input("x", 2, 4), 4)
    values, indices = b.item(both, 0), b.item(both, 1)
    y = b.call(aten.neg.default, indices)
    graph = b.done(values, y).graph
    ranges = live_ranges(graph)
    assert ranges.storages[both] == (*ranges.storages[values], *ranges.storages[indices])
    assert ranges.last[ranges.storages[values][0]] == 5
    assert ranges.last[ranges.storages[indices][0]] == 4
    assert peak_bytes(graph) == TENSOR + 2 * (2 * TENSOR)


def slow_peak(graph: Graph, alias: dict[str, str]) -> int:
    nodes = list(graph.nodes)
    own = [node for node in nodes if node.op == "call_function" and node.name not in alias]
    peak = 0
    for position in range(len(nodes)):
        live = 0
        for value in own:
            family = [node for node in nodes if root(node.name, alias) == value.name]
            readers = [nodes.index(reader) for node in family for reader in node.users]
            if nodes.index(value) <= position <= max([nodes.index(node) for node in family] + readers):
                live += value.meta["val"].numel() * 4
        peak = max(peak, live)
    return peak


def root(name: str, alias: dict[str, str]) -> str:
    while name in alias:
        name = alias[name]
    return name


def test_the_peak_equals_a_slow_oracles_on_random_graphs() -> None:
    for seed in range(30):
        rng, b, alias = random.Random(seed), GraphBuilder(), {}
        values = [b.call(aten.relu.default, b.input("x", 4, 4))]
        for _ in range(15):
            source = rng.choice(values)
            if rng.random() < 0.4:
                view = b.call(aten.t.default, source)
                alias[view.name] = source.name
                values.append(view)
            else:
                values.append(b.call(aten.add.Tensor, source, rng.choice(values)))
        graph = b.done(*rng.sample(values, 2)).graph
        assert peak_bytes(graph) == slow_peak(graph, alias)


def test_it_is_linear_in_nodes() -> None:
    def lines_run(count: int) -> int:
        """How many lines of the liveness module run: work that no loaded machine makes longer."""
        b = GraphBuilder()
        values = [b.input("x", 2, 4)]
        value = torch.empty(2, 4, device="meta")
        for _ in range(count):  # every value is read at once and again at the very end
            node = b.graph.call_function(aten.add.Tensor, (values[0], values[-1]))
            node.meta["val"] = value
            values.append(node)
        graph = b.done(*values).graph
        seen = 0

        def tracer(frame: object, event: str, argument: object) -> object:
            nonlocal seen
            if not frame.f_code.co_filename.endswith("liveness.py"):
                return None
            seen += event == "line"
            return tracer

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            peak_bytes(graph)
        finally:
            sys.settrace(before)
        return seen

    few, many = lines_run(250), lines_run(2000)
    assert few > 1000
    assert many < 9 * few
