"""Real processes give the bits of simulated devices: models of the zoo, and random programs of eager code."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from fuzz.test_programs import Run, programs
from hypothesis import given, settings
from model_zoo import ZOO
from null.agreement import assert_same_bits, mesh_of

import dtorch
from dtorch.runtime.remote import ClusterRuntime
from dtorch.runtime.session import SESSION
from dtorch.runtime.simulate import SimulatedRuntime


@contextmanager
def on_simulated_devices():
    before, SESSION.workers = SESSION.workers, "simulated"
    try:
        yield
    finally:
        SESSION.workers = before


def results(name, shape, runtime):
    """Two calls of a model of the zoo."""
    model, args, kwargs = ZOO[name](torch.float32)
    with torch.no_grad():
        compiled = dtorch.compile(model, mesh_of(*shape))
        assert type(compiled._build.runtime) is runtime
        return compiled(*args, **kwargs), compiled(*args, **kwargs)


def assert_equal_on_both(name, shape):
    real = results(name, shape, ClusterRuntime)
    with on_simulated_devices():
        simulated = results(name, shape, SimulatedRuntime)
    assert_same_bits(real, simulated)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_models_on_two_processes_give_the_bits_of_simulated_devices(name, workers):
    assert_equal_on_both(name, (2,))


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "llama", "gpt2"])
def test_models_on_four_processes_give_the_bits_of_simulated_devices(name, shape, workers):
    assert_equal_on_both(name, shape)


def steps_in_memory(value):
    """Strides, where they mean something."""
    return [stride for size, stride in zip(value.shape, value.stride()) if size > 1]


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_random_programs_give_what_simulated_devices_give(shape, workers):
    mesh = dtorch.init_device_mesh("cpu", shape)

    @settings(max_examples=25, deadline=None)
    @given(programs)
    def run(steps):
        real, simulated = Run(mesh, 7), Run(mesh, 7)
        with dtorch.Graph():
            found = [value.to_torch() for value in real(steps)]
        with on_simulated_devices(), dtorch.Graph():
            wanted = [value.to_torch() for value in simulated(steps)]
        assert real.failed == simulated.failed and real.values == pytest.approx(simulated.values, abs=1e-6)
        for value, other in zip(found, wanted, strict=True):
            assert value.dtype is other.dtype and steps_in_memory(value) == steps_in_memory(other)
            # the last bit of a matmul depends on where its operands lie in memory
            torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-12, equal_nan=True)

    run()
