"""Shape rules written by hand against torch's own: on fake tensors, with strides and dtypes of all kinds.

In: operators that have a rule, and argument lists. Out: failures where a rule answers and torch answers otherwise.
"""

import itertools

import pytest
import torch

from dtorch import torch_private
from dtorch.capture.shapes import CPU_SHAPE_RULES, pointwise

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


def both(target, args, kwargs=None):
    """The rule's answer and torch's, as (shape, stride, dtype); None for none, "error" where torch refuses."""

    def on(make):
        leaves, tree = torch_private.tree_flatten((args, kwargs or {}))
        return torch_private.tree_unflatten([make(x) if isinstance(x, torch.Tensor) else x for x in leaves], tree)

    given, named = on(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))
    mine = CPU_SHAPE_RULES[target](*given, **named)
    mine = None if mine is NotImplemented else mine  # nobody may ask torch's rule for "meta" either
    given, named = on(lambda t: torch_private.fake_tensor(tuple(t.shape), t.stride(), t.dtype, t.device))
    try:
        with torch_private.fake_execution():
            theirs = target(*given, **named)
    except (RuntimeError, IndexError, TypeError, ValueError):
        theirs = "error"
    return [each if each is None or each == "error" else (each.shape, each.stride(), each.dtype)
            for each in (mine, theirs)]  # fmt: skip


def layouts(*shape):
    """Tensors of a shape: contiguous, with the last two dims turned, every second element, with an odd stride of 1."""
    dense = torch.empty(shape)
    yield dense
    if len(shape) > 1:
        yield torch.empty((*shape[:-2], shape[-1], shape[-2])).mT
        yield torch.empty((*shape, 2))[..., 0]
    if shape and shape[0] == 1:
        yield dense.as_strided(shape, (99, *dense.stride()[1:]))


def agree(target, args, kwargs=None):
    mine, theirs = both(target, args, kwargs)
    assert mine is None or mine == theirs, (target, args, kwargs)
    return mine is not None


def test_pointwise_results_are_as_torch_has_them():
    shapes = [(5, 7), (1, 7), (5, 1), (7,), (), (0, 3), (2, 3, 4)]
    answered = 0
    for target in [target for target, rule in CPU_SHAPE_RULES.items() if rule is pointwise]:
        name = str(target).split(".")[1]
        for shape, dtype in itertools.product(shapes, DTYPES):
            for x in layouts(*shape):
                x = x.to(dtype)
                others = [x, x.to(torch.float32), torch.empty(7, dtype=dtype), torch.empty((), dtype=dtype)]
                if name not in ("add", "sub", "mul", "div", "maximum", "minimum"):
                    others = [2.0] if "Scalar" in str(target) or "clamp_" in name else [None]
                for other in others:
                    answered += agree(target, [x] if other is None else [x, other])
                if name in ("add", "sub", "mul", "div"):
                    answered += agree(target, [x, 2]) + agree(target, [x, 2.5])
                if name == "abs":
                    for low, high in ((None, 1.0), (0, None), (0.5, 2), (None, None)):
                        answered += agree(aten.clamp.default, [x, low, high])
    assert answered > 300


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_give_what_torch_gives(dtype):
    answered = 0
    for shape in [(5, 8), (8,), (2, 5, 8), (1, 1, 8), (0, 8), (2, 8, 3, 3)]:
        for x in layouts(*shape):
            x = x.to(dtype)
            weights = [torch.empty(size, dtype=dtype) for size in ((6, 8), (6, 5), (8,))]
            for w in (*weights, torch.empty(8, 6, dtype=dtype).t(), torch.empty(6, 8, dtype=torch.float64)):
                answered += agree(aten.linear.default, [x, w])
                answered += agree(aten.linear.default, [x, w, torch.empty(6, dtype=dtype)])
                answered += agree(aten.linear.default, [x, w, torch.empty(1, dtype=dtype)])
            for last in ([8], [x.shape[-1]], list(x.shape[-2:]), [4], []):
                weight = torch.empty(last, dtype=dtype)
                answered += agree(aten.layer_norm.default, [x, last])
                answered += agree(aten.layer_norm.default, [x, last, weight, weight])
                answered += agree(aten.layer_norm.default, [x, last, weight.to(torch.float32), None])
                answered += agree(aten.rms_norm.default, [x, last, weight])
                answered += agree(aten.rms_norm.default, [x, last, None, 1e-5])
            for groups in (2, 3, 8):
                weight = torch.empty(8, dtype=dtype)
                answered += agree(aten.group_norm.default, [x, groups, weight, weight])
                answered += agree(aten.group_norm.default, [x, groups])
    assert bool(answered) == dtype.is_floating_point


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_dense_whatever_lies_in_their_factors(dtype):
    answered = 0
    sizes = [
        *[((5, 7), (7, 3)), ((1, 7), (7, 1)), ((2, 5, 7), (2, 7, 3)), ((1, 5, 7), (1, 7, 3))],
        *[((2, 3, 4, 5), (2, 3, 5, 1)), ((2, 5, 7), (7, 3)), ((5, 7), (2, 7, 3))],
        *[((5, 7), (6, 3)), ((7,), (7,)), ((0, 7), (7, 3))],
    ]
    for left, right in sizes:
        for x, y in itertools.product(layouts(*left), layouts(*right)):
            answered += agree(aten.matmul.default, [x.to(dtype), y.to(dtype)])
            answered += agree(aten.matmul.default, [x.to(dtype), y.to(torch.float16)])
    assert bool(answered) == dtype.is_floating_point


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_attention_lies_in_memory_as_its_query(dtype):
    answered = 0
    sizes = [((2, 4, 7, 8), (2, 4, 9, 8)), ((2, 4, 1, 8), (2, 4, 9, 8)), ((1, 4, 7, 8), (1, 4, 7, 8)),
             ((2, 4, 7, 8), (2, 2, 7, 8)), ((2, 4, 7, 8), (2, 4, 9, 6))]  # fmt: skip
    for (query, key), turned in itertools.product(sizes, itertools.product([False, True], repeat=2)):
        q, k = [
            torch.empty(b, s, h, d, dtype=dtype).transpose(1, 2) if turn else torch.empty(b, h, s, d, dtype=dtype)
            for (b, h, s, d), turn in zip((query, key), turned)
        ]
        masks = [None, torch.empty(query[2], key[2], dtype=torch.bool), torch.empty(1, 1, 1, key[2], dtype=dtype),
                 torch.empty(query[0], 1, query[2], key[2], dtype=dtype), torch.empty(3, 3, dtype=dtype)]  # fmt: skip
        for mask, causal in itertools.product(masks, [False, True]):
            answered += agree(aten.scaled_dot_product_attention.default, [q, k, k, mask, 0.0, causal])
    assert answered > 10
