"""Every factory with every argument that it takes: dtype, device, mesh, placements, generator, requires_grad.

In: the factories and torch's functions of the same names. Out: torch's values, dtypes and random states, as placed.
"""

from itertools import product

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.errors import InputError

THREE = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=["tp"])
GRID = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
PLACES = {
    "a device": ({"device": "cpu"}, [Replicate()]),
    "a torch device": ({"device": torch.device("cpu")}, [Replicate()]),
    "a mesh": ({"device_mesh": THREE}, [Replicate()]),
    "a list": ({"device_mesh": THREE, "placements": [Shard(0)]}, [Shard(0)]),
    "a dict": ({"device_mesh": GRID, "placements": {"tp": Shard(0)}}, [Replicate(), Shard(0)]),
    "two axes": ({"device_mesh": GRID, "placements": [Shard(0), Partial()]}, [Shard(0), Partial()]),
}
SHAPES = {"empty": (5, 2), "zeros": ((5, 2),), "ones": (5, 2), "full": ((5, 2), 3), "eye": (5, 2)}
RANGES = {"arange": (1, 9, 2), "linspace": (0, 1, 5), "logspace": (0, 1, 5)}
DRAWN = {"rand": (5, 2), "randn": ((5, 2),), "randint": (2, 9, (5, 2)), "randperm": (7,)}
DTYPES = (None, torch.float64, torch.int64)


def cases():
    for name, args in {**SHAPES, **RANGES, **DRAWN}.items():
        for dtype in DTYPES:
            if dtype is not torch.int64 or name not in ("rand", "randn", "linspace", "logspace"):
                yield name, args, {} if dtype is None else {"dtype": dtype}


@pytest.mark.parametrize("place", PLACES)
def test_every_factory_takes_dtype_generator_and_requires_grad_in_every_place(place):
    where, placements = PLACES[place]
    for (name, args, options), seeded in product(cases(), (False, True)):
        if seeded and name not in DRAWN:
            continue
        theirs, mine = dict(options), {**options, **where}
        if seeded:
            theirs["generator"] = torch.Generator().manual_seed(3)
            mine["generator"] = torch.Generator().manual_seed(3)
        torch.manual_seed(5)
        wanted = getattr(torch, name)(*args, **theirs)
        state = torch.get_rng_state()
        torch.manual_seed(5)
        grad = wanted.is_floating_point()
        made = getattr(dtorch, name)(*args, **mine, requires_grad=grad)
        assert torch.equal(torch.get_rng_state(), state), name
        assert made.dtype is wanted.dtype and made.shape == wanted.shape and made.stride() == wanted.stride()
        assert made.placements == placements and made.requires_grad is grad and made.device.type == "cpu"
        if name != "empty":
            assert torch.equal(made.detach().to_torch(), wanted), (name, options)


LIKE = {name: () for name in ("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like")}
LIKE |= {"full_like": (4,), "randint_like": (2, 9)}


@pytest.mark.parametrize("place", [None, *PLACES])
def test_every_like_factory_takes_dtype_place_and_requires_grad(place):
    plain = torch.randn(5, 2)
    source = dtorch.distribute_tensor(plain, THREE, [Shard(1)])
    where, placements = ({}, [Shard(1)]) if place is None else PLACES[place]
    if place == "a mesh":
        placements = [Shard(1)]  # of as many axes: the source's
    for (name, args), dtype in product(LIKE.items(), (None, torch.float64)):
        options = {} if dtype is None else {"dtype": dtype}
        for given in (source, plain):
            torch.manual_seed(5)
            wanted = getattr(torch, name)(plain, *args, **options)
            torch.manual_seed(5)
            made = getattr(dtorch, name)(given, *args, **options, **where, requires_grad=True)
            assert made.dtype is wanted.dtype and made.shape == wanted.shape and made.requires_grad
            if given is source:
                assert made.placements == placements, (name, place)
            if name != "empty_like":
                assert torch.equal(made.detach().to_torch(), wanted), (name, options)


def test_tensor_takes_every_argument():
    for place, (where, placements) in PLACES.items():
        made = dtorch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.float64, requires_grad=True, **where)
        assert made.placements == placements and made.requires_grad and made.dtype is torch.float64, place
        assert made.tolist() == [[1, 2], [3, 4], [5, 6]]
        copied = dtorch.Tensor(torch.ones(3, 2), dtype=torch.float16, requires_grad=True, **where)
        assert copied.placements == placements and copied.requires_grad and copied.dtype is torch.float16
        assert torch.equal(copied.detach().to_torch(), torch.ones(3, 2).half())


@pytest.mark.parametrize("name", [*SHAPES, *RANGES, *DRAWN, *LIKE, "tensor", "Tensor"])
def test_device_and_mesh_exclude_each_other_in_every_factory(name):
    first = {"tensor": ([1.0],), "Tensor": (torch.ones(2),)}
    args = {**SHAPES, **RANGES, **DRAWN, **{key: (torch.ones(3), *more) for key, more in LIKE.items()}, **first}[name]
    with pytest.raises(InputError, match="exclude each other"):
        getattr(dtorch, name)(*args, device="cpu", device_mesh=THREE)
