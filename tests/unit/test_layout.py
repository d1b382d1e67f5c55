"""Layouts against torch: local parts are nested torch.chunk, and the parts of all devices make up the whole."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.ir.layout import (
    PENDING,
    WHOLE,
    Split,
    chunk_bounds,
    is_even,
    local_shape,
    put_local,
    take_local,
)

mesh_shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def coordinates(mesh_shape):
    return itertools.product(*map(range, mesh_shape))


def numbered(shape):
    return torch.arange(math.prod(shape)).reshape(shape)


def piece(tensor, count, index, dim):
    """Piece `index` of torch.chunk, which leaves out empty pieces at the end."""
    if tensor.shape[dim] == 0:
        return tensor
    pieces = torch.chunk(tensor, count, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, tensor.shape[dim], 0)


def by_chunks(tensor, spec, mesh_shape, coordinate):
    """The oracle: every axis in mesh order cuts what the ones before it left, an interval at a time."""
    for dim in range(tensor.dim()):
        cuts = [(axis, placed) for axis, placed in enumerate(spec) if isinstance(placed, Split) and placed.dim == dim]
        if not cuts:
            continue
        keep = torch.ones(tensor.shape[dim], dtype=torch.bool)
        for interval in {(placed.outer, placed.unit) for _, placed in cuts}:
            outer, unit = interval
            parts = torch.arange(tensor.shape[dim] // (outer * unit))
            for axis, placed in cuts:
                if (placed.outer, placed.unit) == interval:
                    parts = piece(parts, mesh_shape[axis], coordinate[axis], 0)
            element = torch.arange(tensor.shape[dim]) // unit % max(tensor.shape[dim] // (outer * unit), 1)
            keep &= torch.isin(element, parts)
        tensor = tensor.index_select(dim, keep.nonzero().flatten())
    return tensor


def check(shape, spec, mesh_shape):
    whole = numbered(shape)
    assembled = torch.full_like(whole, -1)
    for coordinate in coordinates(mesh_shape):
        local = take_local(whole, spec, mesh_shape, coordinate)
        assert torch.equal(local, by_chunks(whole, spec, mesh_shape, coordinate)), coordinate
        assert local_shape(shape, spec, mesh_shape, coordinate) == tuple(local.shape), coordinate
        put_local(assembled, local, spec, mesh_shape, coordinate)
    assert torch.equal(assembled, whole)
    for dim, size in enumerate(shape):
        sizes = {local_shape(shape, spec, mesh_shape, each)[dim] for each in coordinates(mesh_shape)}
        if is_even(size, dim, spec, mesh_shape):
            assert len(sizes) == 1


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_bounds_are_torch_chunk(parts, count):
    for index in range(count):
        begin, end = chunk_bounds(parts, count, index)
        assert torch.equal(torch.arange(begin, end), piece(torch.arange(parts), count, index, 0))


@given(st.data(), st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), mesh_shapes)
def test_plain_shards_are_chunks_nested_in_mesh_order(data, shape, mesh_shape):
    """Sizes uneven, smaller than the axis and zero; any number of axes on one dimension."""
    placed = st.sampled_from([WHOLE, PENDING, *(Split(dim) for dim in range(len(shape)))])
    spec = tuple(data.draw(placed) for _ in mesh_shape)
    check(shape, spec, mesh_shape)
    whole = numbered(shape)
    for coordinate in coordinates(mesh_shape):
        expected = whole
        for axis, each in enumerate(spec):
            if isinstance(each, Split):
                expected = piece(expected, mesh_shape[axis], coordinate[axis], each.dim)
        assert torch.equal(take_local(whole, spec, mesh_shape, coordinate), expected)


@given(st.integers(1, 4), st.integers(0, 6), st.integers(1, 4), mesh_shapes, st.integers(0, 1))
def test_one_interval_may_be_cut_by_several_axes(outer, parts, unit, mesh_shape, dim):
    shape = [2, 2]
    shape[dim] = outer * parts * unit
    check(tuple(shape), (Split(dim, outer, unit),) * len(mesh_shape), mesh_shape)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.data())
def test_different_intervals_of_one_dimension_are_cut_independently(factors, data):
    """A dimension that is a product of factors, as (batch heads head_dim), cut in some of them."""
    count = data.draw(st.integers(1, 3))
    chosen = [data.draw(st.integers(0, len(factors) - 1)) for _ in range(count)]
    mesh_shape = tuple(data.draw(st.integers(1, 4)) for _ in chosen)
    spec = tuple(Split(1, math.prod(factors[:index]), math.prod(factors[index + 1 :])) for index in chosen)
    check((2, math.prod(factors)), spec, mesh_shape)


def test_the_examples_of_the_docstring_hold():
    heads = take_local(numbered((576,)), (Split(0, unit=64),), (2,), (0,))
    assert heads.shape == (5 * 64,)
    qkv = numbered((3, 4, 2)).flatten()
    mine = take_local(qkv, (Split(0, outer=3, unit=2),), (2,), (1,))
    assert torch.equal(mine, qkv.view(3, 4, 2)[:, 2:].flatten())


def test_a_contiguous_cut_is_a_view():
    whole = numbered((6, 4))
    assert take_local(whole, (Split(0), Split(1)), (2, 2), (1, 1)).untyped_storage().data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sizes_below_the_axis_leave_devices_empty(size):
    sizes = [local_shape((size,), (Split(0),), (4,), (index,))[0] for index in range(4)]
    assert sizes == [1] * size + [0] * (4 - size)
    assert not is_even(size, 0, (Split(0),), (4,))
