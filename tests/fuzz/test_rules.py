"""Every rule against its op: all strategies, on axes that divide the sizes and axes that do not.

The table holds example calls; `dtorch.sharding.check` enumerates factors, intervals, axes and pairs of them.
"""

import pytest
import torch

from dtorch.sharding.check import check_rule

aten = torch.ops.aten
G = torch.Generator().manual_seed(7)


def f(*shape):
    return torch.randn(shape, generator=G, dtype=torch.float64)


def p(*shape):
    return torch.rand(shape, generator=G, dtype=torch.float64) + 0.5


def i(high, *shape, low=0):
    return torch.randint(low, high, shape, generator=G)


def b(*shape):
    return torch.randint(0, 2, shape, generator=G).bool()


def half(*shape):
    return torch.randn(shape, generator=G).bfloat16()


CALLS = []


def add(op, *args, **kwargs):
    CALLS.append((op, args, kwargs))


# pointwise
for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default, aten.atan2.default,
           aten.lt.Tensor, aten.eq.Tensor, aten.ge.Tensor, aten.ne.Tensor):  # fmt: skip
    add(op, f(5, 3, 6), f(3, 1))
    add(op, f(4, 6), f(4, 6))
for op in (aten.div.Tensor, aten.pow.Tensor_Tensor, aten.remainder.Tensor, aten.fmod.Tensor):
    add(op, p(5, 1, 6), p(3, 6))
UNARY = """relu gelu silu sigmoid tanh exp sin cos neg abs erf expm1 floor ceil round sign elu leaky_relu hardswish
    softplus mish hardtanh relu6 clone alias detach contiguous square isnan isinf logical_not lift_fresh_copy
    log_sigmoid hardsigmoid selu tan sinh cosh atan trunc frac isfinite"""
for op in [getattr(aten, name) for name in UNARY.split()]:
    add(op.default, f(5, 6))
for op in (aten.rsqrt, aten.sqrt, aten.log, aten.log1p, aten.reciprocal, aten.log2, aten.lgamma, aten.digamma):
    add(op.default, p(3, 7))
for op in (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.logical_and.default,
           aten.logical_or.default, aten.logical_xor.default):  # fmt: skip
    add(op, b(4, 5), b(5))
add(aten.bitwise_not.default, b(5, 3))
add(aten.__and__.Tensor, b(4, 5), b(4, 1))
add(aten.add.Tensor, f(5, 6), 2.0)
add(aten.add.Scalar, f(5, 6), 2.0)
add(aten.add.Tensor, f(5, 6), f(6), alpha=3)
add(aten.sub.Tensor, i(9, 5, 6), i(9, 6))
add(aten.rsub.Scalar, f(5, 6), 2.0)
add(aten.mul.Tensor, f(5, 6), 2.0)
add(aten.mul.Scalar, f(5, 6), 2.0)
add(aten.mul.Tensor, i(9, 5), i(9, 4, 5))
add(aten.div.Tensor, f(5, 6), 3.0)
add(aten.div.Tensor_mode, f(5, 6), 3.0, rounding_mode="floor")
add(aten.floor_divide.default, i(90, 5, 6), 4)
add(aten.pow.Tensor_Scalar, f(5, 6), 2)
add(aten.pow.Scalar, 2.0, f(5, 6))
add(aten.clamp.default, f(5, 6), -0.5, 0.5)
add(aten.clamp.Tensor, f(5, 6), f(6), None)
add(aten.where.self, b(5, 1), f(5, 6), f(6))
add(aten.where.ScalarOther, b(5, 6), f(5, 6), 1.0)
add(aten.where.ScalarSelf, b(5, 6), 1.0, f(6))
add(aten.masked_fill.Scalar, f(5, 6), b(6), 0.0)
add(aten.masked_fill.Scalar, f(5, 6), b(5, 6), -1e9)
add(aten.masked_fill.Tensor, f(5, 6), b(5, 1), torch.tensor(2.0, dtype=torch.float64))
add(aten.lerp.Tensor, f(5, 6), f(6), f(5, 1))
add(aten.lerp.Scalar, f(5, 6), f(6), 0.3)
add(aten.addcmul.default, f(5, 6), f(6), f(5, 1))
add(aten.addcdiv.default, f(5, 6), p(6), p(5, 1))
add(aten._to_copy.default, torch.randn(5, 6, generator=G), dtype=torch.float64)
add(aten.to.dtype, i(9, 5, 6), torch.float64)
add(aten.to.dtype, i(9, 5, 6).int(), torch.int64)
add(aten.to.dtype, b(5, 6), torch.float64)
add(aten.dropout.default, f(5, 6), 0.5, False)
add(aten.dropout.default, f(5, 6), 0.0, True)
add(aten.glu.default, f(5, 12), -1)
add(aten.prelu.default, f(5, 6, 2), f(6))
add(aten.prelu.default, f(5, 6, 2), f(1))
add(aten.nan_to_num.default, f(5, 6))
add(aten.gt.Scalar, f(5, 6), 0.0)
add(aten.xlogy.Tensor, p(5, 6), p(6))

