"""Rules that compute with shapes (views, splits, joins, repeats) on shapes that nobody chose."""

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.sharding.check import check_rule

aten = torch.ops.aten
FACTORS = st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5).filter(lambda f: prod(f) <= 240)


def numbered(*shape):
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape)


@st.composite
def grouped(draw, factors):
    """A shape whose dims are products of consecutive factors."""
    shape, current = [], 1
    for factor in factors:
        current *= factor
        if draw(st.booleans()):
            shape.append(current)
            current = 1
    return [*shape, current]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_reshapes(data):
    factors = data.draw(FACTORS)
    source = data.draw(grouped(factors))
    target = data.draw(grouped(data.draw(st.permutations(factors))))  # same elements, often no common boundaries
    assert check_rule(aten.view.default, (numbered(*source), target), axis_sizes=(2, 3), joint=4)[0] == "own"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from([1, 2, 3]), st.booleans())
def test_splits_and_joins(pieces, part, leading):
    sizes = [piece * part for piece in pieces]
    shape = (sum(sizes), 4) if leading else (4, sum(sizes))
    dim = 0 if leading else -1
    x = numbered(*shape)
    check_rule(aten.split_with_sizes.default, (x, sizes, dim), axis_sizes=(2, 3), joint=4)
    check_rule(aten.cat.default, (list(x.split(sizes, dim)), dim), axis_sizes=(2, 3), joint=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 3), min_size=3, max_size=4))
def test_repeats_and_expansions(shape, repeats):
    x = numbered(*shape)
    check_rule(aten.repeat.default, (x, repeats), axis_sizes=(2, 3), joint=4)
    target = [*repeats, *(size if size > 1 else 3 for size in shape)]
    check_rule(aten.expand.default, (x, target), axis_sizes=(2, 3), joint=4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.sampled_from([2, 3, 4, 5]))
def test_grouped_queries(kv_heads, group, causal, count):
    q, k = torch.randn(2, kv_heads * group, 3, 2, dtype=torch.float64), torch.randn(2, kv_heads, 3, 2).double()
    options = {"is_causal": causal, "enable_gqa": True}
    check_rule(aten.scaled_dot_product_attention.default, (q, k, k), options, axis_sizes=(count,), joint=4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(1, 4), max_size=2), st.sampled_from([2, 3, 4, 7]))
def test_vocabularies(rows, shape, count):
    index = torch.randint(0, rows, shape)
    check_rule(aten.embedding.default, (numbered(rows, 3), index), axis_sizes=(count,), joint=4)
