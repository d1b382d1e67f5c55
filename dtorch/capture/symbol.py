"""`Tensor`: a torch.Tensor without data, which model code handles like any other while the calls on it are recorded.

In: metadata (`TensorMeta`) and the recorder that owns it. Out: an object that unmodified modules and torch functions
accept; every torch function on it is handed to the recorder.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from dtorch import torch_private
from dtorch.capture.methods import Placed, no_gradients
from dtorch.capture.refuse import asked_for_derivatives, asked_whether_a_wrapper
from dtorch.errors import CaptureError, InputError, UnsupportedError

if TYPE_CHECKING:
    from dtorch.capture.record import Recorder


class TensorMeta:
    """Shape, stride, dtype and device of a symbol. One object for each combination: compared by identity."""

    __slots__ = ("shape", "stride", "dtype", "device", "numel", "contiguous", "base", "__weakref__")

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int
    contiguous: bool
    base: torch.Tensor

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def fake(self) -> torch.Tensor:
        """A new fake tensor with this metadata."""
        return torch_private.fake_tensor(self.shape, self.stride, self.dtype, self.device)

    def val(self) -> torch.Tensor:
        """The fake tensor for nodes' `meta["val"]`: one for all, to be read only."""
        return shared_val(self.shape, self.stride, self.dtype, self.device)