# products
add(aten.linear.default, f(2, 5, 6), f(9, 6), f(9))
add(aten.linear.default, f(5, 6), f(9, 6))
add(aten.linear.default, f(6), f(9, 6), f(9))
add(aten.linear.default, f(3, 2), f(3, 2), f(3))
add(aten.mm.default, f(5, 6), f(6, 9))
add(aten.mm.default, i(9, 5, 6), i(9, 6, 3))
add(aten.bmm.default, f(3, 5, 6), f(3, 6, 2))
add(aten.matmul.default, f(6), f(6))
add(aten.matmul.default, f(6), f(6, 4))
add(aten.matmul.default, f(6), f(3, 6, 4))
add(aten.matmul.default, f(5, 6), f(6))
add(aten.matmul.default, f(2, 3, 5, 6), f(3, 6, 4))
add(aten.matmul.default, f(3, 1, 5, 6), f(2, 6, 4))
add(aten.mv.default, f(5, 6), f(6))
add(aten.dot.default, f(6), f(6))
add(aten.outer.default, f(5), f(6))
add(aten.addmm.default, f(9), f(5, 6), f(6, 9))
add(aten.addmm.default, f(5, 9), f(5, 6), f(6, 9), beta=0.5, alpha=2)
add(aten.addmm.default, f(5, 1), f(5, 6), f(6, 9))
add(aten.baddbmm.default, f(3, 5, 2), f(3, 5, 6), f(3, 6, 2), beta=0.5)
add(aten.addmv.default, f(5), f(5, 6), f(6))
add(aten.addr.default, f(5, 6), f(5), f(6))
add(aten.addbmm.default, f(5, 2), f(3, 5, 6), f(3, 6, 2))
add(aten.bilinear.default, f(5, 3), f(5, 4), f(6, 3, 4), f(6))
add(aten.einsum.default, "bij,bjk->bik", [f(3, 5, 6), f(3, 6, 4)])
add(aten.einsum.default, "ij,kj,kl", [f(5, 6), f(3, 6), f(3, 2)])
add(aten.einsum.default, "ii->i", [f(5, 5)])
add(aten.einsum.default, "b h i d, b h j d -> b h i j", [f(2, 3, 5, 4), f(2, 3, 6, 4)])
add(aten.inner.default, f(6), f(6))
offs = torch.tensor([3, 3, 8], dtype=torch.int32)
add(aten._grouped_mm.default, half(8, 16), half(3, 16, 8), offs)
add(aten._grouped_mm.default, half(3, 8, 16), half(3, 16, 24))

