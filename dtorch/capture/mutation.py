"""In-place writes and views as values: a write rebinds the symbol and, through a view, every base up to the root.

In: a recorder, symbols and the new value's node. Out: symbols that are up to date or known to be stale; a
stale view is derived again from its base when it is next used. Strides are kept as eager would have them,
since sums differ by them in the last bits.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from dtorch import torch_private
from dtorch.capture.expand import Operation, scatter_places
from dtorch.capture.steps import Expansion, Ref, Step, fill, ref
from dtorch.capture.symbol import Tensor, TensorMeta, meta_of
from dtorch.errors import UnsupportedError
from dtorch.ir.strides import may_overlap

if TYPE_CHECKING:
    from dtorch.capture.record import Recorder

aten = torch.ops.aten
STALE = -1


class ViewStep:
    """How a view is derived: result `position` of an operation on `symbols`, the base among them; None: the base alone,
    so that all views alike share one step.
    """

    __slots__ = ("called", "position", "symbols")

    def __init__(self, called: Operation, position: int, symbols: tuple[Tensor, ...] | None) -> None:
        self.called, self.position, self.symbols = called, position, symbols


def sources(view: Tensor) -> tuple[Tensor, ...]:
    """The symbols that a view is derived from."""
    symbols = view.step.symbols
    if symbols is None:
        assert view.base is not None
        return (view.base,)
    return symbols


def attach_view(symbol: Tensor, base: Tensor, step: ViewStep) -> None:
    """Note that a fresh symbol is a view of `base`."""
    symbol.base, symbol.step = base, step
    symbol.root = base if base.root is None else base.root
    symbol.seen = symbol.root.version


def derive_again(recorder: Recorder, view: Tensor) -> None:
    """Give a stale view its value: compute it again from its base, which may itself be stale."""
    bases: list[Tensor] = []  # stale ones; views of views of views may be more than Python's stack holds
    base = view.base
    while base is not None and base.root is not None and base.seen != base.root.version:
        bases.append(base)
        base = base.base
    while bases:
        recorder.value(bases.pop())
    step: ViewStep = view.step
    inputs = [recorder.value(symbol) for symbol in sources(view)]
    node = recorder.inline(step.called.expand(), inputs)[step.called.output_of(step.position)]
    view.node = recorder.settled(view, with_strides(recorder, node, view.meta))
    assert view.root is not None  # what has no root is never stale
    view.seen = view.root.version


def write(recorder: Recorder, symbol: Tensor, node: torch.fx.Node) -> None:
    """Make `node` the symbol's value, and write it through to every base up to the root."""
    links = [symbol]
    while links[-1].base is not None:
        links.append(links[-1].base)
    root = links[-1]
    # Links up to here have elements that share memory (an expanded tensor): their value follows from the link above.
    above = next((i + 1 for i in range(len(links) - 1, -1, -1) if _overlaps(links[i].meta)), 0)
    if above and len(links) > 1:
        _refuse_unplaceable(recorder, links[: above + 1])
    before = [recorder.value(symbol)] if above and _overlaps(symbol.meta) else []
    symbol.node = recorder.settled(symbol, node)
    if above and len(links) > 1:
        _write_places(recorder, links[: above + 1], before)
    for view, base in pairwise(links[above:]):
        inputs = [recorder.value(other) for other in sources(view)]
        scatter = view.step.called.scatter(view.step.position, meta_of(view.node.meta["val"]))
        base.node = recorder.settled(base, recorder.inline(scatter, [*inputs, view.node])[0])
    root.version += 1
    for i, link in enumerate(links[:-1]):
        # A value with other strides than the view has would make later sums differ: take it from the base instead.
        known = i >= above or (i == 0 and not before)
        link.seen = root.version if known and strides_fit(link.node.meta["val"].stride(), link.meta) else STALE
    root.node = with_strides(recorder, root.node, root.meta)


def _overlaps(meta: TensorMeta) -> bool:
    return not meta.contiguous and may_overlap(meta.shape, meta.stride)


def _refuse_unplaceable(recorder: Recorder, links: list[Tensor]) -> None:
    """A write below an expanded tensor needs a base whose elements can be counted by a view of their numbers."""
    symbol, base = links[0], links[-1]
    if _overlaps(base.meta):
        why = f"{base.summary}, elements of which share memory"
    elif base.meta.dtype.is_complex or any(link.meta.dtype is not base.meta.dtype for link in links):
        why = f"an expanded view of {base.summary}, which is complex or read as another dtype"
    else:
        return
    raise UnsupportedError(
        f"{recorder.line()}: a write into {symbol.summary}, a view of {why}. Write into the tensor before it is "
        "expanded, or into a clone()."
    )


def _write_places(recorder: Recorder, links: list[Tensor], before: list[torch.fx.Node]) -> None:
    """Give the last of `links` its value from that of the first, a view of it through tensors that overlap.

    `before`: what the first had, where elements of its own share memory: those that were written are told by it.
    """
    base, views = links[-1], links[-2::-1]
    others = [symbol for view in views for symbol in sources(view) if symbol is not view.base]
    steps = tuple((view.step.called, view.step.position) for view in views)
    given = [links[0].node, *before]
    scatter = scatter_places(steps, base.meta, tuple(meta_of(node.meta["val"]) for node in given))
    inputs = [recorder.value(base), *given, *[recorder.value(symbol) for symbol in others]]
    base.node = recorder.settled(base, recorder.inline(scatter, inputs)[0])


def strides_fit(strides: tuple[int, ...], meta: TensorMeta) -> bool:
    """Whether strides are those of `meta`, where they matter."""
    if strides == meta.stride or meta.numel == 0:
        return True
    return all(size <= 1 or have == want for size, have, want in zip(meta.shape, strides, meta.stride, strict=True))


def with_strides(recorder: Recorder, node: torch.fx.Node, meta: TensorMeta) -> torch.fx.Node:
    """The node, or a copy of it with the strides of `meta` when they differ."""
    if strides_fit(node.meta["val"].stride(), meta):
        return node
    return recorder.inline(laid_out(meta_of(node.meta["val"]), meta), [node])[0]


@lru_cache(maxsize=4096)
def laid_out(given: TensorMeta, meta: TensorMeta) -> Expansion:
    """A value of metadata `given` copied to where it has the strides of `meta`: (value) → (copy)."""
    order = sorted(range(len(meta.shape)), key=lambda dim: (-meta.stride[dim], dim))
    back = [order.index(dim) for dim in range(len(order))]
    steps: list[Step] = []
    vals = [given.val()]

    def add(target: Any, *args: Any, **kwargs: Any) -> Ref:
        with torch_private.fake_execution():
            val = target(*fill(args, vals), **kwargs)
        steps.append(Step(target, args, kwargs, val))
        vals.append(val)
        return ref(len(steps))

    dense = add(aten.permute.default, ref(0), order)
    dense = add(aten.clone.default, dense, memory_format=torch.contiguous_format)
    dense = add(aten.permute.default, dense, back)
    if not strides_fit(vals[-1].stride(), meta):
        steps, vals = [], vals[:1]
        empty = add(
            aten.empty_strided.default, list(meta.shape), list(meta.stride), dtype=meta.dtype, device=meta.device
        )
        dense = add(aten.copy.default, empty, ref(0))
    return Expansion(tuple(steps), (dense,))
