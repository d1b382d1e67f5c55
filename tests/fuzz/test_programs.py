"""Random programs against torch eager: ops, views of views, writes at every level, reads and redistributes.

In: lists of steps that Hypothesis draws. A step names what it does and which earlier tensors it takes; the same list
runs on plain tensors and on distributed ones. Out: every tensor that is alive at the end, and every value read, are
equal: on one device bit for bit. A second run compiles nothing.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.sharding.check import difference

MESHES = {shape: dtorch.init_device_mesh("cpu", shape) for shape in ((1,), (2,), (3,), (2, 2))}
ROWS, COLUMNS = 5, 7
STEPS = 14


@dataclass(frozen=True)
class Step:
    """One step: `kind` of STEP, operands by number (modulo how many there are), and numbers that steer it."""

    kind: str
    first: int
    second: int
    number: int
    value: float


def bring(value, like):
    """The other operand in a shape that broadcasts: its mean, or itself."""
    return value if value.shape == like.shape else value.mean().to(like.dtype)


UNARY = [torch.sin, torch.relu, torch.neg, torch.tanh, torch.abs, torch.sigmoid, torch.clone, lambda x: x.softmax(-1)]
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, lambda x, y: torch.where(x > y, x, y), torch.minimum]
WRITES = [
    lambda x, v: x.add_(v), lambda x, v: x.mul_(v), lambda x, v: x.zero_(), lambda x, v: x.tanh_(),
    lambda x, v: x.clamp_(-1, 1), lambda x, v: x.fill_(v), lambda x, v: x.masked_fill_(x > v, v),
]  # fmt: skip


def unary(x, y, step, run):
    return UNARY[step.number % len(UNARY)](x) if x.dim() else x.exp().clamp(max=3)


def binary(x, y, step, run):
    return BINARY[step.number % len(BINARY)](x, bring(y, x))


def scalar(x, y, step, run):
    return x * step.value + step.number


def view(x, y, step, run):
    """Views: the results alias x."""
    if x.dim() == 0:
        return x.view(1)
    dim = step.number % x.dim()
    size = x.shape[dim]
    forms = [
        lambda: x.transpose(0, -1), lambda: x.unsqueeze(dim), lambda: x.flatten() if x.is_contiguous() else x.detach(),
        lambda: x.narrow(dim, size // 2, size - size // 2), lambda: x[::2], lambda: x[..., -1:],
        lambda: x.select(dim, size - 1), lambda: x.view(-1, 1) if x.is_contiguous() else x.transpose(-1, 0),
        lambda: x.chunk(2, dim)[0], lambda: x.diagonal() if x.dim() == 2 else x[:1],
        lambda: x.expand(2, *x.shape)[1] + 0, lambda: x[None, ...], lambda: x.unbind(dim)[0],
    ]  # fmt: skip
    return forms[step.second % len(forms)]()


def write(x, y, step, run):
    WRITES[step.number % len(WRITES)](x, step.value)


def write_tensor(x, y, step, run):
    other = bring(y, x).clone()
    [x.add_, x.copy_, x.mul_, x.sub_][step.number % 4](other)


def write_out(x, y, step, run):
    if x.is_contiguous():
        torch.tanh(x.clone(), out=x)


def assign(x, y, step, run):
    if x.dim() == 0:
        return
    size = x.shape[0]
    value = step.value if step.second % 2 else y.mean().to(x.dtype)
    index = [0, -1, slice(0, None, 2), slice(size // 2, None), (..., 0), torch.tensor([size - 1, 0]), x > 0]
    x[index[step.number % len(index)]] = value


def reduce(x, y, step, run):
    if x.dim() == 0:
        return x * 2
    dim = step.number % x.dim()
    return [
        lambda: x.sum(dim), lambda: x.mean(dim, keepdim=True), lambda: x.amax(dim), lambda: x.sum(),
        lambda: x.cumsum(dim), lambda: x.var(dim, correction=0), lambda: x.max(dim).values,
    ][step.second % 7]()  # fmt: skip


def cast(x, y, step, run):
    return x.float().double() if step.number % 2 else (x * 4).round().long().double()


def matmul(x, y, step, run):
    if x.dim() == 2 and y.dim() == 2 and x.shape[1] == y.shape[1]:
        return (x @ y.t()).tanh()
    return x @ x.transpose(-1, -2) * 0.1 if x.dim() >= 2 else x * 2


def join(x, y, step, run):
    if x.dim() == 0:
        return torch.stack([x, x + 1])
    other = y if y.shape == x.shape else x.flip(0)
    return (torch.cat if step.number % 2 else torch.stack)([x, other], 0)


def part(x, y, step, run):
    return x.split(2, 0)[-1] if x.dim() else x.reshape(1)


def index(x, y, step, run):
    if x.dim() == 0:
        return x + 0
    rows = torch.tensor([x.shape[0] - 1, 0, 0])
    ways = (
        lambda: x[rows],
        lambda: x.index_select(0, rows),
        lambda: x.flip(0),
        lambda: x.roll(1, 0),
        lambda: x[step.first % 1],
    )
    return ways[step.number % 5]()


def read(x, y, step, run):
    """Reads that the program's course depends on; rounded, so that meshes take the same course."""
    run.values.append(round(x.mean().item(), 6) if step.number % 2 else bool((x.sum() > 100).any()))