# attention
SDPA = aten.scaled_dot_product_attention.default
add(SDPA, f(2, 3, 5, 4), f(2, 3, 7, 4), f(2, 3, 7, 6))
add(SDPA, f(2, 3, 5, 4), f(2, 3, 7, 4), f(2, 3, 7, 6), f(2, 1, 5, 7))
add(SDPA, f(2, 3, 5, 4), f(2, 3, 7, 4), f(2, 3, 7, 6), b(5, 7) | True)
add(SDPA, f(2, 3, 5, 4), f(2, 3, 5, 4), f(2, 3, 5, 4), None, 0.0, True)
add(SDPA, f(2, 3, 1, 4), f(2, 3, 5, 4), f(2, 3, 5, 4), attn_mask=f(2, 3, 1, 5))
add(SDPA, f(3, 5, 4), f(3, 5, 4), f(3, 5, 4), is_causal=True)
add(SDPA, f(5, 4), f(5, 4), f(5, 4))
add(SDPA, f(2, 9, 5, 4), f(2, 3, 5, 4), f(2, 3, 5, 4), is_causal=True, enable_gqa=True)
add(SDPA, f(2, 8, 5, 4), f(2, 2, 6, 4), f(2, 2, 6, 4), f(2, 1, 5, 6), enable_gqa=True)
add(SDPA, f(2, 6, 5, 4), f(2, 1, 6, 4), f(2, 1, 6, 4), f(2, 6, 5, 6), enable_gqa=True)
add(aten._scaled_dot_product_flash_attention_for_cpu.default, f(2, 3, 5, 4), f(2, 3, 5, 4), f(2, 3, 5, 4))

# norms
add(aten.layer_norm.default, f(5, 3, 6), [6], f(6), f(6))
add(aten.layer_norm.default, f(5, 3, 6), [3, 6])
add(aten.native_layer_norm.default, f(5, 3, 6), [6], f(6), f(6), 1e-5)
add(aten.rms_norm.default, f(5, 3, 6), [6], f(6), 1e-6)
add(aten.rms_norm.default, f(5, 3, 6), [6])
add(aten._fused_rms_norm.default, f(5, 3, 6), [6], f(6), 1e-6)
add(aten.group_norm.default, f(2, 12, 4), 3, f(12), f(12))
add(aten.group_norm.default, f(2, 12, 4, 2), 4)
add(aten.native_group_norm.default, f(3, 12, 4), f(12), f(12), 3, 12, 4, 4, 1e-5)
add(aten.batch_norm.default, f(3, 5, 4, 2), f(5), f(5), f(5), p(5), False, 0.1, 1e-5, False)
add(aten._native_batch_norm_legit_no_training.default, f(3, 5, 4), f(5), f(5), f(5), p(5), 0.1, 1e-5)
add(aten._native_batch_norm_legit.no_stats, f(3, 5, 4), f(5), f(5), True, 0.1, 1e-5)
add(aten.instance_norm.default, f(3, 5, 4), f(5), f(5), None, None, True, 0.1, 1e-5, False)
for op in (aten.softmax.int, aten.log_softmax.int):
    add(op, f(5, 3, 6), -1)
    add(op, f(5, 3, 6), 1)
add(aten._softmax.default, f(5, 6), 1, False)
add(aten._log_softmax.default, f(5, 6), 0, False)

# views
for op in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
    add(op, f(4, 18), [4, 9, 2])
    add(op, f(2, 10), [20])
    add(op, f(2, 5, 3, 4), [10, 12])
