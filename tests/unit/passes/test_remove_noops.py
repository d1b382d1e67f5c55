"""No-ops: what returns its operand as it is goes; what changes layout or gives the caller memory of his own stays."""

from collections.abc import Callable

import pytest
import torch
from graph_building import GraphBuilder, aten
from torch.fx import Node

from dtorch.ir.layout import WHOLE, Split
from dtorch.passes.base import PassContext
from dtorch.passes.remove_noops import RemoveNoops

Make = Callable[[GraphBuilder, Node], Node]

NOOPS: dict[str, Make] = {
    "view": lambda b, x: b.call(aten.view.default, x, [2, 4]),
    "reshape": lambda b, x: b.call(aten.reshape.default, x, [2, -1]),
    "expand": lambda b, x: b.call(aten.expand.default, x, [2, 4]),
    "permute": lambda b, x: b.call(aten.permute.default, x, [0, 1]),
    "slice": lambda b, x: b.call(aten.slice.Tensor, x, 0, 0, 9223372036854775807),
    "alias": lambda b, x: b.call(aten.alias.default, x),
    "detach": lambda b, x: b.call(aten.detach.default, x),
    "contiguous": lambda b, x: b.call(aten.contiguous.default, x),
    "to": lambda b, x: b.call(aten.to.dtype, x, torch.float32),
    "_to_copy": lambda b, x: b.call(aten._to_copy.default, x, dtype=torch.float32),
    "clone": lambda b, x: b.call(aten.clone.default, x),
    "dropout": lambda b, x: b.call(aten.dropout.default, x, 0.1, False),
}
OTHERS: dict[str, Make] = {
    "view to another shape": lambda b, x: b.call(aten.view.default, x, [4, 2]),
    "transpose": lambda b, x: b.call(aten.t.default, x),
    "select": lambda b, x: b.call(aten.slice.Tensor, x, 0, 1, 2),
    "cast": lambda b, x: b.call(aten.to.dtype, x, torch.float64),
    "clone to another layout": lambda b, x: b.call(aten.clone.default, b.call(aten.t.default, x)),
    "contiguous of a transpose": lambda b, x: b.call(aten.contiguous.default, b.call(aten.t.default, x)),
    "relu": lambda b, x: b.call(aten.relu.default, x),
    "dropout that is on": lambda b, x: b.call(aten.dropout.default, x, 0.1, True),
}


@pytest.mark.parametrize("name", NOOPS)
def test_noops_go(name: str) -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 4)
    result = b.call(aten.relu.default, NOOPS[name](b, x))
    assert RemoveNoops().run(b.done(result), PassContext()) == 1
    assert result.args == (x,)


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_something_stays(name: str) -> None:
    b = GraphBuilder()
    result = b.call(aten.relu.default, OTHERS[name](b, b.input("x", 2, 4)))
    removed = RemoveNoops().run(b.done(result), PassContext())
    # Cloning a transpose keeps its strides, so that one copy is a no-op.
    assert removed == (1 if name == "clone to another layout" else 0)


def test_a_clone_to_contiguous_of_a_transpose_stays() -> None:
    b = GraphBuilder()
    turned = b.call(aten.t.default, b.input("x", 2, 4))
    copy = b.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    assert RemoveNoops().run(b.done(b.call(aten.relu.default, copy)), PassContext()) == 0


@pytest.mark.parametrize("returned_through_a_view", [False, True])
def test_a_copy_that_the_caller_gets_stays(returned_through_a_view: bool) -> None:
    b = GraphBuilder()
    copy = b.call(aten.clone.default, b.input("x", 2, 4))
    result = b.call(aten.view.default, copy, [8]) if returned_through_a_view else copy
    assert RemoveNoops().run(b.done(result), PassContext()) == 0


def test_a_noop_between_different_placements_stays() -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 4, spec=(Split(0),))
    result = b.call(aten.relu.default, b.call(aten.alias.default, x, meta={"spec": (WHOLE,)}), meta={"spec": (WHOLE,)})
    assert RemoveNoops().run(b.done(result), PassContext()) == 0
