"""Random programs of views and in-place writes, recorded and run, equal torch eager bit for bit."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreting import assert_same, captured, run_traced
from torch import nn

VIEWS = {
    "transpose": lambda t, n: t.transpose(0, -1),
    "row": lambda t, n: t[n % t.shape[0]] if t.dim() > 1 else t,
    "slice": lambda t, n: t[n % t.shape[0] :],
    "stride": lambda t, n: t[::2],
    "last": lambda t, n: t[..., n % t.shape[-1] :],
    "flat": lambda t, n: t.reshape(-1),
    "unsqueeze": lambda t, n: t.unsqueeze(n % (t.dim() + 1)),
    "permute": lambda t, n: t.permute(*range(t.dim())[::-1]),
    "chunk": lambda t, n: t.chunk(2, 0)[0],
    "detach": lambda t, n: t.detach(),
    "contiguous": lambda t, n: t.contiguous(),
    "diagonal": lambda t, n: t.diagonal() if t.dim() > 1 else t,
    "unbind": lambda t, n: t.unbind(0)[0] if t.dim() > 1 else t,
    "same": lambda t, n: t.to(t.dtype),
}
WRITES = {
    "add_": lambda t, o, n: t.add_(n),
    "mul_": lambda t, o, n: t.mul_(0.5),
    "zero_": lambda t, o, n: t.zero_(),
    "fill_": lambda t, o, n: t.fill_(n),
    "copy_": lambda t, o, n: t.copy_(o.sum()),
    "row": lambda t, o, n: t.__setitem__(n % t.shape[0], o.mean()),
    "slice": lambda t, o, n: t.__setitem__(slice(0, None, 2), float(n)),
    "mask": lambda t, o, n: t.masked_fill_(t > n, -1.0),
    "iadd": lambda t, o, n: t.__iadd__(o.amax()),
    "index": lambda t, o, n: t.index_fill_(0, torch.tensor([n % t.shape[0]]), 2.0),
    "setmask": lambda t, o, n: t.__setitem__(t < 0, 0.25),
    "relu_": lambda t, o, n: torch.relu_(t),
    "out": lambda t, o, n: torch.mul(t.clone(), 2, out=t),
    "data": lambda t, o, n: t.data.add_(1),
}
VALUES = {
    "sum": lambda t, o, n: t.sum(0, keepdim=True),
    "double": lambda t, o, n: t * 2,
    "softmax": lambda t, o, n: t.softmax(-1),
    "clone": lambda t, o, n: t.clone(),
    "like": lambda t, o, n: torch.empty_like(t).copy_(t),
    "plus": lambda t, o, n: t + o.sum(),
    "matmul": lambda t, o, n: t.reshape(t.shape[0], -1) @ t.reshape(t.shape[0], -1).mT,
}

STEPS = st.one_of(
    *(
        st.tuples(
            st.just(kind), st.sampled_from(sorted(table)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)
        )
        for kind, table in (("view", VIEWS), ("write", WRITES), ("write", WRITES), ("value", VALUES))
    )
)


class Program(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.register_buffer("state", torch.arange(12.0).reshape(3, 4) / 7)

    def forward(self, x, y):
        live = [x, y, self.state, x.transpose(0, 1)]
        for kind, name, first, second, number in self.steps:
            tensor, other = live[first % len(live)], live[second % len(live)]
            if kind == "view":
                live.append(VIEWS[name](tensor, number))
            elif kind == "value":
                live.append(VALUES[name](tensor, other, number))
            else:
                WRITES[name](tensor, other, number)
        return live


@settings(max_examples=60)
@given(st.lists(STEPS, min_size=1, max_size=10))
def test_views_and_writes_equal_eager(steps):
    generator = torch.Generator().manual_seed(0)
    args = torch.randn(4, 6, generator=generator), torch.randn(2, 4, 3, generator=generator).transpose(0, 1)
    model, eager = Program(steps).eval(), Program(steps).eval()
    eager_args = copy.deepcopy(args)
    with torch.no_grad():
        expected = eager(*eager_args)
    traced = captured(model, args)
    result = run_traced(traced, model, args)
    for actual, wanted in zip(result, expected, strict=True):  # views of one tensor may come back as one object
        assert_same(actual, wanted)
    assert_same((*args, model.state), (*eager_args, eager.state))
