"""Floats that are made of integers have the default dtype of the call, whoever runs the plan and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
FUNCTIONS = {
    "numbers": lambda i: i * 0.1,
    "division": lambda i: i / 3,
    "root": lambda i: i.sqrt(),
    "powers": lambda i: 2.5**i + i**-0.5,
    "complex numbers": lambda i: i + 1j,
    "bools": lambda i: (i > 3) * 0.1,
    "sums of exponentials": lambda i: torch.logsumexp(i, 0),
    "floors": lambda i: i // 0.7 + torch.div(i, 0.7, rounding_mode="floor"),
    "a choice of numbers": lambda i: torch.where(i > 3, 0.1, 0.7),
    "a choice of a number": lambda i: torch.where(i > 3, i, 0.7),
    "two inputs": lambda i: torch.atan2(i, i + 1),
    "composites": lambda i: torch.special.expit(i),
    "another dtype that is named": lambda i: i.mean(dtype=torch.float32) + torch.float_power(i, 2),
    "transposed": lambda i: i.reshape(4, 3).t() / 7,
}


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_plan_runs_under_the_default_dtype_that_it_was_recorded_under(name: str, placement: Any) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    plain = torch.arange(1, 13)
    i = dtorch.distribute_tensor(plain, mesh, [placement])
    for recorded in DTYPES:
        for read in DTYPES:
            torch.set_default_dtype(recorded)
            expected, given = FUNCTIONS[name](plain), FUNCTIONS[name](i)
            torch.set_default_dtype(read)
            value = given.to_torch()
            assert given.dtype == value.dtype == expected.dtype
            assert given.stride() == value.stride() == expected.stride()
            if placement == Replicate():
                assert torch.equal(value, expected)
            else:
                torch.testing.assert_close(value, expected)
