"""The table of torch functions that eager distributed tensors are tested with, and that docs/functions.md lists.

In: nothing. Out: `CASES`: each a name, a callable and example arguments, tensors whose dims mostly divide by neither 2
nor 3. The tests call every case with clones of its tensors, so in-place forms and `out=` need nothing special.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

G = torch.Generator().manual_seed(7)


@dataclass(frozen=True)
class Case:
    """One function with example arguments. `tolerance`: of the sharded results, relative; single device is bitwise.

    `meaningless`: results that hold no values to compare (`empty`).
    """

    name: str
    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    meaningless: bool = False


CASES: list[Case] = []


def case(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Add a case; options of `Case` are given with an underscore in front."""
    options = {key[1:]: kwargs.pop(key) for key in [key for key in kwargs if key.startswith("_")]}
    CASES.append(Case(name, function, args, kwargs, **options))


def methods(names: str, *args: Any, **kwargs: Any) -> None:
    """Cases of methods that take the same arguments."""
    for name in names.split():
        case(f"Tensor.{name}", getattr(torch.Tensor, name), *args, **kwargs)


def functions(names: str, *args: Any, **kwargs: Any) -> None:
    """Cases of functions of `torch` that take the same arguments."""
    for name in names.split():
        case(f"torch.{name}", getattr(torch, name), *args, **kwargs)


def activations(names: str, *args: Any, **kwargs: Any) -> None:
    """Cases of functions of `torch.nn.functional` that take the same arguments."""
    for name in names.split():
        case(f"F.{name}", getattr(F, name), *args, **kwargs)


def f(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=G, dtype=torch.float64).to(dtype)


def p(*shape: int) -> torch.Tensor:
    """Numbers between 0.5 and 1.5."""
    return torch.rand(shape, generator=G, dtype=torch.float64) + 0.5


def i(high: int, *shape: int) -> torch.Tensor:
    """Integers below `high`."""
    return torch.randint(high, shape, generator=G)


def b(*shape: int) -> torch.Tensor:
    """True and false."""
    return torch.rand(shape, generator=G) > 0.5


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def with_tensors(value: Any, new: Iterator[torch.Tensor]) -> Any:
    """The arguments with other tensors, in order."""
    if isinstance(value, torch.Tensor):
        return next(new)
    if type(value) in (list, tuple):
        return type(value)(with_tensors(item, new) for item in value)
    if isinstance(value, dict):
        return {key: with_tensors(item, new) for key, item in value.items()}
    return value


X, Y, ROW, ONE = f(5, 7), f(5, 7), f(7), f(5, 1)

# --- elementwise --------------------------------------------------------------------------------------------------
functions("add sub mul div maximum minimum atan2 fmod remainder copysign hypot", X, Y)
functions("add mul", X, ROW)
functions("add sub mul div pow", X, 2.5)
functions("pow", p(5, 7), Y)
functions("floor_divide remainder", i(20, 5, 7), 3)
functions("add", X, Y, alpha=2)
functions("rsub", X, Y)
functions("true_divide", i(9, 5, 7), i(9, 5, 7) + 1)
functions("abs neg exp sin cos tanh sigmoid sign floor ceil round trunc square erf exp2 expm1 relu positive", X)
functions("sqrt rsqrt log log2 log10 log1p reciprocal lgamma", p(5, 7))
functions("frac isnan isinf isfinite logical_not atan asinh nan_to_num", X)
functions("eq ne lt le gt ge", X, Y)
functions("gt", X, 0)
functions("logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor", b(5, 7), b(5, 7))
functions("bitwise_not", i(9, 5, 7))
functions("bitwise_left_shift", i(9, 5, 7), 2)
functions("clamp", X, -0.5, 0.5)
functions("clamp", X, min=f(7))
functions("clamp_min", X, 0.1)
functions("lerp", X, Y, 0.3)
functions("lerp", X, Y, ROW)
functions("addcmul addcdiv", X, Y, p(5, 7), value=0.5)
functions("where", b(5, 7), X, Y)
functions("where", b(7), X, 0.0)
functions("isclose", X, X + 1e-9)
functions("polar", p(5, 7), Y)
functions("complex", X, Y)
functions("real imag conj angle", torch.complex(X, Y))
methods("masked_fill", X, b(5, 7), -1.0)
methods("masked_fill", X, b(7), float("-inf"))
methods("type_as", X, i(3, 2))
methods("float half int bool bfloat16 long", X)
methods("to", X, torch.float32)
methods("__rsub__ __rtruediv__ __rpow__", p(5, 7), 2.0)
activations("relu gelu silu elu leaky_relu mish softplus hardswish hardsigmoid relu6 selu logsigmoid tanhshrink", X)
activations("gelu", X, approximate="tanh")
activations("glu", f(5, 14))
activations("prelu", X, p(7))
activations("threshold", X, 0.1, 0.0)