add(aten.view.default, f(6, 4), [4, 6])
add(aten.view.default, f(4, 9), [12, 3])
add(aten.view.default, f(3, 4, 5), [12, 1, 5])
add(aten.view.default, f(1, 6, 1), [2, 3])
add(aten.view.default, f(2, 3, 5), [-1])
add(aten.view.default, f(5, 6, 7), [6, 5, 7])
add(aten.view.default, f(12, 10), [8, 15])
add(aten.view.default, f(0, 6), [3, 0])
add(aten.view.dtype, f(3, 4), torch.int64)
add(aten.view.dtype, f(3, 4), torch.int32)
add(aten.flatten.using_ints, f(2, 5, 3, 4), 1, 2)
add(aten.unflatten.int, f(2, 15, 4), 1, [5, 3])
add(aten.unsqueeze.default, f(5, 6), -1)
add(aten.unsqueeze.default, f(5, 6), 0)
add(aten.squeeze.default, f(5, 1, 2))
add(aten.squeeze.dim, f(5, 1, 2), 1)
add(aten.squeeze.dim, f(3, 4), 0)
add(aten.squeeze.dims, f(3, 1, 4, 1), [0, 1])
add(aten.view_as.default, f(4, 6), f(2, 12))
add(aten.permute.default, f(2, 3, 5), [2, 0, 1])
add(aten.transpose.int, f(2, 3, 5), 0, -1)
add(aten.t.default, f(3, 5))
add(aten.movedim.int, f(2, 3, 5), 0, 2)
add(aten.movedim.intlist, f(2, 3, 5, 4), [3, 0], [0, -1])
add(aten.mT.default, f(2, 3, 5))
add(aten.expand.default, f(5, 1, 6), [5, 3, 6])
add(aten.expand.default, f(5, 1), [2, 5, 4])
add(aten.expand.default, f(5, 1, 6), [-1, 7, -1])
add(aten.expand_as.default, f(5, 1), f(5, 4))
add(aten.broadcast_tensors.default, [f(5, 1), f(1, 4), f(5, 4)])
add(aten.slice.Tensor, f(5, 6), 0, 1, 3)
add(aten.slice.Tensor, f(5, 6), 1, 0, 9223372036854775807)
add(aten.slice.Tensor, f(5, 6), 1, 0, 6)
add(aten.slice.Tensor, f(5, 6), 1, 0, 9223372036854775807, 2)
add(aten.slice.Tensor, f(5, 6), 1, -2)
add(aten.narrow.default, f(5, 6), 1, 0, 6)
add(aten.narrow.default, f(5, 6), 1, 2, 3)
add(aten.select.int, f(5, 6, 2), 1, -1)
add(aten.diagonal.default, f(5, 6, 2), 0, 0, 1)
add(aten.diagonal.default, f(5, 6, 2), dim1=1, dim2=2)
add(aten.unfold.default, f(5, 8), 1, 3, 2)
add(aten.split.Tensor, f(5, 12), 4, -1)
add(aten.split.Tensor, f(5, 10), 4, 1)
add(aten.split.Tensor, f(5, 6), 6, 1)
add(aten.split_with_sizes.default, f(16, 3), [8, 4, 4], 0)
add(aten.split_with_sizes.default, f(16, 3), [5, 4, 7])
add(aten.chunk.default, f(3, 12), 3, 1)
add(aten.chunk.default, f(3, 10), 4, 1)
add(aten.unbind.int, f(3, 5, 4), 1)
add(aten.cat.default, [f(3, 5), f(3, 5)], -1)
add(aten.cat.default, [f(3, 5), f(2, 5), f(1, 5)])
add(aten.cat.default, [f(3, 6), f(3, 3), f(3, 12)], 1)
add(aten.cat.default, [f(0), f(3, 4)], 1)
add(aten.stack.default, [f(3, 5), f(3, 5)], 1)
add(aten.repeat.default, f(3, 4), [2, 3])
add(aten.repeat.default, f(4), [2, 3])
add(aten.repeat_interleave.self_int, f(3, 4), 3, 0)
add(aten.repeat_interleave.self_int, f(3, 4), 3, 1, output_size=12)
add(aten.flip.default, f(3, 4, 5), [0, -1])
add(aten.roll.default, f(3, 4, 5), [1], [1])
add(aten.roll.default, f(3, 4), [1])
add(aten.tril.default, f(3, 4, 5))
add(aten.triu.default, f(3, 4, 5), 1)
add(aten.constant_pad_nd.default, f(3, 4, 5), [1, 2])
add(aten.constant_pad_nd.default, f(3, 4, 5), [0, 0, 1, 2], 1.0)
add(aten.pad.default, f(3, 4, 5), [1, 2, 0, 1])
add(aten.pad.default, f(3, 4, 5), [1, 2], "reflect")
add(aten.pixel_shuffle.default, f(2, 12, 3, 5), 2)
add(aten.pixel_unshuffle.default, f(2, 3, 6, 10), 2)
add(aten.diff.default, f(3, 6), 1, -1)
add(aten.diff.default, f(3, 6), 1, 0, f(2, 6), f(1, 6))
add(aten.diff.default, f(3, 6), 1, -1, prepend=f(3, 1))

