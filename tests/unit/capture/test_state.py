"""What a forward assigns to attributes of its module: harmless, remembered once, or counted on."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dtorch
from dtorch.errors import CaptureError, CaptureWarning

MESH = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
X = torch.arange(6.0).reshape(3, 2)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.count, self.last, self.scale = 0, None, None


class Counts(Remembers):
    def forward(self, x):
        self.count += 1
        return x * self.count


class Watched(Remembers):
    def forward(self, x):
        self.count += 1
        self.last = x * 2
        return x + 1 if x.sum() > 0 else x - 1


class FirstMean(Remembers):
    def forward(self, x):
        if self.last is None:
            self.last = x.mean()
        return x * self.last


class FirstIsOther(Remembers):
    def forward(self, x):
        if self.scale is None:
            self.scale = 3.0
            return x
        return x * self.scale


def test_a_result_that_depends_on_how_often_forward_ran_is_refused():
    with pytest.raises(CaptureError, match="assigns count .*register_buffer"):
        dtorch.compile(Counts(), MESH)(X)


def test_counters_and_tensors_kept_for_inspection_do_no_harm():
    compiled = dtorch.compile(Watched(), MESH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(X), X + 1) and torch.equal(compiled(-X), -X - 1) and torch.equal(compiled(X), X + 1)


@pytest.mark.parametrize("kind", [FirstMean, FirstIsOther])
def test_what_is_remembered_from_the_first_call_is_warned_of(kind):
    model = kind()
    with pytest.warns(CaptureWarning, match="assigns (last|scale) at its first call"):
        assert torch.equal(dtorch.compile(model, MESH)(X), kind()(X))
    assert model.last is None and model.scale is None


def test_state_made_before_compile_is_kept():
    model = FirstMean()
    model(X)
    assert torch.equal(dtorch.compile(model, MESH)(X * 2), X * 2 * X.mean())
