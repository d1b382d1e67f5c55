"""Folding redistributes: what goes, what must stay, and that no device's bits change (simulated on real tensors)."""

import itertools

import pytest
import torch
from graph_building import GraphBuilder, aten, nodes_of, same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule

from dtorch.ir.cost import CostModel
from dtorch.ir.layout import PENDING, WHOLE, Pending, Spec, Split, put_local, take_local
from dtorch.ir.ops import redistribute
from dtorch.ir.verify import verify
from dtorch.passes.base import Pass, PassContext
from dtorch.passes.fold_redistributes import FoldRedistributes, FoldReductions

S0, S1 = Split(0), Split(1)


def fold(chain: list[Spec], mesh: tuple[int, ...], entry: Pass | None = None) -> list[Spec]:
    """The placements that a value still goes through after a chain of redistributes is folded."""
    names = tuple(f"axis{i}" for i in range(len(mesh)))
    b = GraphBuilder(dict(zip(names, mesh, strict=True)))
    value = b.input("x", 12, 12, spec=chain[0])
    for spec in chain[1:]:
        value = b.place(value, spec)
    result = b.call(aten.relu.default, value, meta={"spec": chain[-1]})
    graph_module = b.done(result)
    (entry or FoldRedistributes()).run(graph_module, PassContext(mesh, names))
    verify(graph_module, "global", axis_sizes=b.axis_sizes)
    left = [chain[0]]
    value = result.args[0]
    steps = []
    while value.target is redistribute:
        steps.append(value.args[2])
        value = value.args[0]
    return left + steps[::-1]


@pytest.mark.parametrize(
    ("chain", "left"),
    [
        ([(WHOLE,), (WHOLE,)], [(WHOLE,)]),
        ([(S0,), (WHOLE,), (S0,)], [(S0,)]),
        ([(WHOLE,), (PENDING,), (WHOLE,)], [(WHOLE,)]),
        ([(WHOLE,), (S0,), (WHOLE,)], [(WHOLE,)]),
        ([(S0,), (WHOLE,), (S1,)], [(S0,), (S1,)]),
        ([(S0,), (WHOLE,), (S1,), (WHOLE,), (S0,)], [(S0,)]),
        ([(PENDING,), (WHOLE,), (S0,)], [(PENDING,), (WHOLE,), (S0,)]),
        ([(PENDING,), (WHOLE,), (PENDING,)], [(PENDING,), (WHOLE,), (PENDING,)]),
        ([(PENDING,), (S0,), (WHOLE,)], [(PENDING,), (S0,), (WHOLE,)]),
    ],
)
def test_chains_on_an_axis_of_four(chain: list[Spec], left: list[Spec]) -> None:
    assert fold(chain, (4,)) == left


def test_a_sum_of_two_terms_is_exact_in_any_order() -> None:
    assert fold([(PENDING,), (WHOLE,), (S0,)], (2,)) == [(PENDING,), (S0,)]
    assert fold([(PENDING,), (WHOLE,), (PENDING,)], (2,)) == [(PENDING,), (WHOLE,), (PENDING,)]


def test_fold_reductions_reassociates() -> None:
    assert fold([(PENDING,), (WHOLE,), (S0,)], (4,), FoldReductions()) == [(PENDING,), (S0,)]
    assert fold([(PENDING,), (WHOLE,), (PENDING,)], (4,), FoldReductions()) == [(PENDING,)]
    assert FoldReductions().numerics == "reassociates"


def test_a_change_between_pending_reductions_is_never_folded_away() -> None:
    chain = [(WHOLE,), (PENDING,), (Pending("max"),)]
    assert fold(chain, (2,), FoldReductions()) == chain


def test_what_is_read_elsewhere_is_not_composed_but_may_be_cancelled() -> None:
    b = GraphBuilder()
    x = b.input("x", 4, 4, spec=(S0,))
    gathered = b.place(x, (WHOLE,))
    back, other = b.place(gathered, (S0,)), b.place(gathered, (S1,))
    graph_module = b.done(gathered, b.call(aten.neg.default, back, meta={"spec": (S0,)}), other)
    assert FoldRedistributes().run(graph_module, PassContext((4,))) == 1
    assert [node.args[0] for node in nodes_of(graph_module, redistribute)] == [x, gathered]


