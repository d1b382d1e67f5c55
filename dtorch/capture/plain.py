"""Plain tensors that eager code met: which of them are on the devices already, as they are now.

In: a plain tensor. Out: the symbol that was made of it, if the tensor still has the value that it had then. torch
counts writes into a tensor, but not those through `.data`, a shared NumPy array or in inference mode: on the host the
bits are compared, which costs as much as reading the tensor twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dtorch import torch_private
from dtorch.capture.symbol import Tensor, TensorMeta, meta_of
from dtorch.errors import UnsupportedError

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class _Known:
    """A tensor as it was when it was copied to the devices. bits: None, where they are not compared."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    meta: TensorMeta
    bits: torch.Tensor | None
    symbol: Tensor


class PlainTensors:
    """The plain tensors that live, by id."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, tensor: torch.Tensor) -> Tensor | None:
        """The symbol that was kept for a tensor; None, if it is unknown or was written since."""
        known = self._known.get(id(tensor))
        if known is None or known.tensor() is not tensor or known.version != torch_private.version_of(tensor):
            return None
        if known.bits is None:
            return known.symbol
        with torch_private.without_torch_function():
            same = meta_of(tensor) is known.meta and torch.equal(_bits(tensor), known.bits)
        return known.symbol if same else None

    def keep(self, tensor: torch.Tensor, symbol: Tensor) -> None:
        """Note what was made of a tensor, for as long as that lives."""
        key, kept = id(tensor), self._known
        with torch_private.without_torch_function():
            bits = _bits(tensor).clone() if tensor.is_cpu else None
        reference = weakref.ref(tensor, lambda _: kept.pop(key, None))
        kept[key] = _Known(reference, torch_private.version_of(tensor), meta_of(tensor), bits, symbol)


def refuse_unfit(tensor: torch.Tensor, line: Callable[[], str]) -> None:
    """Raise for a tensor that the devices cannot get."""
    with torch_private.without_torch_function():
        dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
        if dense and not tensor.is_meta:
            return
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
    if dense:
        raise UnsupportedError(
            f"{line()}: a plain tensor on the meta device meets distributed ones, and has no values to give them. "
            "Make it on a device that has memory."
        )
    raise UnsupportedError(
        f"{line()}: a {kind} tensor meets distributed ones, which are dense. Make a dense tensor of it first: "
        "to_dense(), dequantize() or to_padded_tensor(0.0)."
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as whole numbers, which tell 0.0 from -0.0 and are equal where NaNs are."""
    tensor = tensor.detach()
    if not tensor.is_floating_point():
        if not tensor.is_complex():
            return tensor
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_WHOLE[tensor.dtype.itemsize])
