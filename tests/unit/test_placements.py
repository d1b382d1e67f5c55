"""Placements are torch's own classes; what a user may write for them, and what is refused."""

import subprocess
import sys

import pytest
import torch.distributed.tensor

from dtorch import distributed_spec, placements
from dtorch.errors import PlacementError
from dtorch.ir.layout import PENDING, WHOLE, Pending, Split
from dtorch.ir.spec import from_spec, to_spec
from dtorch.mesh import init_device_mesh
from dtorch.placements import Partial, Replicate, Shard, normalize

MESH = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def test_the_classes_are_torchs_own():
    for name in ("Shard", "Replicate", "Partial"):
        own = getattr(torch.distributed.tensor, name)
        assert getattr(placements, name) is own and getattr(distributed_spec, name) is own
    with pytest.raises(AttributeError, match="no attribute 'Shart'"):
        _ = placements.Shart


def test_importing_the_module_does_not_load_torchs_tensor_package():
    code = "import sys, dtorch.placements; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("given", "ndim", "expected"),
    [
        (None, None, (Replicate(), Replicate())),
        ([Shard(0), Partial("max")], None, (Shard(0), Partial("max"))),
        ((Shard(-1), Replicate()), 3, (Shard(2), Replicate())),
        ((Shard(-1), Replicate()), None, (Shard(-1), Replicate())),
        ({"tp": Shard(0)}, 1, (Replicate(), Shard(0))),
        ({}, 0, (Replicate(), Replicate())),
        (iter([Shard(0), Shard(0)]), 1, (Shard(0), Shard(0))),
    ],
)
def test_normalize_gives_one_placement_an_axis(given, ndim, expected):
    assert normalize(given, MESH, ndim) == expected


@pytest.mark.parametrize(
    ("given", "ndim", "message"),
    [
        ([Shard(0)] * 3, 2, r"3 placements .* mesh\(dp=2, tp=4\), which has 2 axes"),
        ([Shard(0)], 2, "1 placements .* which has 2 axes"),
        (
            [Replicate(), Shard(2)],
            2,
            r'Shard\(2\) on axis "tp" .* beyond the tensor\'s 2 dimensions. Legal: Shard\(0\)',
        ),
        ([Replicate(), Shard(-3)], 2, "beyond"),
        ([Replicate(), Shard(0)], 0, "scalar can only be Replicate"),
        ({"tq": Shard(0)}, 2, "no axis 'tq' .* did you mean 'tp'"),
        ({0: Shard(0)}, 2, "no axis 0"),
        ([Shard, Replicate()], 2, "parentheses"),
        ([0, Replicate()], 2, r"write Shard\(0\)"),
        ("Shard", 2, "must be a list"),
        (Shard(0), 2, "must be a list"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(given, ndim, message):
    with pytest.raises(PlacementError, match=message):
        normalize(given, MESH, ndim)


def test_names_need_a_mesh_with_names():
    with pytest.raises(PlacementError, match="mesh_dim_names"):
        normalize({"tp": Shard(0)}, init_device_mesh("cpu", (2,)))


def test_spec_and_placements_convert_both_ways():
    public = (Shard(1), Replicate(), Partial(), Partial("max"))
    spec = (Split(1), WHOLE, PENDING, Pending("max"))
    assert to_spec(public) == spec
    assert from_spec(spec) == public
    assert from_spec((Split(0, outer=3, unit=64),)) == (Shard(0),), "units are the compiler's own matter"