def test_equal_redistributes_merge_also_when_composing_makes_them_equal() -> None:
    b = GraphBuilder()
    x = b.input("x", 4, 4, spec=(S0,))
    direct = b.place(x, (S1,))
    detour = b.place(b.place(x, (WHOLE,)), (S1,))
    context = PassContext((4,))
    assert FoldRedistributes().run(b.done(direct, detour), context) == 2
    assert context.messages == ["redistributes: 1 merged, 1 composed"]


def test_composing_obeys_the_cost_model() -> None:
    class Dear(CostModel):
        def convert(self, source: object, target: object, size_bytes: float, count: int) -> float:
            return 100.0 if (source, target) == (S0, S1) else 1.0

    b = GraphBuilder()
    value = b.place(b.place(b.input("x", 4, 4, spec=(S0,)), (WHOLE,)), (S1,))
    assert FoldRedistributes().run(b.done(value), PassContext((4,), cost_model=Dear())) == 0


# --- the same bits on every device --------------------------------------------------------------------------------

Locals = dict[tuple[int, ...], torch.Tensor]
SHAPE = (5, 4)


def place(full: torch.Tensor, spec: Spec, mesh: tuple[int, ...]) -> Locals:
    """A full tensor as each device holds it; pending axes: coordinate 0 keeps the value."""
    held = {}
    for at in itertools.product(*map(range, mesh)):
        local = take_local(full, spec, mesh, at).clone()
        first = all(c == 0 for c, placed in zip(at, spec, strict=True) if placed == PENDING)
        held[at] = local if first else torch.zeros_like(local)
    return held


def redistributed(held: Locals, source: Spec, target: Spec, mesh: tuple[int, ...]) -> Locals:
    """What a redistribute does, with sums in the order of coordinates; axes that stay pending stay as they are."""
    kept = [axis for axis, (a, b) in enumerate(zip(source, target, strict=True)) if a == b == PENDING]
    summed = [axis for axis, placed in enumerate(source) if placed == PENDING and axis not in kept]
    result: Locals = {}
    for fixed in itertools.product(*(range(mesh[axis]) for axis in kept)):
        total = None
        for terms in itertools.product(*(range(mesh[axis]) for axis in summed)):
            pinned = dict(zip((*kept, *summed), (*fixed, *terms), strict=True))
            full = torch.zeros(SHAPE, dtype=torch.float32)
            for at, local in held.items():
                if all(at[axis] == c for axis, c in pinned.items()):
                    put_local(full, local, source, mesh, at)
            total = full if total is None else total + full
        rest = tuple(WHOLE if axis in kept else placed for axis, placed in enumerate(target))
        for at, local in place(total, rest, mesh).items():
            if all(at[axis] == c for axis, c in zip(kept, fixed, strict=True)):
                result[at] = local
    return result


def run_on_mesh(graph_module: GraphModule, held: Locals, mesh: tuple[int, ...]) -> list[Locals]:
    env = {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            env[node] = held
        elif node.target is redistribute:
            env[node] = redistributed(env[node.args[0]], node.args[1], node.args[2], mesh)
    return [env[node] for node in graph_module.graph.output_node().args[0]]


placed = st.sampled_from([WHOLE, PENDING, S0, S1])


@given(st.data(), st.sampled_from([(2,), (3,), (2, 2), (3, 2)]))
def test_folding_keeps_the_bits_of_every_device(data: st.DataObject, mesh: tuple[int, ...]) -> None:
    specs = st.tuples(*[placed] * len(mesh))
    names = tuple(f"axis{i}" for i in range(len(mesh)))
    b = GraphBuilder(dict(zip(names, mesh, strict=True)))
    values = [b.input("x", *SHAPE, spec=data.draw(specs))]
    for _ in range(data.draw(st.integers(1, 6))):
        values.append(b.place(data.draw(st.sampled_from(values[-3:])), data.draw(specs)))
    graph_module = b.done(*data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)))
    torch.manual_seed(0)
    spec, terms, held = values[0].meta["spec"], {}, {}
    for at in itertools.product(*map(range, mesh)):  # equal wherever only non-pending axes differ
        term = tuple(c for c, p in zip(at, spec, strict=True) if p == PENDING)
        held[at] = take_local(terms.setdefault(term, torch.randn(SHAPE)), spec, mesh, at).clone()
    before = run_on_mesh(graph_module, held, mesh)
    FoldRedistributes().run(graph_module, PassContext(mesh, names))
    verify(graph_module, "global", axis_sizes=b.axis_sizes, deep=True)
    for one, other in zip(before, run_on_mesh(graph_module, held, mesh), strict=True):
        assert all(same_bits(one[at].contiguous(), other[at].contiguous()) for at in one)
