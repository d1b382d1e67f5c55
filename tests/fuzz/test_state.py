"""State around eager code: what torch's switches mean when, reads in odd places, views at each level; and endurance.

In: programs that change ambient state, or run long. Out: torch's values; memory that stays flat; no recompiling. The
long versions of the endurance tests are run by hand: ENDURANCE=10 multiplies their lengths.
"""

import gc
import os
import threading
import time

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dtorch
from dtorch import Replicate, Shard

LENGTH = int(os.environ.get("ENDURANCE", "1"))
MESH = dtorch.init_device_mesh("cpu", (2,))
PLAIN = torch.arange(35.0).reshape(5, 7) / 10


def dist(value=PLAIN, placement=None, mesh=MESH):
    return dtorch.distribute_tensor(value.clone(), mesh, [placement or Shard(0)])


def compiled():
    return dtorch.default_graph().controller.compiled


# --- ambient state ------------------------------------------------------------------------------------------------


def test_a_recorded_call_keeps_the_autocast_it_was_recorded_under():
    x = dist()
    for _ in range(2):
        plain = x @ x.t()
        with torch.autocast("cpu", torch.bfloat16):
            low = x @ x.t()
            read_inside = plain.to_torch()
        assert plain.dtype == torch.float32 and low.dtype == torch.bfloat16
        torch.testing.assert_close(read_inside, PLAIN @ PLAIN.t())
        with torch.autocast("cpu", torch.bfloat16):
            wanted = PLAIN @ PLAIN.t()
        torch.testing.assert_close(low.to_torch(), wanted, rtol=2e-2, atol=1e-1)


def test_the_default_dtype_is_that_of_the_recording():
    x = dist(torch.arange(5))
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            y = x / 2
            torch.set_default_dtype(torch.float16)
            assert y.dtype == dtype
            assert torch.equal(y.to_torch(), torch.arange(5, dtype=dtype) / 2)
    finally:
        torch.set_default_dtype(torch.float32)


