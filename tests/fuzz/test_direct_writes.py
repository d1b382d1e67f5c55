"""Writes on the direct way into ATen: indexes, `out=` and views taken back are expanded as the general way does.

In: assignments to indexes, functions with `out=`, and views with new values of different strides, on tensors that are
contiguous, permuted and with gaps. Out: failures that name the case and the first difference.
"""

import sys
from pathlib import Path

import pytest
import torch

from dtorch.capture import direct, expand
from dtorch.capture.expand import Operation
from dtorch.capture.record import Scan
from dtorch.capture.symbol import meta_of
from dtorch.capture.undo import scatter_through

sys.path.insert(0, str(Path(__file__).parent))
from functions import Case  # noqa: E402
from test_direct import CPU, difference, listed, opened, turned, wide  # noqa: E402

SET = torch.Tensor.__setitem__
ALL = slice(None)
X, Y, ROW, COLUMN, WHOLE = torch.rand(5, 7), torch.rand(5, 7), torch.rand(7), torch.rand(5), torch.arange(35).view(5, 7)
INDEX, MASK = torch.tensor([0, 3]), torch.rand(5, 7) > 0.5

INDEXES = [1, -1, slice(0, 2), slice(1, None, 2), (ALL, 0), (ALL, slice(2, 5)), (2, 3), ..., (..., 1), ALL, (None, 2)]
WRITES = {
    **{f"x[{index}] = {value}": (SET, (x, index, value))
       for index in INDEXES for x, value in ((X, 1.5), (X, 3), (X, 0.1), (WHOLE, 3), (WHOLE, 2.7), (X, True))},
    **{f"x[{index}] = {name}": (SET, (X, index, value))
       for index, name, value in ((1, "row", ROW), (slice(0, 2), "row", ROW), ((ALL, 0), "column", COLUMN),
                                  (slice(0, 2), "rows", X[:2] * 2), ((ALL, slice(0, 2)), "cut", Y[:, 3:5]),
                                  (0, "integers", WHOLE[0]), (..., "like", Y), (0, "number", ROW[0]),
                                  (..., "number", ROW[0]), (1, "own", X[2]))},
    "x[index] = rows": (SET, (X, INDEX, Y[:2])),
    "x[index] = 1": (SET, (X, INDEX, 1.0)),
    "x[:, index] = 1": (SET, (X, (ALL, INDEX), 1.0)),
    "x[0, index] = 1": (SET, (X, (0, INDEX), 1.0)),
    "x[mask] = 1": (SET, (X, MASK, 1.0)),
    "add to a view": (lambda x: (x[0].add_(1), None)[1], (X,)),
    "scale a view": (lambda x, y: (x[:, 1:3].mul_(y[:, :2]), None)[1], (X, Y)),
    "fill a view": (lambda x: (x.t()[1].zero_(), None)[1], (X,)),
    "write twice": (lambda x: (x[0].add_(1), x[1].add_(1), None)[2], (X,)),
    "write and read": (lambda x: (x[0].add_(1), x.sum())[1], (X,)),
    "read and write": (lambda x, y: (y.add_(x.sum()), x[0].copy_(y[0]), None)[2], (X, Y)),
    "add out": (lambda x, y, out: torch.add(x, y, out=out), (X, Y, X + 0)),
    "mm out": (lambda x, y, out: torch.mm(x, y.t(), out=out), (X, Y, torch.rand(5, 5))),
    "sum out": (lambda x, out: torch.sum(x, 0, out=out), (X, ROW)),
    "sum of another dtype": (lambda x, out: torch.sum(x, 0, out=out), (X, ROW.double())),
    "out of a view": (lambda x, y: torch.neg(y[0], out=x[1]), (X, Y)),
    "out is in": (lambda x, y: torch.add(x, y, out=x), (X, Y)),
    "max out": (lambda x, a, b: torch.max(x, 1, out=(a, b)), (X, COLUMN, WHOLE[:, 0].contiguous())),
}  # fmt: skip


