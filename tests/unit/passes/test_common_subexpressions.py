"""Common subexpressions: what is merged, and what must never be."""

import math
import warnings

import pytest
import torch
from graph_building import GraphBuilder, aten, nodes_of

from dtorch.ir.layout import PENDING, WHOLE, Split
from dtorch.ir.ops import redistribute
from dtorch.passes.base import PassContext
from dtorch.passes.common_subexpressions import CommonSubexpressions


def merge(builder: GraphBuilder, *results: object) -> tuple[torch.fx.GraphModule, int]:
    graph_module = builder.done(*results)
    return graph_module, CommonSubexpressions().run(graph_module, PassContext())


def test_equal_nodes_become_one_transitively() -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 2)
    one, two = b.call(aten.cos.default, x), b.call(aten.cos.default, x)
    graph_module, merged = merge(b, b.call(aten.neg.default, one), b.call(aten.neg.default, two))
    assert merged == 2
    assert len(nodes_of(graph_module, aten.neg.default)) == 1


@pytest.mark.parametrize(
    ("one", "two"),
    [(0.0, -0.0), (1, 1.0), (1, True), (0, False), (1.0, True), (math.nan, -math.nan), (2, 3)],
)
def test_constants_that_an_op_can_tell_apart_stay_apart(one: object, two: object) -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 2)
    _, merged = merge(b, b.call(aten.mul.Tensor, x, one), b.call(aten.mul.Tensor, x, two))
    assert merged == 0


@pytest.mark.parametrize("constant", [0.0, -0.0, 1, True, math.nan, math.inf])
def test_equal_constants_merge(constant: object) -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 2)
    _, merged = merge(b, b.call(aten.mul.Tensor, x, constant), b.call(aten.mul.Tensor, x, constant))
    assert merged == 1


def test_lists_and_keyword_arguments_are_part_of_the_key() -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 2)
    a = b.call(aten.sum.dim_IntList, x, [0])
    c = b.call(aten.sum.dim_IntList, x, [1])
    d = b.call(aten.sum.dim_IntList, x, [0], dtype=torch.float64)
    e = b.call(aten.sum.dim_IntList, x, [0], dtype=torch.float64)
    _, merged = merge(b, a, c, d, e)
    assert merged == 1


def test_random_ops_never_merge_but_attention_without_dropout_does() -> None:
    b = GraphBuilder()
    x, q = b.input("x", 2, 2), b.input("q", 1, 2, 4, 8)
    results = [b.call(aten.bernoulli.default, x) for _ in range(2)]
    results += [b.call(aten.dropout.default, x, 0.5, True) for _ in range(2)]
    results += [b.call(aten.scaled_dot_product_attention.default, q, q, q, None, 0.1) for _ in range(2)]
    attention = [b.call(aten.scaled_dot_product_attention.default, q, q, q) for _ in range(2)]
    _, merged = merge(b, *results, *attention)
    assert merged == 1


def test_writing_and_uninitialised_ops_never_merge() -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 2)
    with warnings.catch_warnings():
        results = [b.call(aten.empty_like.default, x) for _ in range(2)]
        results += [b.call(aten.relu_.default, x) for _ in range(2)]
    _, merged = merge(b, *results)
    assert merged == 0


def test_equal_redistributes_merge_and_different_placements_stay() -> None:
    b = GraphBuilder()
    x = b.input("x", 4, 4, spec=(Split(0),))
    results = [b.place(x, (WHOLE,)), b.place(x, (WHOLE,)), b.place(x, (Split(1),))]
    y = b.call(aten.relu.default, x, meta={"spec": (Split(0),)})
    z = b.call(aten.relu.default, x, meta={"spec": (PENDING,)})
    graph_module, merged = merge(b, *results, y, z)
    assert merged == 1
    assert len(nodes_of(graph_module, redistribute)) == 2
