"""Random small graphs: the passes that claim "bitwise" keep every bit and every stride of every result."""

import math

import torch
from graph_building import GraphBuilder, aten, run_graph, same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dtorch.ir.snapshot import take_snapshot
from dtorch.ir.verify import verify
from dtorch.passes.base import PassContext
from dtorch.passes.manager import PassManager
from dtorch.passes.pipeline import default_passes

CONSTANTS = [0.0, -0.0, 1, 1.0, True, 2.5, math.nan, math.inf]
UNARY = [
    (aten.relu.default,),
    (aten.neg.default,),
    (aten.t.default,),
    (aten.alias.default,),
    (aten.detach.default,),
    (aten.clone.default,),
    (aten.contiguous.default,),
    (aten.view.default, [3, 3]),
    (aten.reshape.default, [3, 3]),
    (aten.to.dtype, torch.float32),
    (aten.to.dtype, torch.float64),
    (aten.slice.Tensor, 0, 0, 3),
    (aten.slice.Tensor, 1, 1, 9223372036854775807),
    (aten.dropout.default, 0.5, False),
    (aten.softmax.int, -1),
]


@st.composite
def graphs(draw: st.DrawFn) -> GraphModule:
    """Up to 20 nodes on 3 x 3 tensors, with repeats, no-ops, dead ends and results that are views."""
    b = GraphBuilder()
    values: list[Node] = [b.input("x", 3, 3), b.input("y", 3, 3)]
    for _ in range(draw(st.integers(1, 20))):
        source = draw(st.sampled_from(values[-6:]))
        kind = draw(st.sampled_from(["unary", "unary", "constant", "binary"]))
        try:
            if kind == "unary":
                target, *rest = draw(st.sampled_from(UNARY))
                values.append(b.call(target, source, *rest))
            elif kind == "constant":
                target = draw(st.sampled_from([aten.mul.Tensor, aten.add.Tensor]))
                values.append(b.call(target, source, draw(st.sampled_from(CONSTANTS))))
            else:
                values.append(b.call(aten.add.Tensor, source, draw(st.sampled_from(values[-6:]))))
        except Exception:  # a shape that this op cannot take: leave the node out
            b.graph.erase_node(next(iter(reversed(b.graph.nodes))))
    return b.done(*draw(st.lists(st.sampled_from(values), min_size=1, max_size=4)))


@given(graphs())
def test_the_default_passes_keep_every_bit(graph_module: GraphModule) -> None:
    inputs = [torch.randn(3, 3), torch.randn(3, 3)]
    expected = run_graph(graph_module, *inputs)
    before = len(graph_module.graph.nodes)
    manager = PassManager(default_passes(), PassContext(numerics="bitwise"))
    manager.run(graph_module, "global")
    verify(graph_module, "global", deep=True)
    assert len(graph_module.graph.nodes) <= before
    for one, other in zip(expected, run_graph(graph_module, *inputs), strict=True):
        assert same_bits(one, other)
    for one, other in zip(expected, graph_module(*inputs), strict=True):
        assert same_bits(one, other)


@given(graphs())
def test_a_second_run_of_the_passes_finds_nothing(graph_module: GraphModule) -> None:
    PassManager(default_passes(), PassContext()).run(graph_module, "global")
    again = PassManager(default_passes(), PassContext())
    # Merging can bring two no-ops' operands together, never the other way: one more round must be the last.
    again.run(graph_module, "global")
    assert PassManager(default_passes(), PassContext()).run(graph_module, "global") == 0


@given(graphs())
def test_snapshots_print_and_rebuild_the_graph_of_their_moment(graph_module: GraphModule) -> None:
    before = take_snapshot(graph_module, "capture", "global")
    text = take_snapshot(graph_module, "capture", "global").text()
    inputs = [torch.randn(3, 3), torch.randn(3, 3)]
    expected = run_graph(graph_module, *inputs)
    PassManager(default_passes(), PassContext()).run(graph_module, "global")
    assert before.text() == text  # made only now, after the nodes were rewritten
    for one, other in zip(expected, run_graph(before.graph_module(), *inputs), strict=True):
        assert same_bits(one, other)


def test_symbolic_sizes_get_no_guard_and_keep_their_results() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.size(0)
        same = x.view(rows, 3).cos() + x.view(rows, x.size(1)).cos()
        return same.reshape(rows * 3), x.expand(rows, 3).relu()

    graph_module = make_fx(forward, tracing_mode="symbolic")(torch.randn(5, 3))
    guards = len(next(iter(graph_module.graph.nodes)).meta["val"].fake_mode.shape_env.guards)
    manager = PassManager(default_passes(), PassContext())
    assert manager.run(graph_module, "global") > 0
    shape_env = next(iter(graph_module.graph.nodes)).meta["val"].fake_mode.shape_env
    assert len(shape_env.guards) == guards
    manager.snapshots[-1].text()
    for rows in (5, 8):
        x = torch.randn(rows, 3)
        assert all(map(same_bits, graph_module(x), forward(x)))