# reductions
add(aten.sum.default, f(5, 6))
add(aten.sum.dim_IntList, f(5, 3, 6), [1, -1])
add(aten.sum.dim_IntList, f(5, 3, 6), [0], True)
add(aten.sum.default, b(5, 6))
add(aten.sum.dim_IntList, i(9, 5, 6), [])
add(aten.mean.default, f(5, 6))
add(aten.mean.dim, f(5, 3, 6), [1, -1])
add(aten.mean.dim, f(5, 3, 6), [0], True)
add(aten.mean.dim, f(2, 3), [0, 1])
for op in (aten.amax.default, aten.amin.default):
    add(op, f(5, 3, 6), [1, -1])
    add(op, f(2, 3), [0], True)
    add(op, i(9, 2, 3), [1])
    add(op, f(3, 2))
add(aten.max.default, f(5, 2))
add(aten.min.default, i(100, 5, 2))
add(aten.max.dim, f(5, 6), 1)
add(aten.min.dim, f(5, 6), 0, True)
add(aten.max.other, f(5, 6), f(6))
add(aten.any.default, b(5, 6))
add(aten.any.dim, b(5, 6), 1)
add(aten.all.dim, b(5, 6), 0, True)
add(aten.prod.dim_int, f(5, 6), 1)
add(aten.argmax.default, f(5, 6))
add(aten.argmax.default, f(5, 6), -1)
add(aten.argmin.default, f(5, 6), 0, True)
add(aten.logsumexp.default, f(5, 6), [1])
add(aten.var.correction, f(5, 6), [1], correction=1)
add(aten.var.dim, f(5, 6), [1], True, True)
add(aten.std.default, f(5, 6), True)
add(aten.var_mean.correction, f(5, 3, 6), [1], correction=0, keepdim=True)
add(aten.linalg_vector_norm.default, f(5, 6), 2, [1])
add(aten.norm.ScalarOpt_dim, f(5, 6), 2, [1], True)
add(aten.cumsum.default, f(5, 6), 1)
add(aten.cumprod.default, f(5, 6), 0)
add(aten.cummax.default, f(5, 6), 1)
add(aten.logcumsumexp.default, f(5, 6), 1)
add(aten.sort.default, f(5, 6), 1)
add(aten.sort.stable, f(5, 6), stable=True, dim=0)
add(aten.sort.default, f(5, 6))
add(aten.argsort.default, f(5, 6), -1, True)
add(aten.argsort.stable, f(5, 6), stable=True, dim=0)
add(aten.topk.default, f(5, 6), 2)
add(aten.topk.default, f(5, 6), 2, 0, True, True)
add(aten.kthvalue.default, f(5, 6), 2, 1)
add(aten.histc.default, f(5, 6), 4, -1, 1)
add(aten.histc.default, f(5, 6), 4)
add(aten.bincount.default, i(4, 9))
add(aten.count_nonzero.dim_IntList, i(3, 5, 6), [1])
add(aten.count_nonzero.default, i(3, 5, 6))
add(aten.mse_loss.default, f(5, 6), f(5, 6))
add(aten.mse_loss.default, f(5, 6), f(5, 6), 2)
add(aten.aminmax.default, f(5, 6), dim=1)
add(aten.median.dim, f(5, 6), 1)

