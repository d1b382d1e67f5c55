"""The direct way into ATen gives what the general one gives: every function of the table that it understands.

In: `CASES` of functions.py, with contiguous tensors and with other strides. Out: failures that name the function and
the first difference: operators, arguments, metadata with strides, aliases, which results are inputs.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dtorch.capture import direct
from dtorch.capture.expand import Operation
from dtorch.capture.promotion import dtypes_pinned
from dtorch.capture.record import Scan
from dtorch.capture.symbol import meta_of

sys.path.insert(0, str(Path(__file__).parent))
from functions import CASES, Case, tensors_of, with_tensors  # noqa: E402

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
    direct_steps, general = dtypes_pinned(short.expansion, short.metas), long.expand()
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


def images(n, c, h, w, dtype):
    """Functions that choose a memory format, on images of one size."""
    x, k = torch.rand(n, c, h, w).to(dtype), min(3, h, w)
    row, deep = x[0], x[None]

    def t(*shape):
        return torch.rand(shape).to(dtype)

    yield F.conv2d, (x, t(6, c, k, k), t(6)), {}
    yield F.conv2d, (x, t(c, 1, k, k), None, 2, 1, 1, c), {}
    yield F.conv2d, (x, t(6, c, k, k)), {"padding": "same"}
    yield F.conv2d, (row, t(6, c, 1, 1)), {}
    yield F.conv1d, (row, t(6, h, k)), {}
    yield F.conv3d, (deep, t(5, n, 1, k, k)), {}
    yield F.conv_transpose1d, (row, t(h, 6, k)), {}
    yield F.conv_transpose2d, (x, t(c, 6, k, k), t(6), 2, 1, 1), {}
    yield F.conv_transpose3d, (deep, t(n, 6, 1, k, k)), {}
    for pool in (F.max_pool2d, F.avg_pool2d):
        yield pool, (x, k, 1, k // 2), {}
    for pool in (F.max_pool1d, F.avg_pool1d):
        yield pool, (row, k), {}
    for pool in (F.max_pool3d, F.avg_pool3d):
        yield pool, (x, (1, k, k)), {}
    yield F.max_pool2d, (x, k), {"return_indices": True}
    yield F.adaptive_avg_pool2d, (x, (None, 3)), {}
    yield F.adaptive_max_pool2d, (x, 2), {}
    yield F.adaptive_avg_pool1d, (row, 2), {}
    yield F.adaptive_avg_pool3d, (x, 1), {}
    for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact"):
        yield F.interpolate, (x,), {"scale_factor": 2, "mode": mode}
        yield F.interpolate, (x, (5, 4)), {"mode": mode}
    yield F.interpolate, (row,), {"scale_factor": 2, "mode": "linear"}
    yield F.interpolate, (deep,), {"scale_factor": 2, "mode": "trilinear"}
    yield F.batch_norm, (x, t(c), t(c), t(c), t(c)), {}
    yield F.batch_norm, (x, t(c).float(), t(c).float()), {}
    yield F.batch_norm, (row, t(h), t(h)), {}
    yield F.batch_norm, (x, t(c), t(c), t(c), t(c), True), {}
    yield F.instance_norm, (x,), {}
    yield F.instance_norm, (x, None, None, t(c), t(c)), {}
    yield F.instance_norm, (x, t(c), t(c)), {"use_input_stats": False}
    yield F.group_norm, (x, 1, t(c), t(c)), {}


def channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(2, 4, 9, 8), (1, 1, 7, 7), (2, 1, 5, 6), (1, 4, 3, 3), (2, 3, 1, 1)], ids=str)
def test_functions_that_choose_a_memory_format_are_expanded_as_the_general_way_does(size, dtype):
    understood = set()
    for function, args, kwargs in images(*size, dtype):
        case = Case(function.__name__, function, args, kwargs)
        for change in (lambda tensor: tensor, channels_last, wide):
            short, long = opened(case, change)
            try:
                opened(case, change)[0].probe()
            except (RuntimeError, ValueError):
                assert not direct.look(short)
                continue
            if direct.look(short):
                understood.add((function, kwargs.get("mode")))
                found = difference(short, long)
                assert found is None, f"{function.__name__}: {found}"
    assert size != (2, 4, 9, 8) or len(understood) >= 26, understood


def test_most_functions_are_understood_directly():
    understood = {case.name for case in CASES if direct.look(opened(case, lambda tensor: tensor)[0])}
    hot = """torch.add Tensor.add_ torch.matmul F.linear Tensor.view Tensor.reshape Tensor.transpose torch.cat
    torch.stack torch.sum torch.mean F.softmax F.layer_norm F.rms_norm F.scaled_dot_product_attention F.embedding
    torch.where F.gelu torch.eq Tensor.to Tensor.float torch.split torch.topk torch.index_select torch.gather
    Tensor.masked_fill F.conv1d F.conv2d F.max_pool2d F.avg_pool2d F.interpolate F.batch_norm F.group_norm"""
    missing = set(hot.split()) & {case.name for case in CASES} - understood
    assert not missing and len(understood) > 200, missing
