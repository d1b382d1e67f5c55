"""Results of single operators on meta tensors, written by hand where torch's own rule takes long.

In: an operator's arguments, tensors on "meta" that stand for tensors on a CPU. Out: a new meta tensor; or None for
every form that is not plain, where torch's own rule is asked (and raises what there is to raise); or NotImplemented
where torch's own rule for "meta" may not be asked, because kernels lay their result out by the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten
ShapeRule = Callable[..., Any]


def _dense(x: torch.Tensor) -> bool:
    """Contiguous, with the strides that a new tensor has: dims of size one may have others."""
    size = 1
    for length, stride in zip(reversed(x.shape), reversed(x.stride())):
        if stride != size:
            return False
        size *= length
    return True


def _plain(x: torch.Tensor) -> bool:
    """Floating point, dense, not empty: what the rules below are written for."""
    return x.dtype.is_floating_point and x.numel() > 0 and _dense(x)


def _alike(x: torch.Tensor, others: Sequence[torch.Tensor | None]) -> bool:
    return all(other is None or other.dtype is x.dtype for other in others)


def _new(shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=x.dtype, device="meta")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """(..., i), (o, i), (o) → (..., o)."""
    if not (_plain(x) and _alike(x, (weight, bias)) and weight.dim() == 2 and x.dim() > 1):
        return None
    if x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    return _new((*x.shape[:-1], weight.shape[0]), x)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """(..., m, k), (..., k, n) → (..., m, n) with equal leading dims, in any memory."""
    if x.dim() != y.dim() or x.dim() < 2 or not x.dtype.is_floating_point or not _alike(x, (y,)):
        return None
    if x.shape[-1] != y.shape[-2] or x.shape[:-2] != y.shape[:-2] or 0 in (*x.shape, *y.shape):
        return None
    return _new((*x.shape[:-1], y.shape[-1]), x)


def layer_norm(
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *rest: Any,
) -> torch.Tensor | None:
    """As the input."""
    last = tuple(shape)
    fits = 0 < len(last) <= x.dim() and tuple(x.shape[-len(last) :]) == last
    if not (_plain(x) and fits and _alike(x, (weight, bias))):
        return None
    if any(other is not None and tuple(other.shape) != last for other in (weight, bias)):
        return None
    return _new(x.shape, x)


def rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, *rest: Any
) -> torch.Tensor | None:
    """As the input."""
    return layer_norm(x, shape, weight)


def group_norm(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *rest: Any
) -> Any:
    """(n, c, ...), as the input; of other strides in the memory format of the device's choice."""
    if not _plain(x):
        return NotImplemented
    if not (x.dim() > 1 and groups > 0 and x.shape[1] % groups == 0 and _alike(x, (weight, bias))):
        return None
    if any(other is not None and tuple(other.shape) != (x.shape[1],) for other in (weight, bias)):
        return None
    return _new(x.shape, x)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """(b, h, l, e), (b, h, s, e), (b, h, s, e) → (b, h, l, e), in memory as the query."""
    if query.dim() != 4 or dropout_p or enable_gqa or not query.dtype.is_floating_point or query.numel() == 0:
        return None
    turned = query.transpose(1, 2)
    if not (_dense(query) or _dense(turned)) or not _alike(query, (key, value)):
        return None
    if key.shape != value.shape or key.dim() != 4 or 0 in key.shape or min(query.shape) < 2:
        return None
    if (*query.shape[:2], query.shape[3]) != (*key.shape[:2], key.shape[3]):
        return None
    if attn_mask is not None and not _covers(attn_mask, query, key, is_causal):
        return None
    return _new(query.shape, query) if _dense(query) else _new(turned.shape, query).transpose(1, 2)


