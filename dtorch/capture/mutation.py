"""In-place writes and views as values: a write rebinds the symbol and, through a view, every base up to the root.

In: a recorder, symbols and the new value's node. Out: symbols that are up to date or known to be stale; a
stale view is derived again from its base when it is next used. Strides are kept as eager would have them,
since sums differ by them in the last bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtorch import torch_private
from dtorch.capture.expand import Operation
from dtorch.capture.symbol import Tensor, TensorMeta, meta_of

if TYPE_CHECKING:
    from dtorch.capture.record import Recorder

aten = torch.ops.aten
STALE = -1


class ViewStep:
    """How a view is derived: result `position` of an operation on `symbols` (the base among them)."""

    __slots__ = ("called", "position", "symbols")

    def __init__(self, called: Operation, position: int, symbols: tuple[Tensor, ...]) -> None:
        self.called, self.position, self.symbols = called, position, symbols


def attach_view(symbol: Tensor, base: Tensor, step: ViewStep) -> None:
    """Note that a fresh symbol is a view of `base`."""
    symbol.base, symbol.step = base, step
    symbol.root = base if base.root is None else base.root
    symbol.seen = symbol.root.version


def derive_again(recorder: Recorder, view: Tensor) -> None:
    """Give a stale view its value: compute it again from its base, which may itself be stale."""
    step: ViewStep = view.step
    inputs = [recorder.value(symbol) for symbol in step.symbols]
    node = recorder.inline(step.called.expand(), inputs)[_new_position(step)]
    view.node = recorder.settled(view, with_strides(recorder, node, view.meta))
    view.seen = view.root.version  # type: ignore[union-attr]


def write(recorder: Recorder, symbol: Tensor, node: torch.fx.Node) -> None:
    """Make `node` the symbol's value, and write it through to every base up to the root."""
    chain = [symbol]
    symbol.node = recorder.settled(symbol, node)
    view = symbol
    while view.base is not None:
        base, step = view.base, view.step
        inputs = [recorder.value(other) for other in step.symbols]
        scatter = step.called.scatter(step.position, meta_of(view.node.meta["val"]))
        base.node = recorder.settled(base, recorder.inline(scatter, [*inputs, view.node])[0])
        view = base
        chain.append(view)
    root = view
    root.version += 1
    for link in chain[:-1]:
        # A value with other strides than the view has would make later sums differ: take it from the base instead.
        link.seen = root.version if strides_fit(link.node, link.meta) else STALE
    root.node = with_strides(recorder, root.node, root.meta)


def _new_position(step: ViewStep) -> int:
    """Where result `step.position` stands among the expansion's outputs (results that are arguments are left out)."""
    called = step.called
    return sum(
        type(result) is TensorMeta and not (alias and alias[0] == "self")
        for result, alias in zip(called.results[: step.position], called.aliases[: step.position], strict=True)
    )


def strides_fit(node: torch.fx.Node, meta: TensorMeta) -> bool:
    """Whether a node's strides are those of `meta`, where they matter."""
    strides = node.meta["val"].stride()
    if strides == meta.stride or meta.numel == 0:
        return True
    return all(size <= 1 or have == want for size, have, want in zip(meta.shape, strides, meta.stride, strict=True))


def with_strides(recorder: Recorder, node: torch.fx.Node, meta: TensorMeta) -> torch.fx.Node:
    """The node, or a copy of it with the strides of `meta` when they differ."""
    if strides_fit(node, meta):
        return node
    order = sorted(range(len(meta.shape)), key=lambda dim: (-meta.stride[dim], dim))
    back = [order.index(dim) for dim in range(len(order))]

    def add(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        with torch_private.fake_execution():
            values = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args]
            val = target(*values, **kwargs)
        return recorder.emit(target, args, kwargs, val)

    dense = add(aten.permute.default, node, order)
    dense = add(aten.clone.default, dense, memory_format=torch.contiguous_format)
    dense = add(aten.permute.default, dense, back)
    if strides_fit(dense, meta):
        return dense
    empty = add(aten.empty_strided.default, list(meta.shape), list(meta.stride), dtype=meta.dtype, device=meta.device)
    return add(aten.copy.default, empty, node)