def test_inference_mode_and_deterministic_flags_change_nothing():
    x = dist()
    with torch.inference_mode():
        inside = x + 1
        made = dist() * 2
        made.add_(1)
    outside = x + 1
    assert torch.equal((inside + outside).to_torch(), 2 * (PLAIN + 1))
    made.add_(1)
    assert torch.equal(made.to_torch(), PLAIN * 2 + 2)
    try:
        torch.use_deterministic_algorithms(True)
        strict = x.cumsum(0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(strict.to_torch(), PLAIN.cumsum(0)) and torch.equal(x.cumsum(0).to_torch(), PLAIN.cumsum(0))
    with torch.inference_mode():
        assert torch.equal((outside * 3).to_torch(), (PLAIN + 1) * 3)


# --- reads in odd places ------------------------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Listening(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_cold_reads_inside_constructors_and_modes():
    x = dist()
    assert torch.equal(torch.tensor([(x * 1.25).sum(), 2.0]), torch.tensor([(PLAIN * 1.25).sum().item(), 2.0]))
    assert [1, 2, 3][(x * 10).long()[0, 2]] == 3
    with Watching():
        assert (x * 1.5).sum().item() == (PLAIN * 1.5).sum().item()
    with Listening():
        assert (x * 1.75).sum().item() == (PLAIN * 1.75).sum().item()
        assert torch.equal((x - 3).to_torch(), PLAIN - 3)
    assert torch.equal((x - 3).to_torch(), PLAIN - 3)


def test_vmap_reads_and_closes_over_distributed_tensors():
    x = dist()
    found = torch.vmap(lambda row: row * x[0] + (x * 2.25).sum().item())(PLAIN)
    wanted = torch.vmap(lambda row: row * PLAIN[0] + (PLAIN * 2.25).sum().item())(PLAIN)
    torch.testing.assert_close(found.to_torch() if isinstance(found, dtorch.Tensor) else found, wanted)
    mapped = torch.vmap(lambda row: row.sin() * 2)(x)
    torch.testing.assert_close(mapped.to_torch(), PLAIN.sin() * 2)


def test_one_tensor_twice():
    x = dist()
    assert torch.equal(torch.cat([x, x]).to_torch(), torch.cat([PLAIN, PLAIN]))
    assert torch.equal(torch.addcmul(x, x, x).to_torch(), torch.addcmul(PLAIN, PLAIN, PLAIN))
    x.add_(x)
    x.mul_(x.t().t())
    assert torch.equal(x.to_torch(), (PLAIN + PLAIN) * (PLAIN + PLAIN))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_a_chain_of_views_is_written_at_each_level(placement):
    plain, x = PLAIN.clone(), dist(placement=placement)

    def chain(base):
        turned = base.t()
        rows = turned[1:6]
        column = rows.unsqueeze(1)
        return [base, turned, rows, column, column[:, 0, ::2]]

    mine, theirs = chain(x), chain(plain)
    for order in ([4, 0, 3, 1, 2], [0, 4, 2, 3, 1]):
        for level in order:
            for each in (mine, theirs):
                each[level].mul_(2).add_(level)
                each[level][0].zero_()
            if level % 2:
                dtorch.sync()
            assert all(torch.equal(a.to_torch(), b) for a, b in zip(mine, theirs)), level


def test_a_symbol_is_not_written_into_a_plain_tensor():
    real = torch.zeros(5, 7)
    with pytest.raises(RuntimeError, match="plain torch.Tensor"):
        real[0] = dist()[0]
    assert not real.any()


# --- endurance ----------------------------------------------------------------------------------------------------


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_bytes(step, warm, count):
    """How much the process grows over `count` calls of `step`, after `warm` calls."""
    for _ in range(warm):
        step()
    dtorch.sync()
    gc.collect()
    before = resident_bytes()
    for _ in range(count):
        step()
    dtorch.sync()
    gc.collect()
    return resident_bytes() - before


def test_ten_thousand_operations_without_a_read_stay_within_bounds():
    state = [dist()]

    def step():
        state[0] = state[0] * 0.5 + 1

    assert growth_bytes(step, 3000, 5000 * LENGTH) < 20e6
    torch.testing.assert_close(state[0].to_torch(), torch.full((5, 7), 2.0))


def test_values_dropped_unread_leave_nothing():
    x = dist()

    def step():
        y = x.t() @ x
        y[0].add_(1)
        y.sum().mul(2)

    assert growth_bytes(step, 2000, 20_000 // 3 * LENGTH) < 20e6


def test_pipelined_all_reduces_all_finish():
    mesh = dtorch.init_device_mesh("cpu", (8,))
    for _ in range(10 * LENGTH if LENGTH > 1 else 1):
        x = dist(torch.ones(8, 8), Shard(1), mesh)
        w = dist(torch.full((8, 8), 1 / 8), Shard(0), mesh)
        for _ in range(1000):
            x = (x @ w).redistribute(placements=[Replicate()])
        assert torch.equal(x.to_torch(), torch.ones(8, 8))


def test_a_mesh_of_432_devices_is_used_at_once():
    mesh = dtorch.init_device_mesh("cpu", (432,))
    begin = time.monotonic()
    x = dtorch.ones(1000, 3, device_mesh=mesh, placements=[Shard(0)])
    assert (x * 2).sum().item() == 6000.0
    assert time.monotonic() - begin < 30


def test_eight_graphs_on_eight_threads():
    failures = []
    until = time.monotonic() + 10 * LENGTH

    def work(number):
        try:
            with dtorch.Graph():
                count = 0
                while time.monotonic() < until:
                    x = dist(torch.full((5, 7), float(number)))
                    for k in range(10):
                        x = x + k
                    x[0] = 0
                    assert x.sum().item() == 28 * (number + 45)
                    count += 1
                assert count
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures


def changing_int(x, t):
    return x[:, t]


def changing_float(x, t):
    return x * (0.1 + t / 7)


@pytest.mark.parametrize(
    "program",
    [
        changing_int,
        changing_float,
    ],
)
def test_changing_numbers_do_not_recompile_after_the_second(program):
    x = dist()
    counts = []
    for t in range(7):
        torch.testing.assert_close(program(x, t).to_torch(), program(PLAIN, t))
        counts.append(compiled())
    assert counts[1:] == [counts[1]] * 6


NUMBERS = [0.1, 1e-3, 3.3333, -7.7, 65000.123, 1e-30, float("inf"), 0.0, -0.0, float("nan"), 1e300, 0.1]
WAYS = {
    "add": lambda x, a: x + a,
    "radd": lambda x, a: a + x,
    "sub": lambda x, a: x - a,
    "rsub": lambda x, a: a - x,
    "mul": lambda x, a: torch.mul(x, a),
    "div": lambda x, a: x / a,
    "rdiv": lambda x, a: a / x,
    "in place": lambda x, a: x.clone().mul_(a).div_(a).add_(a).sub_(a),
    "operators in place": lambda x, a: _operators_in_place(x.clone(), a),
}


def _operators_in_place(x, a):
    x += a
    x *= a
    x -= a
    x /= a
    return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_changes_gives_the_bits_of_a_constant(way, dtype):
    torch.manual_seed(0)
    for shape in ((5, 7), ()):
        plain = (torch.randn(shape) * 9).to(dtype)
        x = dtorch.distribute_tensor(plain, dtorch.init_device_mesh("cpu", (1,)), [Replicate()])
        for number in NUMBERS:
            if dtype is torch.int64 and way.endswith("in place"):
                continue
            mine, theirs = WAYS[way](x, number).to_torch(), WAYS[way](plain, number)
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.nan_to_num(7.5), theirs.nan_to_num(7.5)), number
            assert torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(mine.signbit(), theirs.signbit())