# indexing
add(aten.embedding.default, f(10, 3), i(10, 2, 4))
add(aten.embedding.default, f(3, 4), i(3, 5), 0)
add(aten.embedding.default, f(24, 2), i(24, 7))
add(aten.index_select.default, f(5, 6, 2), 1, i(6, 4))
add(aten.index_copy.default, f(2, 3, 8, 4), 2, torch.tensor([3, 5, 6]), f(2, 3, 3, 4))
add(aten.index_add.default, f(5, 6), 0, i(5, 7), f(7, 6))
add(aten.index_add.default, f(5, 6), 1, i(6, 3), f(5, 3), alpha=2)
add(aten.index_fill.int_Scalar, f(5, 6), 1, torch.tensor([1, 3]), 2.0)
add(aten.gather.default, f(5, 6), 1, i(6, 5, 3))
add(aten.gather.default, f(5, 6), 0, i(5, 3, 4))
add(aten.scatter.src, f(5, 6), 1, torch.stack([torch.randperm(6, generator=G)[:3] for _ in range(5)]), f(5, 3))
add(aten.scatter.value, f(5, 6), 1, i(6, 5, 3), 1.0)
add(aten.scatter.value, f(5, 6), 1, i(6, 3, 3), 0.0)
add(aten.scatter_add.default, f(5, 6), 1, i(6, 5, 3), f(5, 3))
add(aten.scatter_add.default, f(5, 6), 0, i(5, 7, 6), f(7, 6))
add(aten.scatter_add.default, f(5, 6), 0, i(5, 3, 4), f(4, 6))
add(aten.scatter_reduce.two, f(5, 6), 0, i(5, 7, 6), f(7, 6), "amax")
add(aten.slice_scatter.default, f(5, 6), f(5, 2), 1, 1, 3)
add(aten.select_scatter.default, f(5, 6), f(5), 1, 1)
add(aten.index.Tensor, f(5, 6, 4), [i(5, 3)])
add(aten.index.Tensor, f(5, 6, 4), [None, i(6, 3, 2)])
add(aten.index.Tensor, f(5, 6, 4), [i(5, 3, 1), i(6, 2)])
add(aten.index.Tensor, f(5, 6, 4), [i(5, 3), None, i(4, 3)])
add(aten.index.Tensor, f(3, 5, 6, 4), [None, i(5, 3, 1), i(6, 2)])
add(aten.index.Tensor, f(5, 6), [b(5)])
add(aten.index_put.default, f(5, 6, 4), [torch.tensor([1, 3])], f(2, 6, 4))
add(aten.index_put.default, f(5, 6, 4), [None, torch.tensor([1, 3, 5])], f(5, 3, 4))
add(aten.index_put.default, f(5, 6), [i(5, 7)], f(7, 6), True)
add(aten.index_put.default, f(5, 6), [i(5, 7)], f(6), True)
add(aten.index_put.default, f(5, 6), [i(5, 7)], f(7, 1), True)
add(aten.index_put.default, f(5, 6), [i(5, 7), i(6, 7)], f(7), True)
add(aten.index_put.default, f(5, 6), [i(5, 4, 1), i(6, 3)], f(4, 3), True)
add(aten.index_put.default, f(5, 6), [b(5, 6)], torch.tensor(2.0, dtype=torch.float64))
add(aten.one_hot.default, i(4, 5, 3), 4)
add(aten.bucketize.Tensor, f(5, 6), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))
add(aten.searchsorted.Tensor, torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), f(5, 6))
add(aten.masked_select.default, f(5, 6), b(5, 6))

