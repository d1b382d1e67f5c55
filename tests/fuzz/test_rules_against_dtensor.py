"""torch's DTensor as a second oracle: where it keeps the placements of our strategy, every device holds the same.

It runs under torch's LocalTensorMode, which holds all devices' parts in one process.
"""

import pytest
import torch
from fuzz.test_rules import CALLS as ALL_CALLS

from dtorch.ir.layout import Pending, Split, Whole
from dtorch.sharding.check import choices, difference, results, run_parts
from dtorch.sharding.factors import Mapping
from dtorch.sharding.rules import mappings_of
from dtorch.torch_private import local_tensors

aten = torch.ops.aten
G = torch.Generator().manual_seed(3)


def f(*shape):
    return torch.randn(shape, generator=G, dtype=torch.float64)


CALLS = [
    (aten.add.Tensor, (f(6, 4), f(4))),
    (aten.mul.Tensor, (f(6, 4), f(6, 4))),
    (aten.relu.default, (f(5, 4),)),
    (aten.mm.default, (f(5, 6), f(6, 8))),
    (aten.bmm.default, (f(4, 5, 6), f(4, 6, 8))),
    (aten.t.default, (f(5, 6),)),
    (aten.permute.default, (f(2, 4, 6), [2, 0, 1])),
    (aten.view.default, (f(4, 6), [2, 2, 6])),
    (aten.sum.dim_IntList, (f(4, 6), [0])),
    (aten.amax.default, (f(4, 8), [1])),  # DTensor fails where a device holds nothing of the dim
    (aten._softmax.default, (f(5, 6), 1, False)),
    (aten.cat.default, ([f(4, 6), f(4, 6)], 1)),
    (aten.embedding.default, (f(8, 6), torch.randint(0, 8, (4, 3), generator=G))),
    (aten.index_select.default, (f(4, 6), 0, torch.tensor([2, 0, 1]))),
    (aten.convolution.default, (f(4, 4, 6, 6), f(8, 4, 3, 3), f(8), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    (aten.native_layer_norm.default, (f(4, 5, 6), [6], f(6), f(6), 1e-5)),
]


def public(placed):
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placed) is Split:
        return Shard(placed.dim)
    return Replicate() if type(placed) is Whole else Partial(placed.op)


def is_plain(placed):
    return type(placed) is not Split or (placed.outer == 1 and placed.unit == 1)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
@pytest.mark.parametrize("count", [2, 4])
def test_devices_hold_what_dtensor_holds(call, count):
    assert compare(*call, count) > 1, "DTensor never kept the placements of our strategies"


@pytest.mark.slow
def test_every_op_that_dtensor_has_agrees_with_it():
    compared = set()
    for op, args, kwargs in ALL_CALLS:
        if not kwargs and compare(op, args, 2, may_refuse=True):
            compared.add(op)
    assert len(compared) > 200, f"DTensor served for {len(compared)} ops only"


def compare(op, args, count, may_refuse=False):
    """Hold every strategy of an op's rule against DTensor's parts; how many results it kept the placements of.

    `may_refuse`: DTensor may raise, as it does for ops and sizes that it has no strategy for.
    """
    outputs = results(op(*args))
    rule = mappings_of(op, args, {}, outputs)[0][0]
    if may_refuse and not isinstance(rule, Mapping):
        return 0
    assert isinstance(rule, Mapping)
    compared = 0
    for choice in choices(rule):
        inputs, made = choice.strategy
        if any(type(p) is Pending for p in inputs) or not all(map(is_plain, (*inputs, *made))):
            continue
        try:
            theirs = local_tensors(op, args, [public(p) for p in inputs], count)
        except Exception:
            if may_refuse:
                continue
            raise
        parts = run_parts(op, args, {}, outputs, [choice], (count,))
        for position, (placement, held) in enumerate(theirs):
            if placement != public(made[position]):
                continue  # DTensor chose to communicate first
            for rank, value in enumerate(held):
                assert difference(parts.local[position][(rank,)], value) < 1e-12, parts.told
            compared += 1
    return compared
