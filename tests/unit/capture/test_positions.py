"""Integers in indexes that change from call to call: torch's results, views that alias, two programs for all values.

In: small programs with a number t, run for several t on tensors in all placements. Out: differences from torch, and
recompilations after the second value.
"""

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard

MESHES = {size: dtorch.init_device_mesh("cpu", (size,)) for size in (1, 2, 3)}
PLAIN = torch.arange(35.0).reshape(5, 7) / 10
CUBE = torch.arange(105.0).reshape(5, 3, 7) / 7


def dist(value=PLAIN, placement=None, size=2):
    return dtorch.distribute_tensor(value.clone(), MESHES[size], [placement or Replicate()])


def compiled():
    return dtorch.default_graph().controller.compiled


def plain(value):
    return value.to_torch() if isinstance(value, dtorch.Tensor) else value


READS = {
    "x[t]": lambda x, t: x[t],
    "x[:, t]": lambda x, t: x[:, t],
    "x[..., t]": lambda x, t: x[..., t],
    "x[t - 5]": lambda x, t: x[t - 5],
    "x[t, t + 1]": lambda x, t: x[t, t + 1],
    "x[t, 1:3]": lambda x, t: x[t, 1:3],
    "x[2, t]": lambda x, t: x[2, t],
    "x[:, None, t]": lambda x, t: x[:, None, t],
    "x[None, ..., t]": lambda x, t: x[None, ..., t],
    "x[:, t:t + 2]": lambda x, t: x[:, t : t + 2],
    "x[:, t:t + 1]": lambda x, t: x[:, t : t + 1],
    "x[1:4, t:t + 3:2]": lambda x, t: x[1:4, t : t + 3 : 2],
    "x[t - 7:t - 5]": lambda x, t: x[:, t - 7 : t - 5],
    "x[t:t + 1, t:t + 2]": lambda x, t: x[t : t + 1, t : t + 2],
    "x.select": lambda x, t: x.select(1, t),
    "torch.select": lambda x, t: torch.select(x, -2, t),
    "x.narrow": lambda x, t: x.narrow(1, t, 2),
    "torch.narrow": lambda x, t: torch.narrow(x, 0, t, 1),
    "x.t()[t]": lambda x, t: x.t()[t],
    "x[1:][t - 1]": lambda x, t: x[1:][t - 1],
    "x.expand": lambda x, t: x.unsqueeze(0).expand(3, 5, 7)[:, t, 1:],
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
@pytest.mark.parametrize("name", READS)
def test_reads_at_a_changing_place_give_the_view_and_two_programs(name, placement):
    read = READS[name]
    for size in (2, 3):
        x = dist(placement=placement, size=size)
        counts, first = [], None
        for t in range(5):
            got, wanted = read(x, t), read(PLAIN, t)
            assert got.shape == wanted.shape and got.stride() == wanted.stride() and got.dtype == wanted.dtype
            first = first or got.placements
            assert got.placements == first
            assert torch.equal((got * 1.5).to_torch(), wanted * 1.5), (name, size, t)
            counts.append(compiled())
        assert counts[1:] == [counts[1]] * 4, counts


def _chain(x, t):
    turned = x.t()
    rows = turned[1:]
    rows[t].mul_(3)
    rows[t, 1:3] += t + 0.5
    x[t] -= 1.0
    return turned.sum(0), rows, x[t]


def _kept(x, t):
    row, column = x[t], x[:, t]
    row.add_(1.0)
    column *= 2.0
    x[t, t] = 9.5
    return row, column, x[t, t]


def _copied(x, t):
    x[:, t : t + 2] = x[:, t + 1 : t + 3] * 2.0
    x[:, t].copy_(x[:, 0])
    x.select(0, t).zero_()
    x.narrow(1, t, 2).add_(0.25)


WRITES = {
    "x[:, t] = number": lambda x, t: x.__setitem__((slice(None), t), 2.5),
    "x[t] = row": lambda x, t: x.__setitem__(t, x[0] * 2.0),
    "x[t] = column": lambda x, t: x.__setitem__(t, x[0, :1]),
    "x[t] = [[row]]": lambda x, t: x.__setitem__(t, x[None, None, 1]),
    "x[t, 1:3] += number": lambda x, t: x[t, 1:3].add_(1.0),
    "x[t, t] = number": lambda x, t: x.__setitem__((t, t), 1.5),
    "x[:, t:t + 2] = x": lambda x, t: x.__setitem__((slice(None), slice(t, t + 2)), x[:, 5:7]),
    "x[-1, t] = x": lambda x, t: x.__setitem__((-1, t), x[t, 2]),
    "views of views": _chain,
    "kept views": _kept,
    "copies": _copied,
    "below an expanded view": lambda x, t: x[:, :1].expand(5, 4)[t].fill_(3.5),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_writes_at_a_changing_place_reach_the_base_by_two_programs(name, placement):
    write = WRITES[name]
    for size in (1, 2):
        mine, theirs = dist(placement=placement, size=size), PLAIN.clone()
        counts = []
        for t in range(4):
            got, wanted = write(mine, t), write(theirs, t)
            for a, b in zip(got, wanted) if type(got) is tuple else ():
                torch.testing.assert_close(plain(a), b, rtol=0, atol=0 if placement.is_replicate() else 1e-5)
                assert a.stride() == b.stride()
            assert torch.equal(mine.to_torch(), theirs), (name, t)
            assert mine.placements == (placement,)
            counts.append(compiled())
        assert counts[1:] == [counts[1]] * 3, counts


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.complex64], ids=str)
def test_any_dtype_is_indexed_at_a_changing_place(dtype):
    values = (PLAIN * 3).to(dtype)
    mine, theirs = dist(values), values.clone()
    for t in range(4):
        for x in (mine, theirs):
            x[:, t] = x[:, t + 1]
        assert torch.equal(mine[t].to_torch(), theirs[t]) and torch.equal(mine.to_torch(), theirs)


