"""Torch's transforms, tracers and derivatives on distributed tensors: what works, and what is one clear error.

In: functions of dtorch.Tensors under torch.compile, torch.func, torch.export and the like. Out: torch's values, or an
UnsupportedError that names the line and what to do.
"""

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import CaptureError, UnsupportedError

MESH = dtorch.init_device_mesh("cpu", (2,))
PLAIN = torch.arange(12.0).reshape(4, 3)


def dist(value=PLAIN, placement=None):
    return dtorch.distribute_tensor(value, MESH, [placement or Shard(0)])


def linear():
    module = torch.nn.Linear(3, 2)
    for name, weight in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(dist(weight.detach())))
    return module


# --- torch.compile ------------------------------------------------------------------------------------------------


def compiled(function, **options):
    return torch.compile(function, backend="eager", **options)


def makes_one(n):
    return dtorch.ones(n, 3, device_mesh=MESH, placements=[Shard(0)]) * 2


X = dist()
COMPILED = {
    "an argument": lambda: compiled(lambda x: x * 2 + 1)(X),
    "a closure": lambda: compiled(lambda x: x * X)(PLAIN),
    "a list": lambda: compiled(lambda both: both[0] + both[1]["x"])([PLAIN, {"x": X}]),
    "the whole graph": lambda: compiled(lambda x: x * 2 + 1, fullgraph=True)(X),
    "a module": lambda: compiled(linear())(PLAIN),
    "a module's own compile": lambda: [module := linear(), module.compile(backend="eager"), module(PLAIN)],
    "a tensor made inside": lambda: compiled(makes_one)(4),
    "a function that reads": lambda: compiled(lambda x: x.sum().item() + 1)(X),
}


@pytest.mark.parametrize("what", COMPILED)
def test_torch_compile_of_distributed_tensors_is_one_error_on_the_users_line(what):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's, about looking into factories
        with pytest.raises(UnsupportedError, match="(?s)test_transforms.py.*torch.compile.*dtorch.compile") as caught:
            COMPILED[what]()
    assert "TORCHDYNAMO" not in str(caught.value) and "\n" not in str(caught.value)


def test_torch_compile_leaves_alone_what_it_does_not_touch():
    @torch.compiler.disable
    def apart(plain):
        return (plain * X).to_torch()

    assert torch.equal(apart(PLAIN), PLAIN * PLAIN)
    assert torch.equal(compiled(lambda a, x: a * 2)(PLAIN, X), PLAIN * 2)
    assert torch.equal(compiled(lambda a: a * 2 + apart(a))(PLAIN), PLAIN * 2 + PLAIN * PLAIN)
    assert torch.equal((X * 2).to_torch(), PLAIN * 2)


# --- other tracers ------------------------------------------------------------------------------------------------


class Double(torch.nn.Module):
    def forward(self, x):
        return x.sinh() * 2


TRACED = {
    "torch.export": lambda: torch.export.export(Double(), (X,)),
    "torch.compile": lambda: torch.export.export(Double(), (X,), strict=True),
    "torch.jit.trace": lambda: torch.jit.trace(lambda x: x.erfinv(), X),
    "make_fx": lambda: torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.digamma())(X),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", TRACED)
def test_a_tracer_is_refused_by_name_and_leaves_nothing_behind(tracer):
    with pytest.raises(UnsupportedError, match=tracer):
        TRACED[tracer]()
    assert torch.equal((X.sinh() * 2).to_torch(), PLAIN.sinh() * 2)


HIGHER = {
    "torch.cond": lambda: torch.cond(X.sum() > 0, torch.sin, torch.cos, (X,)),
    "flex_attention": lambda: flex_attention(*[X[None, None]] * 3, score_mod=lambda score, *_: score + 1),
}


@pytest.mark.parametrize("name", HIGHER)
def test_an_operator_that_takes_functions_says_to_write_python(name):
    with pytest.raises(UnsupportedError, match=f"test_transforms.py.*{name} on .*bool\\(x\\)"):
        HIGHER[name]()


# --- derivatives --------------------------------------------------------------------------------------------------


def forward_mode():
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.make_dual(X, X)


