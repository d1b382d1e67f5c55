"""The short way through the recorder, for calls that a state of the trie has seen before.

In: a torch function on eager tensors and plain values. Out: its new symbol, or `MISSED`: then the long way records
the call and teaches the state. A key holds slots and values with their types, never shapes: equal keys at one
state had equal metadata when they were learnt. Only calls with one fresh result or one view are learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtorch.capture.expand import VIEW, Operation
from dtorch.capture.mutation import ViewStep, attach_view
from dtorch.capture.symbol import Tensor, TensorMeta, make

MISSED = object()
_PLAIN = frozenset({int, bool, type(None), str, torch.dtype, torch.memory_format, torch.layout, torch.device, type(...)})
_autocast = torch.is_autocast_enabled


class Known:
    """What a learnt call makes: the state after it, the result's metadata, and how it is a view, if it is one."""

    __slots__ = ("state", "meta", "slot", "view")

    def __init__(self, state: Any, meta: TensorMeta, view: tuple[Operation, int, int] | None) -> None:
        self.state, self.meta, self.view = state, meta, view
        self.slot = state.outputs[0]


def key_of(recorder: Any, function: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """The key of a call at the recorder's state, or None for a call that only the long way understands.

    Brings tensors that are not in the pending trace yet into it.
    """
    key: list[Any] = [function]
    for item in args:
        kind = type(item)
        if kind is Tensor:
            if item.recorder is not recorder:
                return None
            node = item.node
            if node is None or item.root is not None:
                node = recorder.value(item)
            key.append(node)
        elif kind in _PLAIN:
            key.append(kind)
            key.append(item)
        elif kind is float:
            if item == 0.0 and math.copysign(1.0, item) < 0 or item != item:
                return None
            key.append(float)
            key.append(item)
        elif kind is tuple or kind is torch.Size or kind is list:
            key.append(kind)
            for child in item:
                inner = type(child)
                if inner is slice:
                    child = _slice_key(child)
                    if child is None:
                        return None
                elif inner not in _PLAIN:
                    return None
                key.append(inner)
                key.append(child)
            key.append(len(item))
        elif kind is slice:
            inner_key = _slice_key(item)
            if inner_key is None:
                return None
            key.append(slice)
            key.append(inner_key)
        else:
            return None
    if kwargs:
        for name, item in kwargs.items():
            inner = key_of(recorder, name, (item,), None)
            if inner is None:
                return None
            key.append(inner)
    return tuple(key)


def _slice_key(item: slice) -> tuple | None:
    parts = (item.start, item.stop, item.step)
    return parts if all(part is None or type(part) is int for part in parts) else None


def quick(recorder: Any, function: Any, args: tuple, kwargs: dict[str, Any] | None, key: Any) -> Any:
    """The result of a call whose key the recorder's state knows, else MISSED."""
    known = recorder.state.fast.get(key)
    if known is None or _autocast("cpu") or recorder.ambient_changed():
        return MISSED
    recorder.state = known.state
    recorder.steps += 1
    recorder.hits += 1
    meta = known.meta
    pool = recorder.pools.get(meta)
    symbol = pool.pop() if pool else make(meta, recorder)
    slot = known.slot
    symbol.node, symbol.spec = slot, slot.spec
    recorder.held.append(symbol)
    view = known.view
    if view is not None:
        called, position, base = view
        tensors = tuple([item for item in args if type(item) is Tensor])
        attach_view(symbol, tensors[base], ViewStep(called, position, tensors))
    return symbol


def learn(recorder: Any, before: Any, key: Any, args: tuple, kwargs: dict[str, Any] | None, result: Any) -> None:
    """Teach the state `before` a call that the long way has just recorded, if it is of the simple kind."""
    state = recorder.state
    if type(result) is not Tensor or state.parent is not before or len(state.outputs) != 1:
        return
    if result.node is not state.outputs[0] or any(result is item for item in args) or _autocast("cpu"):
        return
    view = None
    if result.base is not None:
        step = result.step
        tensors = [item for item in args if type(item) is Tensor]
        if kwargs or len(tensors) != len(step.symbols) or any(a is not b for a, b in zip(tensors, step.symbols)):
            return
        alias = step.called.aliases[step.position]
        if alias is None or alias[0] != VIEW:
            return
        view = (step.called, step.position, alias[1])
    before.fast[key] = Known(state, result.meta, view)


def call(recorder: Any, function: Any, args: tuple, kwargs: dict[str, Any] | None, slow: Callable[[], Any]) -> Any:
    """A call by the short way, or by the long one, which is then learnt."""
    if recorder.steps >= recorder.segment_ops:
        recorder.flush()
    key = key_of(recorder, function, args, kwargs)
    if key is None:
        return slow()
    result = quick(recorder, function, args, kwargs, key)
    if result is not MISSED:
        return result
    before = recorder.state
    result = slow()
    learn(recorder, before, key, args, kwargs, result)
    return result
