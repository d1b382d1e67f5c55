"""The builtins that plans call instead of `OpOverload` objects parse to the very overloads that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dtorch.torch_private import native_functions

X, B, M, I4 = torch.ones(2, 4), torch.ones(4), torch.ones(4, 4), torch.ones(1, 1, 4, 4)
PAIR = (X, X)
ARGUMENTS: dict[str, list[tuple]] = {
    "aten.linear.default": [(X, M, B), (X, M)],
    **dict.fromkeys(("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor"), [PAIR]),
    **dict.fromkeys(("aten.add_.Tensor", "aten.sub_.Tensor", "aten.mul_.Tensor", "aten.div_.Tensor"), [PAIR]),
    "aten.scalar_tensor.default": [(0.5,)],
    "aten.maximum.default": [PAIR],
    **dict.fromkeys(("aten.mm.default", "aten.matmul.default"), [(X, M)]),
    "aten.bmm.default": [(X[None], M[None])],
    "aten.addmm.default": [(B, X, M)],
    "aten.reshape.default": [(X, [4, 2]), (X, [-1])],
    "aten.view.default": [(X, [4, 2]), (X, [-1])],
    "aten.transpose.int": [(X, 0, 1)],
    "aten.permute.default": [(X, [1, 0])],
    "aten.unsqueeze.default": [(X, 0)],
    "aten.squeeze.dim": [(X, 0)],
    "aten.select.int": [(X, 0, 1)],
    "aten.expand.default": [(X, [2, 2, 4])],
    "aten.cat.default": [([X, X], 1), ([X, X],)],
    "aten.stack.default": [([X, X], 1), ([X, X],)],
    "aten.embedding.default": [(M, torch.ones(2, dtype=torch.int64)), (M, torch.ones(2, dtype=torch.int64), 1)],
    "aten.scaled_dot_product_attention.default": [(I4, I4, I4), (I4, I4, I4, None, 0.0, True)],
    "aten.layer_norm.default": [(X, [4], B, B), (X, [4], None, None, 1e-6)],
    "aten.rms_norm.default": [(X, [4], B, 1e-6), (X, [4])],
    "aten.group_norm.default": [(X, 2, B, B, 1e-5), (X, 2)],
    "aten.softmax.int": [(X, -1), (X, -1, torch.float64)],
    "aten.conv2d.default": [(I4, I4, None, [1, 1], [0, 0], [1, 1], 1), (I4, I4)],
    "aten.pow.Tensor_Scalar": [(X, 2), (X, 0.5)],
    "aten.mean.dim": [(X, [-1], True), (X, [0, 1]), (X, None)],
    "aten.sum.dim_IntList": [(X, [-1], True), (X, [0, 1]), (X, None), (X, [])],
    "aten.where.self": [(X > 0, X, X)],
}
PLAIN: list[tuple] = [(X,)]


@pytest.mark.parametrize("name", native_functions())
def test_a_builtin_is_the_operator_that_a_plan_names(name: str) -> None:
    builtin: Any = native_functions()[name]
    for args in ARGUMENTS.get(name, PLAIN):
        traced = make_fx(lambda *given: builtin(*given), pre_dispatch=True)(*args)
        called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
        assert called == [name], (called, args)
