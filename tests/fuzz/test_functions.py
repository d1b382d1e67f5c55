"""Every function of the table against torch: one device bit for bit, then meshes with every placement of its inputs.

In: `CASES` of functions.py. Out: failures that name the function, the mesh, the placements and the difference. Results
are recorded for all placements of a mesh and read together, so a function costs few segments.
"""

import os
import random
import sys
import zlib
from itertools import product
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.sharding.check import difference

sys.path.insert(0, str(Path(__file__).parent))
from functions import CASES, Case, tensors_of, with_tensors  # noqa: E402

SINGLE = dtorch.init_device_mesh("cpu", (1,))
MESHES = [dtorch.init_device_mesh("cpu", (2,)), dtorch.init_device_mesh("cpu", (3,))]
GRID = dtorch.init_device_mesh("cpu", (2, 2))
LIMITS = {(1,): 3, (2,): 16, (3,): 8, (2, 2): 6}  # placements of one function on a mesh; more are sampled
KNOWN: dict[str, str] = {}  # function: what is not right yet


def choices(tensor):
    """What one mesh axis can do with a tensor."""
    found = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]
    return found + [Partial()] if tensor.dtype.is_floating_point or tensor.dtype.is_complex else found


def call(case, tensors):
    """The case on these tensors: (results without tensors, tensors of the results, the tensors after the call)."""
    args, kwargs = with_tensors([list(case.args), dict(case.kwargs)], iter(tensors))
    torch.manual_seed(11)
    result = case.function(*args, **kwargs)
    return result, list(tensors_of(result)), tensors


def expected_of(case):
    return call(case, [tensor.clone() for tensor in tensors_of([list(case.args), case.kwargs])])


def plans_of(case, mesh):
    """Lists with the placements of every tensor argument, all or a sample that is the same in every run."""
    given = list(tensors_of([list(case.args), case.kwargs]))
    free = [[list(each) for each in product(*[choices(t)] * mesh.ndim)] for t in given[: case.places]]
    rest = [[Replicate()] * mesh.ndim for _ in given[case.places :]]
    every = [[*chosen, *rest] for chosen in product(*free)]
    limit = LIMITS[mesh.shape]
    draw = random.Random(zlib.crc32(case.name.encode()) + mesh.size())
    return every if len(every) <= limit else draw.sample(every, limit)


def place(tensor, mesh, placements):
    return dtorch.distribute_tensor(tensor.clone(), mesh, placements)


def complaint(found, wanted, tolerance):
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype}{list(found.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    apart = difference(found, wanted)
    return f"off by {apart:.1e}" if not apart <= tolerance else ""


def check(case, mesh, exact=False):
    """Complaints about a case on a mesh."""
    wanted, wanted_tensors, wanted_after = expected_of(case)
    given = list(tensors_of([list(case.args), case.kwargs]))
    runs, complaints = [], []
    for plan in plans_of(case, mesh):
        try:
            placed = [place(tensor, mesh, placements) for tensor, placements in zip(given, plan, strict=True)]
            before = [tensor.placements for tensor in placed]
            runs.append((plan, before, *call(case, placed)))
        except Exception as error:
            complaints.append(f"{mesh.shape} {plan}: {type(error).__name__}: {str(error)[:300]}")
    for plan, before, result, found, after in runs:
        where = f"{mesh.shape} {plan}"
        if type(result) is not type(wanted) and not isinstance(result, torch.Tensor):
            complaints.append(f"{where}: a {type(result).__name__} instead of a {type(wanted).__name__}")
        if not isinstance(wanted, (torch.Tensor, list, tuple)) and result != wanted and wanted is not NotImplemented:
            complaints.append(f"{where}: {result} instead of {wanted}")
        if [each.placements for each in after] != before:
            complaints.append(f"{where}: the call changed its arguments' placements")
        if len(found) != len(wanted_tensors):
            complaints.append(f"{where}: {len(found)} tensors instead of {len(wanted_tensors)}")
        for mine, theirs in zip([*found, *after], [*wanted_tensors, *wanted_after]):
            try:
                value = mine.to_torch()
            except Exception as error:
                complaints.append(f"{where}: {type(error).__name__}: {str(error)[:300]}")
                continue
            if case.meaningless and value.shape == theirs.shape and value.dtype is theirs.dtype:
                continue
            text = complaint(value, theirs, 0.0 if exact else case.tolerance)
            if exact and mine.stride() != theirs.stride():
                text += f" strides {mine.stride()} instead of {theirs.stride()}"
            if (
                exact
                and not text
                and theirs.dtype.is_floating_point
                and not torch.equal(value.signbit(), theirs.signbit())
            ):
                text = "signs of zero differ"
            if text:
                complaints.append(f"{where}: {text}")
    return complaints


NAMES = [
    pytest.param(name, marks=pytest.mark.xfail(reason=KNOWN[name], strict=True) if name in KNOWN else ())
    for name in dict.fromkeys(case.name for case in CASES)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_function_gives_what_torch_gives_on_every_mesh(name):
    complaints = []
    for case in (case for case in CASES if case.name == name):
        complaints += check(case, SINGLE, exact=True)
        for mesh in (*MESHES, GRID):
            complaints += check(case, mesh)
    assert not complaints, f"{name}: {len(complaints)} differ:\n" + "\n".join(complaints[:12])


def test_a_wrong_rule_is_found():
    assert not check(BESSEL, MESHES[0])
    dtorch.register_sharding_rule("aten::i0", "a b -> a b", linear=[(0,)])  # of an op that no other test uses
    other_shape = Case("i0", torch.i0, (torch.full((4, 7), 1.5),))
    assert any("off by" in text for text in check(other_shape, MESHES[0]))


BESSEL = Case("i0", torch.i0, (torch.full((5, 7), 1.5),))


@pytest.mark.filterwarnings("ignore")
def test_the_page_of_functions_is_up_to_date():
    from functions_page import text

    page = Path(__file__).resolve().parents[2] / "docs/functions.md"
    if os.environ.get("DTORCH_ACCEPT") == "1":
        page.write_text(text(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text(), "run this test with DTORCH_ACCEPT=1 and review docs/functions.md"