@lru_cache(maxsize=8192)
def shared_val(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The fake tensor that stands in every node's `meta["val"]` of this metadata; to be read only."""
    return torch_private.fake_tensor(shape, stride, dtype, device)


_METAS: weakref.WeakValueDictionary[tuple, TensorMeta] = weakref.WeakValueDictionary()


def tensor_meta(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> TensorMeta:
    """The one `TensorMeta` of this combination."""
    key = (tuple(shape), tuple(stride), dtype, device)
    found = _METAS.get(key)
    if found is None:
        found = TensorMeta()
        found.shape, found.stride, found.dtype, found.device = torch.Size(shape), key[1], dtype, device
        with torch.inference_mode(False), torch_private.without_function_modes():
            found.base = torch.empty_strided(key[0], key[1], dtype=dtype, device="meta")
        found.numel, found.contiguous = found.base.numel(), found.base.is_contiguous()
        _METAS[key] = found
    return found


def meta_of(tensor: torch.Tensor, device: torch.device | None = None) -> TensorMeta:
    """The metadata of a symbol, or of a plain or fake tensor (as if it were on `device`, when given)."""
    if isinstance(tensor, Tensor):
        return tensor.meta
    return tensor_meta(tensor.shape, tensor.stride(), tensor.dtype, device or tensor.device)


CONSTRUCT: dict[str, Callable[..., Any]] = {}
"""How `dtorch.Tensor(...)` makes a tensor, under "tensor": known to the graph, which lies above and registers here."""


class Tensor(Placed, torch.Tensor):
    """A tensor whose values are on a mesh's devices: shape, dtype, mesh and placements here, and no data.

    `dtorch.Tensor(data, device_mesh=, placements=, device=, dtype=, requires_grad=)` copies a torch tensor (or an array
    or nested numbers) to the devices. Torch functions on it are recorded and run later.
    """

    # Where the value comes from. `node`: the fx node that computes it, None before the first use of an input.
    # A view has `base` (the symbol it was taken from), `step` (how) and `root` (the base of bases); it is stale
    # when `seen` is not the root's `version`.
    # Of eager tensors, `remote` is the value on the devices and `spec` its placement; both None in a captured module.
    # `pool` is where the symbol goes when it is dead, to stand for another value of the same metadata and placement.
    __slots__ = (
        "meta", "recorder", "node", "base", "step", "root", "version", "seen", "origin", "spec", "remote", "pool",
    )  # fmt: skip

    meta: TensorMeta
    recorder: Any  # the Recorder of a capture, or the EagerRecorder of a mesh; None without one
    node: Any
    base: Tensor | None
    step: Any
    root: Tensor | None
    version: int
    seen: int
    origin: Any
    spec: Any
    remote: Any
    pool: list[Tensor] | None

    def __new__(cls, *data: Any, **options: Any) -> Tensor:
        """Copy a tensor to the devices of a mesh."""
        if len(data) != 1 or isinstance(data[0], (int, torch.Size)):
            raise InputError(
                f"dtorch.Tensor{data!r}: give one torch tensor, array or list of numbers; dtorch.empty(shape) makes a "
                "tensor of a shape."
            )
        return CONSTRUCT["tensor"](data[0], **options)

    def __init__(self, *data: Any, **options: Any) -> None:
        """Everything is done in `__new__`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        recorder = args[0].recorder if args and type(args[0]) is Tensor else _recorder_in(args)
        if recorder is not None:
            edge = recorder.state.edge
            if edge.function is func:
                result = edge.walk(edge, recorder, args, kwargs)
                if result is not None:
                    return result
        getter = GETTERS.get(func)
        if getter is not None:
            return getter(*args, **(kwargs or {}))
        if recorder is not None and recorder.eager:
            return recorder.quick_call(func, args, kwargs)
        from dtorch.capture.intercept import call

        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        from dtorch.capture.dispatch import dispatch

        return dispatch(func, args, kwargs or {})

    # C++ sees a meta tensor, so what Python asks about the device or the sizes is answered here.
    shape = property(attrgetter("meta.shape"))
    dtype = property(attrgetter("meta.dtype"))
    device = property(attrgetter("meta.device"))
    ndim = property(lambda self: len(self.meta.shape))
    is_meta = property(lambda self: self.meta.device.type == "meta")
    is_cpu = property(lambda self: self.meta.device.type == "cpu")
    is_cuda = property(lambda self: self.meta.device.type == "cuda")
    layout = property(lambda self: torch.strided)
    itemsize = property(lambda self: self.meta.dtype.itemsize)
    nbytes = property(lambda self: self.meta.numel * self.meta.dtype.itemsize)

    def size(self, dim: int | None = None) -> Any:  # noqa: D102
        return self.meta.shape if dim is None else self.meta.shape[dim]

    def stride(self, dim: int | None = None) -> Any:  # noqa: D102
        return self.meta.stride if dim is None else self.meta.stride[dim]

    def dim(self) -> int:  # noqa: D102
        return len(self.meta.shape)

    ndimension = dim

    def numel(self) -> int:  # noqa: D102
        return self.meta.numel

    nelement = numel

    def element_size(self) -> int:  # noqa: D102
        return self.meta.dtype.itemsize

    def is_floating_point(self) -> bool:  # noqa: D102
        return self.meta.dtype.is_floating_point

    def is_complex(self) -> bool:  # noqa: D102
        return self.meta.dtype.is_complex

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:  # noqa: D102
        if memory_format is torch.contiguous_format:
            return self.meta.contiguous
        return self.meta.base.is_contiguous(memory_format=memory_format)

    def __len__(self) -> int:
        if not self.meta.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.meta.shape[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if self.spec is not None:
            value = self.to_torch()
            placed = f"device_mesh={self.device_mesh!r}, placements={self.placements!r}"
            return f"{value!r}\nshape={self.shape}, dtype={self.dtype},\n{placed}"
        state = "" if self.node is None else f", value={self.node}"
        return (
            f"dtorch.Tensor(shape={list(self.meta.shape)}, dtype={self.meta.dtype}, device={self.meta.device}{state})"
        )

    def __format__(self, spec: str) -> str:
        if self.spec is not None and not self.meta.shape:
            return format(self.to_torch(), spec)
        return format(repr(self), spec)

    __hash__ = object.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.clone() if self.spec is None else self.recorder.redistribute(self, self.spec)
            if torch_private.is_parameter(self):
                torch_private.mark_parameter(copied)
                copied.requires_grad_(self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.spec is not None:
            return self.recorder.home.saved(self)
        raise CaptureError(
            f"{self!r} cannot be pickled: it has no data while a model is captured. "
            "Save tensors outside the captured forward."
        )

    def data_ptr(self) -> int:  # noqa: D102
        raise CaptureError(_no_memory(self, "data_ptr()"))

    def untyped_storage(self) -> Any:  # noqa: D102
        raise CaptureError(_no_memory(self, "untyped_storage()"))

    def storage(self) -> Any:  # noqa: D102
        raise CaptureError(_no_memory(self, "storage()"))

    def set_(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        raise UnsupportedError(_no_memory(self, "set_()"))

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        if self.spec is None:
            raise CaptureError(_no_memory(self, "dlpack"))
        return self.to_torch().detach().__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return (self.to_torch().detach() if self.spec is not None else self.meta.base).__dlpack_device__()

    @property
    def __tensor_flatten__(self) -> Any:
        """No wrapper of plain tensors. Tracers ask this of every value that they trace: the one place to refuse."""
        asked_whether_a_wrapper(self)
        raise AttributeError("__tensor_flatten__")

    def backward(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        raise no_gradients(f"backward() on {self.summary}")

    def retain_grad(self) -> None:  # noqa: D102
        raise no_gradients(f"retain_grad() on {self.summary}")


def _recorder_in(args: tuple) -> Any:
    """The recorder of the first symbol of a call, or None where none is an argument or an item of one."""
    for item in args:
        for each in item if type(item) in (tuple, list) else (item,):
            if isinstance(each, Tensor):
                return each.recorder
    return None


def _no_memory(symbol: Tensor, what: str) -> str:
    return (
        f"{what} on {symbol.summary}: a dtorch tensor has no memory in this process. "
        "Work on values with torch functions; x.to_torch() gives a tensor with memory."
    )


def make(meta: TensorMeta, recorder: Recorder | None, node: Any = None, requires_grad: bool = False) -> Tensor:
    """A new symbol that is no view."""
    symbol = torch_private.make_symbol(Tensor, meta.base, requires_grad)
    symbol.meta, symbol.recorder, symbol.node = meta, recorder, node
    symbol.base = symbol.step = symbol.root = symbol.origin = symbol.spec = symbol.remote = symbol.pool = None
    symbol.version = symbol.seen = 0
    return symbol


def _raw(function: Any) -> Any:
    def get(*args: Any, **kwargs: Any) -> Any:
        with torch_private.without_torch_function():
            return function(*args, **kwargs)

    return get


def _getters() -> dict[Any, Any]:
    """Functions that ask about a tensor's part in autograd and the like, which the C++ object knows."""
    found = {function: _raw(function) for function in torch_private.bookkeeping_functions()}
    for function in (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__):
        found[function] = _marking(function)
    return found


def _marking(function: Any) -> Any:
    def set_requires_grad(symbol: Any, *args: Any, **kwargs: Any) -> Any:
        asked_for_derivatives(symbol)
        symbol.__dict__["own"] = True  # the object is marked, so that it is not used again for another value
        with torch_private.without_torch_function():
            return function(symbol, *args, **kwargs)

    return set_requires_grad


GETTERS: dict[Any, Any] = _getters()