# --- in place and out= --------------------------------------------------------------------------------------------
methods("add_ sub_ mul_ div_ copy_ atan2_", X, Y)
methods("add_ mul_ pow_", X, 2.0)
methods("add_", X, ROW)
methods("exp_ neg_ sigmoid_ tanh_ relu_ zero_ abs_ square_ triu_ tril_", X)
methods("fill_", X, 3.0)
methods("clamp_", X, -0.5, 0.5)
methods("masked_fill_", X, b(5, 7), 0.0)
methods("addcmul_ addcdiv_", X, Y, p(5, 7))
methods("lerp_", X, Y, 0.25)
methods("masked_scatter_", X, b(5, 7), f(35))
methods("index_add_", X, 0, i(5, 6), f(6, 7))
methods("index_copy_", X, 1, torch.tensor([4, 1, 6]), f(5, 3))
methods("index_fill_", X, 0, torch.tensor([4, 1]), 2.0)
methods("scatter_", X, 1, torch.tensor([[4, 1, 6]] * 5), f(5, 3))
methods("scatter_add_", X, 0, i(5, 6, 7), f(6, 7))
methods("index_put_", X, (torch.tensor([4, 1]),), f(2, 7))
methods("addmm_", f(5, 3), f(5, 7), f(7, 3))
functions("add mul", X, Y, out=f(5, 7))
functions("matmul", f(5, 7), f(7, 4), out=f(5, 4))
functions("cat", [X, Y], 1, out=f(5, 14))
functions("exp", X, out=f(5, 7))
case("F.relu inplace", lambda x: F.relu(x, inplace=True), X)
case("F.silu inplace", lambda x: F.silu(x, inplace=True), X)

# --- products -----------------------------------------------------------------------------------------------------
functions("matmul mm", f(5, 7), f(7, 4))
functions("matmul", f(7), f(7, 4))
functions("matmul", f(5, 7), f(7))
functions("matmul", f(3, 5, 7), f(7, 4))
functions("matmul", f(2, 1, 5, 7), f(3, 7, 4))
functions("bmm", f(5, 3, 7), f(5, 7, 2))
functions("mv", f(5, 7), f(7))
functions("dot inner", f(7), f(7))
functions("inner", f(5, 7), f(3, 7))
functions("outer", f(5), f(7))
functions("addmm", f(4), f(5, 7), f(7, 4))
functions("addmm", f(5, 4), f(5, 7), f(7, 4), beta=0.5, alpha=2.0)
functions("baddbmm", f(5, 3, 2), f(5, 3, 7), f(5, 7, 2))
functions("addmv", f(5), f(5, 7), f(7))
functions("addr", f(5, 7), f(5), f(7))
functions("einsum", "bij,bjk->bik", f(5, 3, 7), f(5, 7, 2))
functions("einsum", "bhid,bhjd->bhij", f(2, 5, 3, 4), f(2, 5, 7, 4))
functions("tensordot", f(5, 7, 3), f(7, 3, 4), 2)
functions("kron", f(5, 2), f(3, 1))
functions("cdist", f(5, 7), f(4, 7))
case("torch.linalg.norm", torch.linalg.norm, X)
case("torch.linalg.vector_norm", torch.linalg.vector_norm, X, 2, 1)
case("torch.linalg.multi_dot", torch.linalg.multi_dot, [f(5, 7), f(7, 3), f(3, 4)])
activations("linear", f(5, 7), f(4, 7), f(4))
activations("linear", f(3, 5, 7), f(4, 7))
activations("bilinear", f(5, 3), f(5, 4), f(7, 3, 4))
activations("scaled_dot_product_attention", f(2, 5, 7, 4), f(2, 5, 3, 4), f(2, 5, 3, 4))
activations("scaled_dot_product_attention", f(2, 5, 7, 4), f(2, 5, 7, 4), f(2, 5, 7, 4), is_causal=True)
activations("scaled_dot_product_attention", f(2, 5, 7, 4), f(2, 5, 3, 4), f(2, 5, 3, 4), b(7, 3) | True)