@pytest.mark.parametrize("change", [lambda tensor: tensor, turned, wide], ids=["contiguous", "turned", "wide"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_expanded_as_the_general_way_does(name, change):
    function, args = WRITES[name]
    case = Case(name, function, args)
    try:
        opened(case, change)[0].probe()
    except (RuntimeError, IndexError):
        return
    short, long = opened(case, change)
    if not direct.look(short):
        assert short.expansion is None and not short.results
        return
    assert difference(short, long) is None


def test_plain_assignments_and_out_are_understood_directly():
    plain = ["x[1] = 1.5", "x[(slice(None, None, None), 0)] = column", "x[slice(0, 2, None)] = row", "x[1] = row"]
    for name in (*plain, "x[Ellipsis] = 3", "x[index] = rows", "add out", "mm out", "sum out", "out is in"):
        assert direct.look(opened(Case(name, *WRITES[name]), lambda tensor: tensor)[0]), name


VIEWS = {
    "select": lambda x: x[1], "select the last": lambda x: x[-1], "slice": lambda x: x[1:3],
    "step": lambda x: x[:, ::2], "slice the end": lambda x: x[..., -2:], "slice and select": lambda x: x[:, 1:3, 0],
    "none": lambda x: x[None, :, 1], "mT": lambda x: x.mT, "transpose": lambda x: x.transpose(-1, 0),
    "permute": lambda x: x.permute(2, -3, 1), "unsqueeze": lambda x: x.unsqueeze(-1), "view": lambda x: x.view(-1),
    "view of two": lambda x: x.view(2, -1), "flatten": lambda x: x.flatten(1), "t": lambda x: x[0].t(),
    "unflatten": lambda x: x.unflatten(-1, (2, -1)), "narrow": lambda x: x.narrow(1, 1, 2),
    "diagonal": lambda x: x.diagonal(), "another diagonal": lambda x: x.diagonal(1, 0, 2),
    "split": lambda x: x.split(2, 1), "unbind": lambda x: x.unbind(1), "squeeze": lambda x: x[:, :1].squeeze(1),
    "movedim": lambda x: x.movedim(0, -1), "detach": lambda x: x.detach(), "bits": lambda x: x.view(torch.int32),
    "reshape": lambda x: x.reshape(x.shape[0], -1), "select of turned": lambda x: x.transpose(0, 1)[1],
    "all": lambda x: x[:], "element of a view": lambda x: x.view(-1)[3], "element": lambda x: x[0, 1, 2],
    "windows": lambda x: x.unfold(1, 2, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_taken_back_as_the_general_way_does(name, monkeypatch):
    bases = (torch.rand(3, 4, 6), torch.rand(6, 4, 3).permute(2, 1, 0), torch.rand(3, 4, 12)[..., ::2])
    understood = 0
    for base in bases:
        metas = (meta_of(base, CPU),)
        called = Operation(VIEWS[name], Scan((base,), {}).args, {}, metas)
        try:
            called.probe()
        except (RuntimeError, ValueError):
            continue
        position = len(called.results) - 1
        meta = called.results[position]
        back = tuple(range(len(meta.shape) - 1, -1, -1))
        strange = torch.empty(meta.shape[::-1], dtype=meta.dtype).permute(back)
        for value in (meta, meta_of(torch.empty(meta.shape, dtype=meta.dtype)), meta_of(strange)):
            expansion = called.expand()
            short = scatter_through(expansion, metas, expansion.outputs[called.output_of(position)], 0, value)
            if short is not None:
                understood += 1
                monkeypatch.setattr(expand, "scatter_through", lambda *_: None)
                long = called.scatter(position, value)
                monkeypatch.undo()
                assert listed(short) == listed(long) and short.outputs == long.outputs
    assert understood or name in ("split", "unbind", "detach", "bits", "windows")
