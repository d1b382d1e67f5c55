"""The short way through the recorder, for calls that a state of the trie has seen before.

In: a torch function on eager tensors and plain values. Out: its new symbol, where the state knows the call's key; else
the long way records the call and teaches the state. A key holds slots and values with their types, never shapes: equal
keys at one state had equal metadata when they were learnt. Learnt are calls with one fresh result, one view or none.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch.capture.expand import VIEW
from dtorch.capture.mutation import ViewStep, attach_view, sources
from dtorch.capture.repeat import fresh
from dtorch.capture.symbol import Tensor, TensorMeta
from dtorch.torch_private import autocast_anywhere, dispatch_is_changed

_NAMED = object()  # stands in a key between positional and named arguments
SAME: Any = object()  # stands for `Known` where a call gives its first argument back
MAY_BE_SAME = frozenset(
    [getattr(torch.Tensor, name) for name in "to type contiguous float double half bfloat16".split()]
    + [torch.dropout, torch.nn.functional.dropout]
)
MOST_STEPS = 4  # a call that is more steps of the trace than this always takes the long way
JOINS = frozenset((torch.cat, torch.stack, torch.concat))  # their tensors come in a list
_PLAIN = frozenset(
    {int, bool, type(None), str, torch.dtype, torch.memory_format, torch.layout, torch.device, type(...)}
)
_dtype = torch.get_default_dtype


class Known:
    """What a learnt call makes: the state after it, the result's metadata, and how it is a view, if it is one.

    base: which of the call's tensors `view` is derived from; its step names no symbols, or stands for one that does.
    steps: how many steps of the trace it is. moves: whether the call moves an input, so that it has to be asked each
    time whether that is allowed.
    """

    __slots__ = ("state", "meta", "slot", "view", "base", "pool", "steps", "moves")

    def __init__(
        self, path: list[Any], meta: TensorMeta, view: ViewStep | None, base: int, pool: list[Tensor]
    ) -> None:
        self.state, self.meta, self.view, self.base = path[-1], meta, view, base
        self.slot = self.state.outputs[0]
        self.steps = len(path)
        self.moves = any(state.entry.placed.moves for state in path)
        self.pool = pool  # dead symbols of this metadata, to be used again


def key_of(recorder: Any, function: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """The key of a call at the recorder's state, or None for a call that only the long way understands.

    Brings tensors that are not in the pending trace yet into it, plain ones too.
    """
    key: list[Any] = [function]
    for item in args:
        kind = type(item)
        if kind is Tensor:
            if item.recorder is not recorder:
                return None
            node = item.node
            if node is None or (item.root is not None and item.seen != item.root.version):
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
        elif (kind is torch.Tensor or kind is torch.nn.Parameter) and not (_reads(function) or dispatch_is_changed()):
            key.append(recorder.value(recorder.lift(item)))
        elif kind is tuple or kind is torch.Size or kind is list:
            key.append(kind)
            for child in item:
                inner = type(child)
                if inner is Tensor and function in JOINS:
                    if child.recorder is not recorder:
                        return None
                    child_node = child.node
                    if child_node is None or (child.root is not None and child.seen != child.root.version):
                        child_node = recorder.value(child)
                    key.append(child_node)
                    continue
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
        key.append(_NAMED)
        for name, item in kwargs.items():
            kind = type(item)
            if kind is Tensor and item.node is not None and item.root is None and item.recorder is recorder:
                key += (name, item.node)
            elif kind in _PLAIN or kind is float and item == item and item != 0.0:
                key += (name, kind, item)
            else:
                inner = key_of(recorder, name, (item,), None)
                if inner is None:
                    return None
                key.append(inner)
    return tuple(key)


def _reads(function: Any) -> bool:
    """Whether a function may want a plain tensor as it is: its values on the host, say."""
    from dtorch.capture.intercept import SPECIAL

    return function in SPECIAL


def _slice_key(item: slice) -> tuple | None:
    parts = (item.start, item.stop, item.step)
    return parts if all(part is None or type(part) is int for part in parts) else None


def found(recorder: Any, known: Known, args: tuple) -> Any:
    """The result of a call that the state knows; None where calls mean something else now than when it was learnt."""
    if autocast_anywhere() or _dtype() is not recorder.default_dtype:
        return None
    if known is SAME:
        return args[0]
    if known.moves and recorder.home.explicit():
        return None
    recorder.state = known.state
    recorder.steps += known.steps
    pool = known.pool
    symbol = pool.pop() if pool else fresh(known, recorder)
    symbol.node = known.slot
    recorder.held.append(symbol)
    view = known.view
    if view is not None:
        tensors = tuple([item for item in args if type(item) is Tensor])
        step = view if len(tensors) == 1 else ViewStep(view.called, view.position, tensors)
        attach_view(symbol, tensors[known.base], step)
    return symbol


def learn(recorder: Any, before: Any, key: Any, args: tuple, kwargs: dict[str, Any] | None, result: Any) -> None:
    """Teach the state `before` a call that the long way has just recorded, if it is of the simple kind."""
    state = recorder.state
    if key[0] in MAY_BE_SAME and state is before and args and result is args[0]:
        before.fast[key] = SAME
        return
    path = _path(before, state)
    if type(result) is not Tensor or path is None or len(state.outputs) != 1:
        return
    if _dtype() is not recorder.default_dtype:  # what is learnt is used under that dtype alone
        return
    given = args if kwargs is None else (*args, *kwargs.values())  # out= too: what was written is no fresh result
    if result.node is not state.outputs[0] or any(result is item for item in given) or autocast_anywhere():
        return
    view, base = None, 0
    if result.base is not None:
        step = result.step
        tensors = [item for item in args if type(item) is Tensor]
        symbols = sources(result)
        if kwargs or len(tensors) != len(symbols) or any(a is not b for a, b in zip(tensors, symbols)):
            return
        alias = step.called.aliases[step.position]
        if alias is None or alias[0] != VIEW:
            return
        view, base = ViewStep(step.called, step.position, None), alias[1]
    before.fast[key] = Known(path, result.meta, view, base, recorder.pools[result.meta, state.outputs[0].spec])


def _path(before: Any, state: Any) -> list[Any] | None:
    """The states from `before`, which is left out, to `state`, where each is a call; at most a few. Else None."""
    path: list[Any] = []
    while state is not before:
        if state.parent is None or not hasattr(state.entry, "placed") or len(path) == MOST_STEPS:
            return None
        path.append(state)
        state = state.parent
    return path[::-1] or None


_NUMBER_METHODS = (
    "add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __isub__ mul mul_ __mul__ __rmul__ __imul__ "
    "div div_ __truediv__ __itruediv__"
)
TAKES_NUMBERS = frozenset(
    [getattr(torch.Tensor, name) for name in _NUMBER_METHODS.split()] + [torch.add, torch.sub, torch.mul, torch.div]
)
"""Functions to which a float and a 0-d float64 tensor are one and the same, bit for bit, when the other has dims."""
LOOK_OPS = 512  # after so many steps of a trace every call takes the way that looks whether to end it
LOOK_OPS = 512  # after so many steps of a trace every call takes the way that looks whether to end it
