"""Assertions that compare distributed tensors with plain ones, for unittest and pytest.

In: tensors of both kinds, on any mesh and with any placements. Out: nothing, or the test fails with both described.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch

from dtorch.capture.symbol import Tensor


def assert_tensor_allclose(
    test_case: unittest.TestCase | None,
    torch_tensor: torch.Tensor,
    dtorch_tensor: torch.Tensor,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Fail the test unless the whole values are close; shapes and dtypes must be equal, NaN equals NaN.

    Args:
        test_case: the running `unittest.TestCase`, or None outside one (then AssertionError is raised).
        torch_tensor: what is expected, plain or distributed.
        dtorch_tensor: what came out, plain or distributed; reading it waits for it.
        rtol, atol: tolerances, both or none; by default those of torch.testing for the dtype.
    """
    if (rtol is None) != (atol is None):
        rtol, atol = rtol or 0.0, atol or 0.0
    _compare(test_case, torch_tensor, dtorch_tensor, rtol, atol)


def assert_tensor_equal(
    test_case: unittest.TestCase | None, torch_tensor: torch.Tensor, dtorch_tensor: torch.Tensor
) -> None:
    """Fail the test unless the whole values are equal bit for bit (NaN equals NaN), in shape and dtype too."""
    _compare(test_case, torch_tensor, dtorch_tensor, 0.0, 0.0)


def _compare(test_case: Any, expected: torch.Tensor, got: torch.Tensor, rtol: float | None, atol: float | None) -> None:
    try:
        torch.testing.assert_close(_whole(got), _whole(expected), rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        what = f"{error}\nExpected: {_describe(expected)}\nGot: {_describe(got)}"
        if test_case is None:
            raise AssertionError(what) from None
        test_case.fail(what)


def _whole(tensor: Any) -> torch.Tensor:
    value = tensor.to_torch() if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
    return value.detach().cpu()


def _describe(tensor: Any) -> str:
    return tensor.summary if isinstance(tensor, Tensor) else f"{tensor.dtype}{list(tensor.shape)}, plain"