DERIVATIVES = {
    "torch.func.jvp": lambda: torch.func.jvp(torch.sin, (X,), (X,)),
    "mul under torch.func.jvp": lambda: torch.func.jvp(lambda a: a * X, (PLAIN,), (PLAIN,)),
    "sin.default under torch.func.grad": lambda: torch.func.grad(lambda a: a.sin().sum())(X),
    "mul under torch.func.grad": lambda: torch.func.grad(lambda a: (a * X).sum())(PLAIN),
    "sin.default under torch.func.vjp": lambda: torch.func.vjp(torch.sin, X),
    "sin.default under torch.func.vjp ": lambda: torch.func.jacrev(torch.sin)(X),
    "torch.func.jvp ": lambda: torch.func.jacfwd(torch.sin)(X),
    "torch.func.jvp  ": lambda: torch.func.hessian(lambda a: a.sin().sum())(X),
    "make_dual": forward_mode,
    "torch.autograd.functional.jacobian": lambda: torch.autograd.functional.jacobian(torch.sin, X),
    "torch.autograd.functional.vjp": lambda: torch.autograd.functional.vjp(torch.sin, X, X),
    "grad": lambda: torch.autograd.grad(X.sum(), X),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_derivative_is_refused_and_named(name):
    with pytest.raises(UnsupportedError, match=f"test_transforms.py.*{name.strip()}.*gradients are not there"):
        DERIVATIVES[name]()
    assert torch.equal(X.sin().to_torch(), PLAIN.sin())


# --- what works ---------------------------------------------------------------------------------------------------


def test_functional_call_takes_distributed_parameters():
    module = torch.nn.Linear(3, 4)
    weights = {name: dist(each.detach()) for name, each in module.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(module, weights, (X,)).to_torch(), module(PLAIN).detach())


PRODUCTS = {
    "elementwise": lambda row, w: row * w[0],
    "matrix and row": lambda row, w: w @ row,
    "row and matrix": lambda row, w: row @ w,
    "two matrices": lambda row, w: row[None] @ w,
    "linear": torch.nn.functional.linear,
    "einsum": lambda row, w: torch.einsum("i,ij->j", row, w),
}


class Mapped(torch.nn.Module):
    def __init__(self, product):
        super().__init__()
        self.product = product
        self.weight = torch.nn.Parameter(torch.arange(9.0).reshape(3, 3) / 7)

    def forward(self, x):
        return torch.vmap(lambda row: self.product(row, self.weight))(x)


@pytest.mark.parametrize("product", PRODUCTS)
def test_vmap_multiplies_a_batched_tensor_with_a_captured_one(product):
    module = Mapped(PRODUCTS[product])
    wanted = module(PLAIN).detach()
    torch.testing.assert_close(dtorch.compile(module, MESH)(PLAIN), wanted)
    for placement in (Replicate(), Shard(0), Shard(1)):
        for weight in (Replicate(), Shard(0), Shard(1), Partial()):
            w = dist(module.weight.detach(), weight)
            found = torch.vmap(lambda row, w=w: module.product(row, w))(dist(placement=placement))
            torch.testing.assert_close(found.to_torch(), wanted)


def test_a_shape_changed_in_place_by_the_user_is_still_refused():
    def shapes(row):
        tall = (row + 1)[None].sin()
        view = tall[0]
        tall.squeeze_(0)
        return view * 2

    with pytest.raises(CaptureError, match="squeeze_"):
        torch.vmap(shapes)(X)


# --- writes into views whose elements share memory ----------------------------------------------------------------

WRITES = {
    "e[:] = y": lambda e: e.__setitem__(slice(None), PLAIN),
    "e[1:] = x": lambda e: e.__setitem__(slice(1, None), X[1:]),
    "copy_": lambda e: e.copy_(PLAIN),
    "copy_ of a distributed one": lambda e: e.copy_(X),
    "add_": lambda e: e.add_(1),
    "mul_": lambda e: e.mul_(X),
    "+=": lambda e: e.__iadd__(PLAIN),
    "relu": lambda e: torch.nn.functional.relu(e, inplace=True),
    "clamp_": lambda e: e.clamp_(0, 1),
    "normal_": lambda e: e.normal_(),
    "add(out=)": lambda e: torch.add(X, 1, out=e),
    "exp(out=)": lambda e: torch.exp(X, out=e),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_an_expanded_view_raises_as_torch_does(name):
    with pytest.raises(RuntimeError, match="unsupported operation: more than one element of the written-to tensor"):
        WRITES[name](PLAIN[:1].clone().expand(4, 3))
    for _ in range(2):  # the second time nothing is new to the recorder
        base = dist(PLAIN[:1])
        with pytest.raises(
            RuntimeError, match="(?s)unsupported operation: more than one element of the written-to.*test_transforms.py"
        ):
            WRITES[name](base.expand(4, 3))
        assert torch.equal(base.to_torch(), PLAIN[:1])


def test_a_fill_of_an_expanded_view_reaches_its_base():
    for fill in (lambda e: e.zero_(), lambda e: e.fill_(3.0), lambda e: e[0].copy_(PLAIN[2])):
        mine, theirs = dist(PLAIN[:1]), PLAIN[:1].clone()
        fill(mine.expand(4, 3))
        fill(theirs.expand(4, 3))
        assert torch.equal(mine.to_torch(), theirs)
