"""Shared scalars: numbers that come again become one tensor, with the bits that torch gives for the number itself."""

from __future__ import annotations

import math

import pytest
import torch
from golden_files import check_golden
from graph_building import GraphBuilder, aten, nodes_of, run_graph, same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule

from dtorch.ir.snapshot import take_snapshot
from dtorch.ir.verify import verify
from dtorch.passes.base import PassContext
from dtorch.passes.manager import PassManager
from dtorch.passes.pipeline import PassPipeline
from dtorch.passes.share_scalars import OPERATIONS, ShareScalars
from dtorch.report.diff import diff_snapshots

Number = float | int | bool


def graph_of(target: object, number: Number, dtype: torch.dtype, *shape: int, times: int = 2) -> GraphModule:
    b = GraphBuilder()
    x = b.input("x", *shape, dtype=dtype)
    return b.done(*[b.call(target, x if i == 0 else b.call(aten.neg.default, x), number) for i in range(times)])


def applied(graph_module: GraphModule) -> int:
    made = PassManager(PassPipeline((ShareScalars(),)), PassContext()).run(graph_module, "local")
    verify(graph_module, "local", deep=True)
    return made


def test_the_pass_before_and_after() -> None:
    b = GraphBuilder()
    x, y = b.input("x", 2, 4), b.input("y", 4, dtype=torch.float64)
    half = b.call(aten.mul.Tensor, x, 0.5)
    once = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, half, 0.5), 3)
    zero = b.call(aten.add.Tensor, once, 0.0)
    other = b.call(aten.mul.Tensor, y, 0.5)
    graph_module = b.done(b.call(aten.add.Tensor, zero, -0.0), b.call(aten.sub.Tensor, other, 0.5))
    before = take_snapshot(graph_module, "lower", "local")
    assert applied(graph_module) == 4
    after = take_snapshot(graph_module, "share_scalars", "local")
    check_golden("share_scalars.diff", diff_snapshots(before, after, context=1))


NUMBERS = st.one_of(
    st.floats(width=32), st.floats(), st.integers(-(2**70), 2**70), st.integers(-5, 5), st.booleans(),
    st.sampled_from([math.nan, math.inf, -0.0, 1e300, 1e-300, 2**24 + 1, 2**53 + 1]),
)  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


@given(st.sampled_from(sorted(OPERATIONS, key=str)), NUMBERS, st.sampled_from(DTYPES), st.sampled_from([(), (7,)]))
def test_results_keep_every_bit(target: object, number: Number, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    try:
        graph_module = graph_of(target, number, dtype, *shape)
        x = (torch.randn(shape) * 3).to(dtype)
        expected = run_graph(graph_module, x)
    except (RuntimeError, OverflowError):  # torch does not take this number: then the pass meets no such graph
        return
    applied(graph_module)
    assert all(map(same_bits_of_any, expected, run_graph(graph_module, x)))


def same_bits_of_any(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return same_bits(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_only_single_and_double_precision_is_touched(dtype: torch.dtype) -> None:
    assert applied(graph_of(aten.mul.Tensor, 3, dtype, 4)) == 0


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e300, 2**24 + 1, True])
def test_numbers_that_the_dtype_may_hold_otherwise_are_left_alone(number: Number) -> None:
    assert applied(graph_of(aten.add.Tensor, number, torch.float32, 4)) == 0


def test_a_number_that_comes_once_is_left_alone() -> None:
    assert applied(graph_of(aten.add.Tensor, 0.5, torch.float32, 4, times=1)) == 0


def test_one_and_one_point_zero_are_one_tensor_and_the_two_zeros_are_two() -> None:
    b = GraphBuilder()
    x = b.input("x", 3)
    graph_module = b.done(*[b.call(aten.add.Tensor, x, number) for number in (1, 1.0, 0.0, 0.0, -0.0, -0.0)])
    assert applied(graph_module) == 6 and len(nodes_of(graph_module, aten.scalar_tensor.default)) == 3
