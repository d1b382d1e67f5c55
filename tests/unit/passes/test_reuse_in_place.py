"""Reuse in place: what may overwrite its operand does so with the same bits; what is needed is never overwritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from golden_files import check_golden
from graph_building import GraphBuilder, aten, collectives, run_graph, same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from dtorch.errors import VerifyError
from dtorch.ir.ops import keep_first, local_begin
from dtorch.ir.signature import InputSpec, OutputSpec, Signature
from dtorch.ir.snapshot import take_snapshot
from dtorch.ir.verify import verify
from dtorch.lower.schedule import schedule
from dtorch.passes.base import PassContext
from dtorch.passes.manager import PassManager
from dtorch.passes.pipeline import PassPipeline
from dtorch.passes.reuse_in_place import IN_PLACE, ReuseInPlace
from dtorch.report.diff import diff_snapshots

AXES = {"tp": 2}
Make = Callable[[GraphBuilder, Node, Node], tuple[Node, ...]]


def applied(graph_module: GraphModule, devices: int = 1) -> int:
    """Schedule a local graph, run the pass on it, verify; how many operations are in place."""
    schedule(graph_module)
    manager = PassManager(PassPipeline((ReuseInPlace(),)), PassContext((devices,), ("tp",)))
    made = manager.run(graph_module, "scheduled")
    verify(graph_module, "scheduled", None, None, deep=True)
    return made


def add(b: GraphBuilder, one: Node, other: Node | float) -> Node:
    return b.call(aten.add.Tensor, one, other)


def relu(b: GraphBuilder, one: Node) -> Node:
    return b.call(aten.relu.default, one)


def mm(b: GraphBuilder, one: Node, other: Node) -> Node:
    return b.call(aten.mm.default, one, other)


def test_the_pass_before_and_after() -> None:
    b = GraphBuilder()
    x, w = b.input("x", 2, 4), b.input("w", 4, 4)
    y = mm(b, x, w)
    gate = b.call(aten.silu.default, y)
    both = b.call(aten.mul.Tensor, gate, mm(b, x, w))
    turned = b.call(aten.t.default, relu(b, both))
    result = add(b, b.call(aten.neg.default, turned), 1.0)
    graph_module = schedule(b.done(result, relu(b, x)))
    before = take_snapshot(graph_module, "schedule", "scheduled")
    assert applied(graph_module) == 5
    after = take_snapshot(graph_module, "reuse_in_place", "scheduled")
    check_golden("reuse_in_place.diff", diff_snapshots(before, after, context=1))


REUSED: dict[str, Make] = {
    "a fresh value": lambda b, x, y: (relu(b, mm(b, x, y)),),
    "with a number": lambda b, x, y: (add(b, mm(b, x, y), 2.0),),
    "with itself": lambda b, x, y: (lambda m: (b.call(aten.mul.Tensor, m, m),))(mm(b, x, y)),
    "with a row": lambda b, x, y: (add(b, mm(b, x, y), b.call(aten.select.int, y, 0, 1)),),
    "a view of nothing else": lambda b, x, y: (b.call(aten.exp.default, b.call(aten.view.default, mm(b, x, y), [9])),),
    "a value that was read before": lambda b, x, y: (lambda m: (mm(b, m, y), add(b, m, 1.0))[::-1])(mm(b, x, y)),
}
KEPT: dict[str, Make] = {
    "an input": lambda b, x, y: (relu(b, x),),
    "a view of an input": lambda b, x, y: (relu(b, b.call(aten.view.default, x, [9])),),
    "a result": lambda b, x, y: (lambda m: (m, relu(b, m)))(mm(b, x, y)),
    "a value read later": lambda b, x, y: (lambda m: (relu(b, m), mm(b, m, y)))(mm(b, x, y)),
    "a value whose view is a result": lambda b, x, y: (lambda m: (b.call(aten.t.default, m), relu(b, m)))(mm(b, x, y)),
    "a value whose view is read later": lambda b, x, y: (
        lambda m: (lambda t: (relu(b, m), mm(b, t, y)))(b.call(aten.t.default, m))
    )(mm(b, x, y)),
    "a view whose base is read later": lambda b, x, y: (
        lambda m: (relu(b, b.call(aten.view.default, m, [9])), mm(b, m, y))
    )(mm(b, x, y)),
    "a value read in another layout": lambda b, x, y: (lambda m: (add(b, m, b.call(aten.t.default, m)),))(mm(b, x, y)),
    "a smaller operand": lambda b, x, y: (add(b, b.call(aten.sum.dim_IntList, mm(b, x, y), [0], True), y),),
    "an expanded operand": lambda b, x, y: (
        relu(b, b.call(aten.expand.default, b.call(aten.sum.dim_IntList, mm(b, x, y), [0], True), [3, 3])),
    ),
    "another dtype": lambda b, x, y: (add(b, mm(b, x, y), b.call(aten._to_copy.default, y, dtype=torch.float64)),),
    "rows of a larger value": lambda b, x, y: (relu(b, b.call(aten.slice.Tensor, mm(b, x, y), 0, 0, 2)),),
    "a part": lambda b, x, y: (relu(b, b.call(aten.slice.Tensor, mm(b, x, y), 1, 0, 2)),),
    "a reader that may hand it on": lambda b, x, y: (
        lambda m: (lambda e: (add(b, m, 1.0), e)[::-1])(b.call(aten.einsum.default, "ij->ji", [m]))
    )(mm(b, x, y)),
    "a view that its schema hides": lambda b, x, y: (
        lambda m: (lambda v: (add(b, m, 1.0), v)[::-1])(b.call(aten._unsafe_view.default, m, [9]))
    )(mm(b, x, y)),
    "an operation of unknown memory": lambda b, x, y: (relu(b, b.call(aten._unsafe_view.default, x, [9])),),
    "an operand of a collective": lambda b, x, y: (
        lambda m: (lambda s: (add(b, m, 1.0), s))(b.collect("all_reduce", m, "sum", "tp"))
    )(mm(b, x, y)),
    "a collective's result": lambda b, x, y: (relu(b, b.collect("all_reduce", mm(b, x, y), "sum", "tp")),),
    "what keep_first gives": lambda b, x, y: (relu(b, b.call(keep_first, mm(b, x, y), 0)),),
    "what keep_first was given": lambda b, x, y: (lambda m: (lambda k: (add(b, m, 1.0), k))(b.call(keep_first, m, 0)))(
        mm(b, x, y)
    ),
}


def three_by_three(make: Make) -> GraphModule:
    b = GraphBuilder(AXES)
    return b.done(*make(b, b.input("x", 3, 3), b.input("y", 3, 3)))


@pytest.mark.parametrize("make", REUSED.values(), ids=REUSED)
def test_an_element_wise_operation_overwrites_its_dead_operand(make: Make) -> None:
    graph_module = three_by_three(make)
    inputs = [torch.randn(3, 3), torch.randn(3, 3)]
    expected = run_graph(graph_module, *inputs)
    assert applied(graph_module) == 1
    assert all(map(same_bits, expected, run_graph(graph_module, *inputs)))


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_nothing_is_overwritten_that_somebody_may_need(make: Make) -> None:
    assert applied(three_by_three(make), devices=2) == 0


def test_a_view_at_a_place_of_the_mesh_coordinate_is_left_alone() -> None:
    """The executor in lockstep may hold one tensor for all coordinates and a view of it for each."""
    b = GraphBuilder(AXES)
    fresh = mm(b, b.input("x", 3, 3), b.input("y", 3, 3))
    begin = b.call(local_begin, 1, ((1, 1, 0),))
    graph_module = b.done(relu(b, b.call(aten.slice.Tensor, fresh, 0, begin, 9)))
    assert applied(graph_module, devices=2) == 0


def test_a_dimension_of_one_element_may_be_cut_on_the_other_operand() -> None:
    def graph_module() -> GraphModule:
        b = GraphBuilder()
        x, w, y = b.input("x", 1, 3), b.input("w", 3, 3), b.input("y", 1, 3)
        return b.done(add(b, mm(b, x, w), y))

    assert applied(graph_module()) == 1 and applied(graph_module(), devices=2) == 0


@pytest.mark.parametrize("target", IN_PLACE, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_every_overload_in_place_gives_the_bits_of_its_functional_one(target: Callable, turned: bool) -> None:
    operands = {"aten::clamp": [[-0.5, 0.5]], "aten::clamp_min": [[0.1]]}
    binary = [[torch.randn(37, 5)], [torch.randn(5)], [0.3]]
    name = target.name().partition(".")[0]
    takes = binary if name in ("aten::add", "aten::sub", "aten::mul", "aten::div") else operands.get(name, [[]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for more in takes:
            given = [each.to(dtype) if isinstance(each, torch.Tensor) else each for each in more]
            x = torch.randn(5, 37, dtype=dtype).t() if turned else torch.randn(37, 5, dtype=dtype)
            wanted = target(x, *given)
            assert wanted.stride() == x.stride()
            assert same_bits(bits(IN_PLACE[target](x, *given)), bits(wanted))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


SAFE = [
    (aten.relu.default,), (aten.neg.default,), (aten.tanh.default,), (aten.t.default,), (aten.view.default, [3, 3]),
    (aten.reshape.default, [3, 3]), (aten.slice.Tensor, 0, 0, 3), (aten.clone.default,), (aten.softmax.int, -1),
    (aten.reshape.default, [9]), (aten.mul.Tensor, 0.5), (aten.sum.dim_IntList, [0], True),
    (aten.expand.default, [3, 3]),
]  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn) -> GraphModule:
    """Up to 20 nodes on 3 x 3 tensors: element-wise operations, views of views, values that are read again."""
    b = GraphBuilder()
    values: list[Node] = [b.input("x", 3, 3), b.input("y", 3, 3)]
    for _ in range(draw(st.integers(2, 20))):
        source = draw(st.sampled_from(values[-4:]))
        try:
            if draw(st.booleans()):
                target, *rest = draw(st.sampled_from(SAFE))
                values.append(b.call(target, source, *rest))
            else:
                target = draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.mm.default]))
                values.append(b.call(target, source, draw(st.sampled_from(values[-4:]))))
        except Exception:  # a shape that this operation cannot take: leave the node out
            b.graph.erase_node(next(iter(reversed(b.graph.nodes))))
    return b.done(*draw(st.lists(st.sampled_from(values), min_size=1, max_size=4)))


@given(graphs())
def test_random_graphs_keep_every_bit_and_their_inputs(graph_module: GraphModule) -> None:
    inputs = [torch.randn(3, 3), torch.randn(3, 3)]
    untouched = [each.clone() for each in inputs]
    expected = [each.clone() for each in run_graph(graph_module, *inputs)]
    applied(graph_module)
    found = run_graph(graph_module, *inputs)
    assert all(map(torch.equal, found, expected)) and all(map(same_bits, inputs, untouched))


# --- what the verifier makes of a pass that did it wrongly ------------------------------------------------------------


def in_place(b: GraphBuilder, target: object, *args: object) -> Node:
    return b.call(target, *args, meta={"storage": "inplace", "storage_of": args[0]})


def checked(b: GraphBuilder, *results: Node, signature: Signature | None = None) -> None:
    graph_module = b.done(*results)
    written = {node: dict(node.meta) for node in graph_module.graph.nodes if "storage_of" in node.meta}
    schedule(graph_module)
    for node, meta in written.items():
        node.meta.update(storage=meta["storage"], storage_of=meta["storage_of"])
    verify(graph_module, "scheduled", signature, AXES)


def test_the_verifier_catches_a_write_into_an_argument() -> None:
    b = GraphBuilder(AXES)
    x = b.input("x", 2, 2)
    view = b.call(aten.t.default, x)
    inputs = (InputSpec("x", "user", "x", (2, 2), torch.float32),)
    with pytest.raises(VerifyError, match="writes into the memory of input %x, which is not donated"):
        checked(b, in_place(b, aten.relu_.default, view), signature=Signature(inputs, (OutputSpec("y"),)))


def test_the_verifier_catches_a_result_that_does_not_fit() -> None:
    b = GraphBuilder(AXES)
    x, y = b.input("x", 2, 2), b.input("y", 2, 2, dtype=torch.float64)
    wrong = in_place(b, aten.add_.Tensor, mm(b, x, x), y)
    wrong.meta["val"] = y.meta["val"]
    with pytest.raises(VerifyError, match=r"is f64\[2, 2\] and cannot lie in the memory of %mm_default, f32\[2, 2\]"):
        checked(b, wrong)


def test_the_verifier_catches_a_read_of_the_same_bytes_in_another_layout() -> None:
    b = GraphBuilder(AXES)
    m = mm(b, b.input("x", 2, 2), b.input("y", 2, 2))
    turned = b.call(aten.t.default, m)
    with pytest.raises(VerifyError, match="writes into %mm_default while it reads the same memory as %t_default"):
        checked(b, in_place(b, aten.add_.Tensor, m, turned))


def test_the_verifier_catches_a_write_while_a_collective_is_under_way() -> None:
    b = GraphBuilder(AXES)
    m = mm(b, b.input("x", 2, 2), b.input("y", 2, 2))
    started = b.call(collectives["all_reduce"], m, "sum", "tp")
    written = in_place(b, aten.relu_.default, m)
    waited = b.call(collectives["wait_tensor"], started)
    with pytest.raises(VerifyError, match="overwrites %mm_default while %all_reduce_default may still read it"):
        checked(b, written, waited)


def test_the_verifier_takes_what_keep_first_gives_for_its_operand() -> None:
    b = GraphBuilder(AXES)
    m = mm(b, b.input("x", 2, 2), b.input("y", 2, 2))
    written = in_place(b, aten.relu_.default, b.call(keep_first, m, 0))
    with pytest.raises(VerifyError, match="overwrites %mm_default, which %neg_default reads later"):
        checked(b, written, b.call(aten.neg.default, m))