# convolution, pooling, resampling
add(aten.conv1d.default, f(2, 6, 9), f(4, 6, 3), f(4))
add(aten.conv1d.default, f(6, 9), f(4, 6, 3), f(4))
add(aten.conv2d.default, f(3, 4, 6, 5), f(6, 4, 3, 3), f(6), [2, 1], [1, 1])
add(aten.conv2d.default, f(3, 4, 6, 5), f(6, 4, 3, 3))
add(aten.conv2d.padding, f(3, 4, 6, 5), f(6, 4, 3, 3), f(6), [1, 1], "same")
add(aten.conv2d.default, f(2, 6, 6, 5), f(9, 2, 3, 3), f(9), [1, 1], [1, 1], [1, 1], 3)
add(aten.conv2d.default, f(2, 4, 6, 5), f(4, 1, 3, 3), f(4), groups=4)
add(aten.conv2d.default, f(2, 12, 6, 5), f(12, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], 3)
add(aten.conv3d.default, f(2, 2, 3, 4, 3), f(3, 2, 2, 2, 2), f(3))
add(aten.conv_transpose1d.default, f(2, 6, 5), f(6, 4, 3), f(4))
add(aten.conv_transpose2d.input, f(2, 6, 5, 4), f(6, 2, 3, 3), f(6), [2, 2], [0, 0], [0, 0], 3)
add(aten.convolution.default, f(2, 6, 5), f(4, 3, 3), f(4), [1], [0], [1], False, [0], 2)
add(aten.convolution.default, f(2, 6, 5), f(6, 4, 3), f(8), [1], [0], [1], True, [0], 2)
add(aten.max_pool2d.default, f(3, 4, 6, 6), [2, 2])
add(aten.max_pool2d_with_indices.default, f(3, 4, 6, 6), [2, 2])
add(aten.avg_pool2d.default, f(3, 4, 6, 6), [2, 2])
add(aten.avg_pool1d.default, f(3, 4, 6), [2])
add(aten.adaptive_avg_pool2d.default, f(3, 4, 6, 6), [1, 1])
add(aten.adaptive_avg_pool1d.default, f(3, 4, 6), [2])
add(aten.adaptive_max_pool2d.default, f(3, 4, 6, 6), [2, 2])
add(aten.upsample_nearest2d.vec, f(3, 4, 5, 5), None, [2.0, 2.0])
add(aten.upsample_bilinear2d.default, f(3, 4, 5, 5), [7, 7], False)
add(aten.upsample_nearest1d.default, f(3, 4, 5), [7])
add(aten._fft_c2c.default, torch.complex(f(5, 6), f(5, 6)), [1], 0, True)
add(aten._fft_r2c.default, f(5, 3, 6), [0, 2], 0, True)
add(aten._fft_c2r.default, torch.complex(f(5, 4), f(5, 4)), [1], 0, 6)

# factories
add(aten.full.default, [5, 6], 2.0)
add(aten.zeros.default, [5, 6])
add(aten.ones.default, [5, 3])
add(aten.new_zeros.default, f(3, 2), [5, 6])
add(aten.new_ones.default, f(3, 2), [5])
add(aten.new_full.default, f(3, 2), [5, 6], 3.0)
add(aten.full_like.default, f(5, 6), 3.0)
add(aten.zeros_like.default, f(5, 6))
add(aten.ones_like.default, f(5, 6))
add(aten.arange.default, 5)
add(aten.arange.start_step, 1, 9, 2)
add(aten.scalar_tensor.default, 2.0)
add(aten.eye.default, 4)
add(aten.linspace.default, 0, 1, 5)

NAMES = [f"{k}-{op}" for k, (op, _, _) in enumerate(CALLS)]


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_every_strategy_gives_the_global_result(call):
    torch.set_num_threads(1)
    op, args, kwargs = call
    dtypes = {t.dtype for t in args if isinstance(t, torch.Tensor)}
    tolerance = 2e-2 if torch.bfloat16 in dtypes else 1e-5 if torch.float32 in dtypes else 1e-9
    source, runs = check_rule(op, args, kwargs, tolerance=tolerance, joint=25)
    assert source == "own" and runs > 1


FALLBACKS = [
    (aten.linalg_cross.default, (f(5, 3, 4), f(5, 3, 4)), {"dim": 1}),
    (aten.linalg_inv_ex.default, (f(5, 3, 3),), {}),
    (aten.grid_sampler_2d.default, (f(3, 2, 4, 4), f(3, 5, 5, 2), 0, 0, False), {}),
    (aten.view_as_complex.default, (f(5, 3, 2),), {}),
]


@pytest.mark.parametrize("call", FALLBACKS, ids=lambda call: str(call[0]))
def test_strategies_from_torch_give_the_global_result(call):
    source, runs = check_rule(*call)
    assert source == "torch" and runs > 4