def settle(x, y, step, run):
    """Redistribute: a copy for torch."""
    return run.moved(x, step)


def drop(x, y, step, run):
    run.dropped = True


KINDS = [
    unary, binary, scalar, view, view, view, write, write, write_tensor, write_out, assign, assign, reduce, cast,
    matmul, join, part, index, read, settle, settle, drop,
]  # fmt: skip
NAMED = {kind.__name__: kind for kind in KINDS}


class Run:
    """One run of a program, on plain tensors (`mesh` None) or on a mesh. `complaints` of steps that failed."""

    def __init__(self, mesh, placement_seed):
        self.mesh, self.draw = mesh, random.Random(placement_seed)
        self.values: list[Any] = []
        self.dropped = False
        self.failed: list[str] = []

    def placements(self, tensor):
        options = [Replicate(), Partial(), *(Shard(dim) for dim in range(tensor.dim()))]
        return [self.draw.choice(options) for _ in range(self.mesh.ndim)]

    def given(self, tensor):
        if self.mesh is None:
            return tensor.clone()
        return dtorch.distribute_tensor(tensor, self.mesh, self.placements(tensor))

    def moved(self, x, step):
        x = x.clone(memory_format=torch.contiguous_format)  # torch's clone and redistribute differ in strides of views
        return x if self.mesh is None else x.redistribute(placements=self.placements(x))

    def __call__(self, steps):
        torch.manual_seed(0)
        base = torch.arange(ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS)
        pool = [self.given(torch.sin(base)), self.given(torch.cos(base * 0.7)), self.given(torch.sin(base[0] * 3))]
        for step in steps:
            x, y = pool[step.first % len(pool)], pool[step.second % len(pool)]
            try:
                made = NAMED[step.kind](x, y, step, self)
            except RuntimeError as error:  # what torch refuses (a write to an expanded view), the other must refuse too
                self.failed.append(f"{step.kind}: {type(error).__name__}")
                continue
            if self.dropped and len(pool) > 3:
                pool.pop(step.first % len(pool))
            self.dropped = False
            if made is not None and made.numel() < 400 and made.dim() < 5:
                pool.append(made)
        return pool


def compare(steps, shape, seed):
    """Run on torch and on a mesh, compare everything; run again: equal, and nothing is compiled."""
    plain, distributed = Run(None, 0), Run(MESHES[shape], seed)
    wanted = plain(steps)
    found = distributed(steps)
    assert plain.failed == distributed.failed
    assert [each.shape for each in wanted] == [each.shape for each in found]
    # a long sum in parts differs in its last bits, and steps multiply it
    tolerance = 0.0 if shape == (1,) else 1e-6
    first = []
    for number, (a, b) in enumerate(zip(wanted, found)):
        value = b.to_torch()
        first.append(value)
        assert value.dtype is a.dtype, number
        assert difference(value, a) <= tolerance, f"tensor {number} of {shape}: {difference(value, a)}\n{value}\n{a}"
        if shape == (1,):
            assert b.stride() == a.stride(), number
    assert plain.values == pytest.approx(distributed.values, abs=1e-5)
    del found
    controller = dtorch.default_graph().controller
    compiled = controller.compiled
    again = Run(MESHES[shape], seed)
    for value, other in zip(first, again(steps), strict=True):
        assert torch.equal(value, other.to_torch())
    assert controller.compiled == compiled, "the second run compiled"
    Run(MESHES[shape], seed)(steps)  # and once with nothing read at the end
    dtorch.sync()


steps = st.builds(
    Step,
    st.sampled_from([kind.__name__ for kind in KINDS]),
    st.integers(0, 11),
    st.integers(0, 12),
    st.integers(0, 13),
    st.sampled_from([0.5, -0.25, 1.5, 2.0]),
)
programs = st.lists(steps, min_size=3, max_size=STEPS)


@pytest.mark.parametrize("shape", list(MESHES), ids=str)
def test_random_programs_give_what_torch_gives(shape):
    @settings(max_examples=125, deadline=None)
    @given(programs, st.integers(0, 1000))
    def run(steps, seed):
        compare(steps, shape, seed)

    run()