# --- norms and losses ---------------------------------------------------------------------------------------------
activations("softmax log_softmax softmin normalize", X, dim=-1)
activations("softmax log_softmax", X, dim=0)
activations("softmax", X.float(), dim=-1, dtype=torch.float64)
activations("layer_norm", f(5, 3, 7), (7,), f(7), f(7))
activations("rms_norm", f(5, 3, 7), (7,), f(7))
activations("group_norm", f(2, 10, 7), 5, f(10), f(10))
activations("batch_norm", f(5, 7, 3), f(7), p(7), f(7), f(7))
case("F.batch_norm in training", F.batch_norm, f(5, 7, 3), f(7), p(7), f(7), f(7), training=True)
activations("instance_norm", f(5, 7, 3))
activations("local_response_norm", f(5, 7, 3), 2)
activations("mse_loss l1_loss smooth_l1_loss huber_loss", X, Y)
activations("mse_loss", X, Y, reduction="none")
activations("cross_entropy", X, i(7, 5))
activations("cross_entropy", X, i(7, 5), ignore_index=2, label_smoothing=0.1)
activations("nll_loss", X, i(7, 5))
activations("binary_cross_entropy_with_logits", X, p(5, 7) - 0.5)
activations("binary_cross_entropy", p(5, 7) / 2, p(5, 7) / 2)
activations("kl_div", X, p(5, 7), reduction="batchmean")
activations("cosine_similarity", X, Y)
activations("pairwise_distance", X, Y)

# --- reductions ---------------------------------------------------------------------------------------------------
functions("sum mean prod std var norm max min", X)
functions("sum mean prod std var max min median logsumexp amax amin argmax argmin aminmax", X, dim=1)
functions("sum mean var amax", X, dim=0, keepdim=True)
functions("sum mean", f(5, 3, 7), dim=(0, 2))
functions("sum", i(9, 5, 7))
functions("sum", b(5, 7))
functions("any all", b(5, 7))
functions("any all", b(5, 7), dim=0)
functions("argmax", X)
functions("var_mean std_mean", X, dim=1)
functions("norm", X, 2, 1)
functions("count_nonzero", i(3, 5, 7))
functions("cumsum cumprod logcumsumexp", X, 1)
functions("cummax cummin", X, 0)
functions("sort", X, 1, _tolerance=0)
functions("argsort", X, 0, True)
functions("topk", X, 3)
functions("kthvalue", X, 2)
functions("mode", i(3, 5, 7))
functions("unique", i(4, 5, 7))
functions("nansum nanmean", X)
functions("bincount", i(5, 7))
functions("histc", X, 4, -1, 1)
functions("equal allclose", X, X.clone())
functions("dist", X, Y)
functions("trace", X)
functions("cov corrcoef", X)