def _covers(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> bool:
    whole = (*query.shape[:3], key.shape[2])
    if is_causal or mask.dtype not in (torch.bool, query.dtype) or not 2 <= mask.dim() <= 4:
        return False
    return all(have in (1, want) for have, want in zip(reversed(mask.shape), reversed(whole)))


def _is_number(item: Any) -> bool:
    return item is None or type(item) in (int, float) or type(item) is str and item in ("none", "tanh")  # gelu's kinds


def pointwise(x: Any, other: Any = None, *rest: Any, **options: Any) -> torch.Tensor | None:
    """As the first input, where nothing is broadcast or promoted: the other is a number, or alike."""
    if not isinstance(x, torch.Tensor) or not _plain(x) or x.dim() == 0:
        return None
    if isinstance(other, torch.Tensor):
        if other.dtype is not x.dtype or other.shape != x.shape or not _dense(other):
            return None
        other = None
    if not all(map(_is_number, (other, *rest, *options.values()))):
        return None
    return _new(x.shape, x)


def clamp(x: torch.Tensor, low: Any = None, high: Any = None, **options: Any) -> torch.Tensor | None:
    """As the input; one bound at least is needed."""
    return None if low is None and high is None or options else pointwise(x, low, high)


_POINTWISE = """
add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default pow.Tensor_Scalar rsub.Scalar
abs.default neg.default exp.default log.default sin.default cos.default tanh.default sigmoid.default
sqrt.default rsqrt.default reciprocal.default erf.default relu.default gelu.default silu.default mish.default
elu.default leaky_relu.default hardsigmoid.default softplus.default relu6.default selu.default
clamp_min.default clamp_max.default square.default
"""


def contiguous_only(*args: Any, **options: Any) -> Any:
    """Torch's own rule, for tensors that lie in memory as new ones do: other kinds give a result like themselves."""
    tensors = [item for item in (*args, *options.values()) if isinstance(item, torch.Tensor)]
    if all(map(_plain, tensors)) and _alike(tensors[0], tensors):
        return None
    return NotImplemented


def instance_norm(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
    """As the input; running statistics would be written."""
    if mean is not None or var is not None or contiguous_only(x, weight, bias) is NotImplemented:
        return NotImplemented
    fits = x.dim() > 2 and all(each is None or each.shape == x.shape[1:2] for each in (weight, bias))
    return _new(x.shape, x) if fits else None


def batch_norm(x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, var: torch.Tensor, *rest: Any) -> Any:
    """As the input, and (on a CPU) two empty tensors for the statistics of the batch, which are not taken."""
    given = [each for each in (weight, bias, mean, var) if each is not None]
    if contiguous_only(x, *given) is NotImplemented or x.dim() < 2 or any(t.shape != x.shape[1:2] for t in given):
        return NotImplemented
    return _new(x.shape, x), _new((0,), x), _new((0,), x)


_LAID_OUT = """
conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding
conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input
max_pool1d.default max_pool2d.default max_pool3d.default
max_pool1d_with_indices.default max_pool2d_with_indices.default max_pool3d_with_indices.default
avg_pool1d.default avg_pool2d.default avg_pool3d.default
adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
adaptive_max_pool1d.default adaptive_max_pool2d.default adaptive_max_pool3d.default
upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec _upsample_nearest_exact1d.vec
_upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec upsample_linear1d.vec upsample_bilinear2d.vec
upsample_trilinear3d.vec upsample_bicubic2d.vec
"""
"""Operators whose kernels choose a memory format."""


def _rules() -> dict[Any, ShapeRule]:
    found: dict[Any, ShapeRule] = {}
    for name in _POINTWISE.split():
        packet, _, overload = name.partition(".")
        found[getattr(getattr(aten, packet), overload)] = pointwise
    for name in _LAID_OUT.split():
        packet, _, overload = name.partition(".")
        found[getattr(getattr(aten, packet), overload)] = contiguous_only
    return found | {
        aten.instance_norm.default: instance_norm,
        aten._native_batch_norm_legit_no_training.default: batch_norm,
        aten.clamp.default: clamp,
        aten.linear.default: linear,
        aten.matmul.default: matmul,
        aten.layer_norm.default: layer_norm,
        aten.rms_norm.default: rms_norm,
        aten.group_norm.default: group_norm,
    }


SHAPE_RULES: Mapping[Any, ShapeRule] = _rules()
"""On every device."""

CPU_SHAPE_RULES: Mapping[Any, ShapeRule] = {**SHAPE_RULES, aten.scaled_dot_product_attention.default: attention}
"""Besides, what another device's kernels may lay out otherwise in memory."""
