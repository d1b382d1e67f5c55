"""Random functions of distributed tensors: torch's own numbers for a seed, and nobody waits for what they do not need.

In: functions that draw, tensors placed in different ways on meshes of 1, 2 and 2 × 2 devices. Out: values and states of
the generator equal torch's bit for bit; reads are counted, and are none where the draws depend on no values.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.capture.eager import EagerRecorder

G = torch.Generator()
MESHES = {shape: dtorch.init_device_mesh("cpu", shape) for shape in ((1,), (2,), (2, 2))}
FILLS = {
    "normal_": (1.0, 2.0), "uniform_": (-1.0, 2.0), "exponential_": (2.0,), "bernoulli_": (0.3,), "random_": (5,),
    "log_normal_": (), "cauchy_": (), "geometric_": (0.3,),
}  # fmt: skip


def seeded(function):
    """A function of a tensor and a generator, which starts at the same place each time."""
    return lambda x: function(x, G.manual_seed(5))


def filled(name, change):
    """Fill a view of a tensor; the tensor."""

    def run(x):
        getattr(change(x), name)(*FILLS[name])
        return x

    return run


FREE = {
    "dropout": lambda x: F.dropout(x, 0.4, True),
    "dropout of turned": lambda x: F.dropout(x.transpose(0, 1), 0.4, True),
    "dropout in place": lambda x: F.dropout(x, 0.4, True, True),
    "dropout of all": lambda x: F.dropout(x, 1.0, True),
    "Dropout": nn.Dropout(0.2).train(),
    "Dropout1d": nn.Dropout1d(0.3).train(),
    "Dropout2d": lambda x: nn.Dropout2d(0.3).train()(x[..., None]),
    "Dropout3d": lambda x: nn.Dropout3d(0.3).train()(x[..., None, None]),
    "AlphaDropout": nn.AlphaDropout(0.3).train(),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.3).train(),
    "dropout in a view": lambda x: (F.dropout(x[1:], 0.5, True, True), x)[1],
    "bernoulli": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli of turned": lambda x: torch.bernoulli(x.transpose(0, 1), 0.3),
    "normal of means and deviations": lambda x: torch.normal(x, x.abs()),
    "normal of broadcast deviations": lambda x: torch.normal(x, x.abs()[:, :1]),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(2.0, x.abs().transpose(0, 1)),
    "random_ between": lambda x: x.random_(2, 9),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "kaiming": nn.init.kaiming_uniform_,
    "normal_ of a generator": seeded(lambda x, g: x.normal_(generator=g)),
    "normal of a generator": seeded(lambda x, g: torch.normal(x, 1.0, generator=g)),
    "bernoulli of a generator": seeded(lambda x, g: torch.bernoulli(x, 0.4, generator=g)),
    **{f"{name} of all": filled(name, lambda x: x) for name in FILLS},
    **{f"{name} of turned": filled(name, lambda x: x.transpose(0, 1)) for name in FILLS},
    **{f"{name} of every second": filled(name, lambda x: x[:, ::2]) for name in FILLS},
    **{f"{name} of one": filled(name, lambda x: x[1]) for name in FILLS},
}
"""What they draw depends on no value."""

BOUND = {
    "multinomial": lambda x: torch.multinomial(x[0].abs(), 2),
    "multinomial of a generator": seeded(lambda x, g: torch.multinomial(x[0].abs(), 2, generator=g)),
    "bernoulli of probabilities": lambda x: torch.bernoulli(x.sigmoid()),
    "rrelu": lambda x: F.rrelu(x, training=True),
}
"""What they draw depends on values, which are read."""


def placements(ndim):
    yield [Replicate()] * ndim
    yield [Shard(0)] * ndim
    yield [Shard(1)] + [Replicate()] * (ndim - 1)
    yield [Partial()] + [Shard(1)] * (ndim - 1)


@pytest.fixture
def reads(monkeypatch):
    """What was read so far."""
    found = []
    fetch = EagerRecorder.host_value
    monkeypatch.setattr(EagerRecorder, "host_value", lambda self, *args: [found.append(args), fetch(self, *args)][1])
    return found


@pytest.mark.parametrize("name", [*FREE, *BOUND])
def test_a_seed_gives_torchs_numbers_on_every_mesh_and_only_values_that_are_needed_are_read(name, reads):
    function = {**FREE, **BOUND}[name]
    value = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(1))
    for shape, mesh in MESHES.items():
        for placed in placements(len(shape)):
            torch.manual_seed(7)
            wanted = function(value.clone())
            state = torch.get_rng_state()
            x = dtorch.distribute_tensor(value, mesh, placed)
            reads.clear()
            torch.manual_seed(7)
            found = function(x)
            assert torch.equal(torch.get_rng_state(), state), placed
            assert bool(reads) == (name in BOUND), placed
            exact = shape == (1,) or name not in ("attention", "gumbel_softmax")
            torch.testing.assert_close(found.to_torch(), wanted, **({"rtol": 0, "atol": 0} if exact else {}))


def test_drawing_waits_for_nobody_when_the_graph_s_thread_is_held_up():
    mesh = MESHES[(2,)]
    torch.manual_seed(3)
    plain = torch.ones(4, 6)
    for _ in range(3):
        plain = F.dropout(plain * 2, 0.3, True)
        plain[1].normal_()
    with dtorch.Graph() as graph:
        graph.controller._busy.acquire()
        try:
            torch.manual_seed(3)
            x = dtorch.ones(4, 6, device_mesh=mesh, placements=[Shard(0)])
            for _ in range(3):
                x = F.dropout(x * 2, 0.3, True)
                x[1].normal_()
            future = x.to_torch_async()
            assert not future.is_ready()
        finally:
            graph.controller._busy.release()
        assert torch.equal(future.get(), plain)


def test_numbers_meet_a_cut_tensor_cut_alike_so_that_nothing_is_moved():
    with dtorch.explicit_redistribution():
        for placed in (Shard(0), Shard(1)):
            x = dtorch.ones(4, 6, 5, device_mesh=MESHES[(2,)], placements=[placed])
            assert F.dropout(x, 0.5, True).placements == [placed]
            assert F.dropout1d(x, 0.5, True).placements == [placed]
            assert x.normal_().placements == [placed] and F.dropout(x, 0.5, True, True).placements == [placed]


def test_steps_that_draw_compile_nothing_after_the_first_round_whatever_generator_they_are_given():
    def round_of(step):
        y = F.dropout(x, 0.5, True) + torch.randn_like(x)
        y[0].normal_(generator=torch.Generator().manual_seed(step))
        return y.sum().item()

    with dtorch.Graph():
        x = dtorch.from_torch(torch.ones(4, 6), MESHES[(2,)], [Shard(0)])
        seen = {round_of(0)}
        with dtorch.assert_no_recompile():
            seen |= {round_of(step) for step in range(1, 5)}
    assert len(seen) == 5


def test_a_negative_deviation_gives_nan():
    x = dtorch.ones(4, device_mesh=MESHES[(2,)], placements=[Shard(0)])
    drawn = torch.normal(x, dtorch.tensor([1.0, -1.0, 0.0, 2.0], device_mesh=MESHES[(2,)])).to_torch()
    assert drawn.isnan().tolist() == [False, True, False, False] and drawn[2] == 1


def test_a_module_in_training_mode_draws_as_torchs_does(reads):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3), nn.AlphaDropout(0.1))
    value = torch.randn(4, 6)
    torch.manual_seed(1)
    wanted = module(value)
    dtorch.distribute_module(module, MESHES[(2,)])
    torch.manual_seed(1)
    found = module(dtorch.distribute_tensor(value, MESHES[(2,)], [Shard(0)]))
    assert not reads
    torch.testing.assert_close(found.to_torch(), wanted.detach(), check_stride=False)