# --- views and shapes ---------------------------------------------------------------------------------------------
Z = f(5, 6, 7)
methods("view reshape", Z, 30, 7)
methods("view", Z, 5, 2, 3, 7)
methods("view", Z, -1)
methods("reshape", f(6, 4).t(), 8, 3)
methods("view", X.float(), torch.int32)
methods("view_as reshape_as", f(4, 9), f(6, 6))
methods("flatten", Z, 1)
methods("unflatten", Z, 1, (2, 3))
methods("transpose swapaxes", Z, 0, 2)
methods("permute", Z, 2, 0, 1)
methods("t", X)
methods("movedim", Z, 0, 2)
methods("unsqueeze", X, 1)
methods("squeeze", f(5, 1, 7))
methods("squeeze", f(5, 1, 7), 1)
methods("expand", ONE, 5, 4)
methods("expand", ROW, 3, -1)
methods("expand_as", ONE, X)
methods("repeat", X, 2, 3)
methods("contiguous", Z.transpose(0, 2))
methods("clone detach", Z)
methods("narrow", Z, 1, 1, 3)
methods("select", Z, 0, 3)
methods("diagonal", X)
methods("unfold", X, 1, 3, 2)
methods("chunk", X, 3, 1)
methods("split", X, 3, 1)
methods("split", X, [2, 1, 2], 0)
methods("tensor_split", X, 3, 1)
methods("unbind", X, 0)
methods("new_zeros new_ones", X, (3, 5))
methods("new_full", X, (3, 5), 2.0)
methods("new_empty", X, (3, 5), _meaningless=True)
methods("item", f(1))
methods("tolist", X)
functions("cat", [X, Y], 0)
functions("cat", [X, f(5, 3)], -1)
functions("stack", [X, Y], 1)
functions("hstack vstack dstack", [X, Y])
functions("flip", X, (0, 1))
functions("roll", X, 2, 1)
functions("rot90", X)
functions("tril triu", X, 1)
functions("repeat_interleave", X, 2, 1)
functions("tile", X, (2, 1))
functions("broadcast_tensors", ONE, ROW)
functions("broadcast_to", ROW, (5, 7))
functions("diag diag_embed", ROW)
functions("ravel", X)
functions("atleast_2d", ROW)
functions("meshgrid", f(5), f(7), indexing="ij")
functions("zeros_like ones_like", X)
functions("full_like", X, 2.0)
functions("empty_like", X, _meaningless=True)
functions("diff", X, dim=1)
functions("view_as_complex", f(5, 7, 2))
functions("view_as_real", torch.complex(X, Y))
functions("cartesian_prod", f(5), f(3))
functions("moveaxis", Z, 0, 1)
functions("numel is_floating_point is_complex", X)
activations("pad", X, (1, 2))
activations("pad", f(2, 5, 7), (1, 2), mode="reflect")
activations("pad", f(2, 5, 7), (1, 2), mode="replicate")
activations("pixel_shuffle", f(5, 8, 3, 7), 2)
activations("pixel_unshuffle", f(5, 3, 6, 10), 2)
activations("one_hot", i(4, 5, 3), 4)
activations("unfold", f(2, 3, 5, 7), 2)

# --- indexing -----------------------------------------------------------------------------------------------------
index = torch.Tensor.__getitem__
case("x[3]", index, X, 3)
case("x[1:4, ::2]", index, X, (slice(1, 4), slice(None, None, 2)))
case("x[..., -1]", index, X, (..., -1))
case("x[:, None]", index, X, (slice(None), None))
case("x[tensor]", index, X, i(5, 4))
case("x[:, tensor]", index, X, (slice(None), i(7, 2, 3)))
case("x[tensor, tensor]", index, X, (i(5, 4), i(7, 4)))
case("x[mask]", index, X, b(5))
case("x[mask, full]", index, X, b(5, 7))
case("x[0-d tensor]", index, X, torch.tensor(2))
write = torch.Tensor.__setitem__
case("x[2] = y", write, X, 2, f(7))
case("x[1:4] = number", write, X, slice(1, 4), 2.0)
case("x[:, 1::2] = y", write, X, (slice(None), slice(1, None, 2)), f(5, 3))
case("x[tensor] = y", write, X, torch.tensor([4, 0]), f(2, 7))
case("x[mask] = number", write, X, b(5, 7), 0.0)
case("x[mask] = y", write, X, b(5), f(7))
case("x[0-d tensor] = y", write, X, torch.tensor(2), f(7))
functions("index_select", X, 1, i(7, 4))
functions("gather", X, 1, i(7, 5, 3))
functions("take_along_dim", X, i(7, 5, 3), 1)
functions("take", X, i(35, 4))
functions("scatter", X, 1, torch.tensor([[4, 1, 6]] * 5), 2.0)
functions("scatter_add", X, 1, i(7, 5, 3), f(5, 3))
functions("scatter_reduce", X, 0, i(5, 6, 7), f(6, 7), "amax")
functions("index_add", X, 1, i(7, 3), f(5, 3))
functions("index_copy", X, 0, torch.tensor([3, 1]), f(2, 7))
functions("index_fill", X, 1, torch.tensor([3, 1]), 1.5)
functions("slice_scatter", X, f(5, 2), 1, 1, 3)
functions("select_scatter", X, f(5), 1, 1)
functions("diagonal_scatter", X, f(5))
functions("masked_select", X, b(5, 7))
functions("nonzero", i(2, 5, 7))
functions("bucketize", X, torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))
functions("searchsorted", torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), X)
functions("isin", i(9, 5, 7), torch.tensor([1, 4]))
activations("embedding", i(7, 5, 3), f(7, 4))
activations("embedding_bag", i(7, 5, 3), f(7, 4))

