"""The direct way into ATen gives what the general one gives: every function of the table that it understands.

In: `CASES` of functions.py, with contiguous tensors and with other strides. Out: failures that name the function and
the first difference: operators, arguments, metadata with strides, aliases, which results are inputs.
"""

import sys
from pathlib import Path

import pytest
import torch

from dtorch.capture import direct
from dtorch.capture.expand import Operation
from dtorch.capture.record import Scan
from dtorch.capture.symbol import meta_of

sys.path.insert(0, str(Path(__file__).parent))
from functions import CASES, tensors_of, with_tensors  # noqa: E402

CPU = torch.device("cpu")


def turned(tensor):
    """The same values with the strides of a transposed tensor."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def wide(tensor):
    """The same values as every second row of a larger tensor."""
    return torch.stack([tensor, tensor], -1)[..., 0] if tensor.dim() else tensor


def opened(case, change):
    """Two operations for one call: to be looked at in the two ways."""
    tensors = [change(tensor) for tensor in tensors_of([list(case.args), case.kwargs])]
    args, kwargs = with_tensors([list(case.args), dict(case.kwargs)], iter(tensors))
    scan = Scan(tuple(args), kwargs)
    metas = tuple(meta_of(tensor, CPU) for tensor in scan.tensors)
    return [Operation(case.function, scan.args, scan.kwargs, metas) for _ in range(2)]


def described(val):
    if isinstance(val, torch.Tensor):
        return (type(val).__name__, tuple(val.shape), val.stride(), val.dtype, val.device)
    return [described(item) for item in val] if isinstance(val, (list, tuple)) else val


def plain(item):
    """Arguments with types told apart (`1`, `1.0`, `True`)."""
    if isinstance(item, (list, tuple)):
        return [plain(child) for child in item]
    if isinstance(item, dict):
        return {key: plain(child) for key, child in item.items()}
    return (type(item).__name__, repr(item))


def listed(expansion):
    return [(str(s.target), plain(s.args), plain(s.kwargs), described(s.val)) for s in expansion.steps]


def difference(short, long):
    """What the two ways do not agree on, or None."""
    long.probe()
    for name in ("results", "aliases", "spec", "mutated"):
        if getattr(short, name) != getattr(long, name):
            return f"{name}: {getattr(short, name)} and not {getattr(long, name)}"
    direct_steps, general = short.expansion, long.expand()
    if listed(direct_steps) != listed(general) or direct_steps.outputs != general.outputs:
        return f"{listed(direct_steps)} {direct_steps.outputs} and not {listed(general)} {general.outputs}"
    return None


@pytest.mark.parametrize("change", [lambda tensor: tensor, turned, wide], ids=["contiguous", "turned", "wide"])
@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{case.name}" for n, case in enumerate(CASES)])
def test_what_the_direct_way_understands_it_expands_as_the_general_way_does(case, change):
    short, long = opened(case, change)
    if not direct.look(short):
        assert short.expansion is None and not short.results
        return
    found = difference(short, long)
    assert found is None, f"{case.name}: {found}"


def test_most_functions_are_understood_directly():
    understood = {case.name for case in CASES if direct.look(opened(case, lambda tensor: tensor)[0])}
    hot = """torch.add Tensor.add_ torch.matmul F.linear Tensor.view Tensor.reshape Tensor.transpose torch.cat
    torch.stack torch.sum torch.mean F.softmax F.layer_norm F.rms_norm F.scaled_dot_product_attention F.embedding
    torch.where F.gelu torch.eq Tensor.to Tensor.float torch.split torch.topk torch.index_select torch.gather
    Tensor.masked_fill"""
    missing = set(hot.split()) & {case.name for case in CASES} - understood
    assert not missing and len(understood) > 200, missing
