"""Every function of the table against torch: one device bit for bit, then meshes with every placement of its inputs.

In: `CASES` of functions.py. Out: failures that name the function, the mesh, the placements and the difference. Results
are recorded for many placements and read together, so a function costs few segments.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch import Replicate
from dtorch.sharding.check import difference

sys.path.insert(0, str(Path(__file__).parent))
from functions import CASES, Case, tensors_of, with_tensors  # noqa: E402
from placing import pairs, place, plans_of  # noqa: E402

SINGLE = dtorch.init_device_mesh("cpu", (1,))
MESHES = [dtorch.init_device_mesh("cpu", shape) for shape in ((2,), (3,), (2, 2))]
BATCH = 64  # placements whose results are read together: one segment
KNOWN: dict[str, str] = {}  # function: what is not right yet


def call(case, tensors):
    """The case on these tensors: (results without tensors, tensors of the results)."""
    args, kwargs = with_tensors([list(case.args), dict(case.kwargs)], iter(tensors))
    torch.manual_seed(11)
    result = case.function(*args, **kwargs)
    return result, list(tensors_of(result))


class Expected:
    """What torch gives for a case: the result, its tensors, the arguments after the call and which were written."""

    def __init__(self, case):
        self.given = list(tensors_of([list(case.args), case.kwargs]))
        self.after = [tensor.clone() for tensor in self.given]
        self.result, self.tensors = call(case, self.after)
        self.written = [not same(a, b) for a, b in zip(self.given, self.after)]


def same(a, b):
    return a.dtype is b.dtype and a.shape == b.shape and (difference(a, b) == 0 or a.numel() == 0)


class Placed:
    """Arguments on a mesh; those that a case does not write serve all its calls."""

    def __init__(self, expected, mesh):
        self.expected, self.mesh = expected, mesh
        self.kept = {}

    def arguments(self, plan):
        return [self._argument(i, placements) for i, placements in enumerate(plan)]

    def _argument(self, i, placements):
        given = self.expected.given[i]
        if self.expected.written[i]:
            return place(given, self.mesh, placements)
        key = (i, tuple(placements))
        if key not in self.kept:
            self.kept[key] = place(given, self.mesh, placements)
        return self.kept[key]


def complaint(found, wanted, tolerance):
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype}{list(found.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    apart = difference(found, wanted)
    return f"off by {apart:.1e}" if not apart <= tolerance else ""


def check(case, mesh, exact=False):
    """Complaints about a case on a mesh."""
    expected = Expected(case)
    plans = [[[Replicate()]] * len(expected.given)] if exact else plans_of(expected.given, mesh)
    placed = Placed(expected, mesh)
    complaints = []
    for begin in range(0, len(plans), BATCH):
        complaints += check_batch(case, placed, plans[begin : begin + BATCH], exact)
    for (i, placements), tensor in placed.kept.items():
        text = complaint(tensor.to_torch(), expected.given[i], 0.0)
        if text or tensor.placements != list(placements):
            complaints.append(f"{mesh.shape} argument {i} {placements}: a call that only reads it changed it: {text}")
    return complaints


def check_batch(case, placed, plans, exact):
    """Complaints about some placements of a case's arguments: all calls are recorded, then all results read."""
    expected, mesh = placed.expected, placed.mesh
    runs, complaints = [], []
    for plan in plans:
        try:
            given = placed.arguments(plan)
            runs.append((plan, given, *call(case, given)))
        except Exception as error:
            complaints.append(f"{mesh.shape} {plan}: {type(error).__name__}: {str(error)[:300]}")
    wanted = expected.result
    for plan, given, result, found in runs:
        where = f"{mesh.shape} {plan}"
        if type(result) is not type(wanted) and not isinstance(result, torch.Tensor):
            complaints.append(f"{where}: a {type(result).__name__} instead of a {type(wanted).__name__}")
        if not isinstance(wanted, (torch.Tensor, list, tuple)) and result != wanted and wanted is not NotImplemented:
            complaints.append(f"{where}: {result} instead of {wanted}")
        if [list(each.placements) for each in given] != plan:
            complaints.append(f"{where}: the call changed its arguments' placements")
        if len(found) != len(expected.tensors):
            complaints.append(f"{where}: {len(found)} tensors instead of {len(expected.tensors)}")
        written = [(a, b) for a, b, is_written in zip(given, expected.after, expected.written) if is_written]
        for mine, theirs in [*zip(found, expected.tensors), *written]:
            try:
                text = value_complaint(case, mine, theirs, exact)
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:300]}"
            if text:
                complaints.append(f"{where}: {text}")
    return complaints


def value_complaint(case, mine, theirs, exact):
    value = mine.to_torch()
    if case.meaningless and value.shape == theirs.shape and value.dtype is theirs.dtype:
        return ""
    text = complaint(value, theirs, 0.0 if exact else case.tolerance)
    if exact and mine.stride() != theirs.stride():
        text += f" strides {mine.stride()} instead of {theirs.stride()}"
    if exact and not text and theirs.dtype.is_floating_point and not torch.equal(value.signbit(), theirs.signbit()):
        text = "signs of zero differ"
    return text


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
        for mesh in MESHES:
            complaints += check(case, mesh)
    assert not complaints, f"{name}: {len(complaints)} differ:\n" + "\n".join(complaints[:12])


def test_pairs_hold_every_two_items_of_different_lists():
    free = [list("abcde"), list("FGH"), [1, 2], list("vwxyz")]
    rows = pairs(free)
    for i in range(4):
        for k in range(i):
            assert {(row[i], row[k]) for row in rows} == {(a, b) for a in free[i] for b in free[k]}
    assert len(rows) < 5 * 3 * 2 * 5 / 3


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