# --- convolution, pooling, resampling, Fourier --------------------------------------------------------------------
activations("conv1d", f(5, 3, 7), f(4, 3, 3), f(4))
activations("conv2d", f(5, 4, 7, 5), f(3, 4, 3, 3), f(3), stride=2, padding=1)
activations("conv2d", f(2, 6, 7, 5), f(6, 1, 3, 3), padding="same", groups=6)
activations("conv3d", f(2, 3, 4, 5, 3), f(5, 3, 2, 2, 2))
activations("conv_transpose1d", f(5, 3, 7), f(3, 4, 3))
activations("conv_transpose2d", f(5, 3, 4, 5), f(3, 2, 2, 2), f(2), stride=2)
activations("max_pool2d avg_pool2d", f(5, 3, 7, 7), 2)
activations("max_pool1d avg_pool1d", f(5, 3, 7), 2)
activations("adaptive_avg_pool2d", f(5, 3, 7, 5), 1)
activations("adaptive_max_pool1d", f(5, 3, 7), 2)
activations("interpolate", f(5, 3, 4, 5), scale_factor=2)
activations("interpolate", f(5, 3, 4, 5), size=(7, 7), mode="bilinear")
activations("grid_sample", f(5, 3, 4, 4), f(5, 2, 2, 2), align_corners=False)
case("torch.fft.fft", torch.fft.fft, X)
case("torch.fft.rfft", torch.fft.rfft, X)
case("torch.fft.irfft", torch.fft.irfft, torch.complex(f(5, 4), f(5, 4)))
case("torch.fft.fft2", torch.fft.fft2, f(3, 5, 7))
functions("cross", f(5, 3), f(5, 3))
case("torch.linalg.inv", torch.linalg.inv, f(5, 3, 3))
case("torch.linalg.det", torch.linalg.det, f(5, 3, 3))
case("torch.linalg.solve", torch.linalg.solve, f(5, 3, 3), f(5, 3, 2))
case("torch.linalg.cholesky", torch.linalg.cholesky, torch.eye(7, dtype=torch.float64) * 3 + 0.1)

# --- random: torch's own numbers for the same seed ----------------------------------------------------------------
activations("dropout", X, 0.4, True)
functions("bernoulli", p(5, 7) / 2)
functions("multinomial", p(5, 7), 2)
functions("normal", X, p(5, 7))
functions("rand_like randn_like", X)
functions("randint_like", X, 9)
methods("normal_ uniform_ exponential_", X)

# --- other dtypes -------------------------------------------------------------------------------------------------
functions("matmul", f(5, 7, dtype=torch.bfloat16), f(7, 4, dtype=torch.bfloat16), _tolerance=3e-2)
activations("layer_norm", f(5, 3, 7, dtype=torch.float16), (7,), _tolerance=2e-3)
activations("linear", f(5, 7, dtype=torch.float32), f(4, 7, dtype=torch.float32), _tolerance=1e-5)
functions("add", f(5, 7, dtype=torch.float16), f(5, 7, dtype=torch.float32), _tolerance=1e-6)
functions("mul", i(9, 5, 7), 2.5, _tolerance=1e-6)