def test_elements_come_out_as_0d_tensors_and_numbers():
    x = dist(PLAIN[0])
    assert [x[t].item() for t in range(2)] == PLAIN[0, :2].tolist()
    with dtorch.assert_no_recompile():
        assert [x[t].item() for t in range(7)] == PLAIN[0].tolist()
    assert x[3].shape == () and x[-3].item() == PLAIN[0, -3]


def test_what_is_out_of_range_is_an_index_error_on_the_users_line():
    x = dist()
    for t in range(3):
        x[:, t].to_torch()
    for t in (7, 8, -8):
        with pytest.raises(IndexError, match="out of bounds"):
            x[:, t]
        with pytest.raises(IndexError):
            x.select(1, t)
        with pytest.raises(IndexError):
            x[:, t] = 0.0
    with pytest.raises(RuntimeError, match=r"narrow|exceeds"):
        for t in (1, 2, 6):
            x.narrow(1, t, 2).to_torch()
    with pytest.raises(IndexError):
        x[1, 2, 3]


def test_a_decode_loop_has_no_new_programs_after_its_second_step():
    layers, heads, length, size = 3, 2, 8, 4
    torch.manual_seed(0)
    weights = [torch.randn(size * heads, size * heads) / 3 for _ in range(layers)]
    caches = [torch.zeros(2, heads, length, size) for _ in range(layers)]

    def step(x, weights, caches, t):
        for weight, cache in zip(weights, caches):
            new = (x @ weight).view(2, heads, size)
            cache[:, :, t] = new
            cache[:, :, t : t + 1] *= 0.5
            seen = torch.softmax((cache * new.unsqueeze(2)).sum(-1), -1)
            x = x + (seen.unsqueeze(-1) * cache).sum(2).reshape(2, -1) + cache[:, :, t].reshape(2, -1)
        return x

    start = torch.randn(2, heads * size)
    mine = [dist(weight) for weight in weights], [dist(cache, Shard(1)) for cache in caches]
    x, wanted = dist(start), start
    for t in range(2):
        x, wanted = step(x, *mine, t), step(wanted, weights, caches, t)
        torch.testing.assert_close(x.to_torch(), wanted)
    with dtorch.assert_no_recompile():
        for t in range(2, 8):
            x, wanted = step(x, *mine, t), step(wanted, weights, caches, t)
            torch.testing.assert_close(x.to_torch(), wanted)


def test_a_loop_over_rows_that_is_one_program_keeps_its_integers():
    x = dist()

    def rounds(x, count):
        total = x[0] * 0.0
        for t in range(count):
            total = total + x[t] * x[:, t].sum()
        return total

    for _ in range(3):
        assert torch.equal(rounds(x, 5).to_torch(), rounds(PLAIN, 5))
    segments = dtorch.default_graph().segments()
    assert "index_select" not in str(segments[-1].graph("capture"))


def test_integers_change_inside_a_longer_trace_without_a_read():
    x, total, wanted = dist(CUBE), dist(CUBE[:, 0]), CUBE[:, 0].clone()
    for _ in range(3):
        for t in range(3):
            total, wanted = total + x[:, t] * x[t, 0, 0], wanted + CUBE[:, t] * CUBE[t, 0, 0]
        torch.testing.assert_close(total.to_torch(), wanted)
