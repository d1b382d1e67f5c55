"""The words of expansions: arguments with numbered places for tensors, and ATen calls on them.

In: nothing. Out: `Ref`, `Step`, `Expansion`; templates filled in and searched; which calls hand their input on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtorch import torch_private

aten = torch.ops.aten


class Ref:
    """Stands for tensor number `index` in argument templates. One object for each index."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


_REFS: list[Ref] = []


def ref(index: int) -> Ref:
    """The one `Ref` of an index."""
    while len(_REFS) <= index:
        _REFS.append(Ref(len(_REFS)))
    return _REFS[index]


def fill(template: Any, values: Sequence[Any]) -> Any:
    """The template with every `Ref` replaced by the value of that number."""
    kind = type(template)
    if kind is Ref:
        return values[template.index]
    if kind is tuple:
        return tuple([fill(item, values) for item in template])
    if kind is list:
        return [fill(item, values) for item in template]
    if kind is dict:
        return {key: fill(item, values) for key, item in template.items()}
    if kind is slice:
        return slice(fill(template.start, values), fill(template.stop, values), fill(template.step, values))
    return template


def replaced(template: Any, moved: dict[Ref, Ref]) -> Any:
    """The template with some of its `Ref`s exchanged."""
    found: set[int] = set()
    collect_refs(template, found)
    values = [ref(i) for i in range(max(found, default=-1) + 1)]
    for old, new in moved.items():
        if old.index < len(values):
            values[old.index] = new
    return fill(template, values)


@dataclass(frozen=True)
class Step:
    """One ATen call of an expansion. Arguments hold `Ref`s: first the operation's tensors, then earlier steps."""

    target: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    val: Any


@dataclass(frozen=True)
class Expansion:
    """An operation as ATen calls. `outputs`: refs of the operation's new tensor results, then of new values of
    mutated inputs. `constants`: tensors that the function's own code made, numbered after the operation's tensors.
    """

    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    constants: tuple[torch.Tensor, ...] = ()
    random: str | None = None


SELF, VIEW = "self", "view"


def without_dead(
    steps: Sequence[Step], outputs: tuple, given: int, constants: tuple = (), random: str | None = None
) -> Expansion:
    """The expansion of the steps that the outputs need. `given`: how many values are numbered before the steps."""
    live: set[int] = set()
    collect_refs(outputs, live)
    for i in range(len(steps) - 1, -1, -1):
        if given + i in live:
            collect_refs((steps[i].args, steps[i].kwargs), live)
    moved: list[Any] = [ref(i) for i in range(given)]
    kept: list[Step] = []
    for i, step in enumerate(steps):
        moved.append(ref(given + len(kept)))
        if given + i in live:
            kept.append(Step(step.target, fill(step.args, moved), fill(step.kwargs, moved), step.val))
    return Expansion(tuple(kept), fill(outputs, moved), constants, random)


def followed(first: Expansion, second: Expansion, given: int) -> Expansion:
    """One expansion and then another, of the first one's only output. `given`: of the first, as in `without_dead`."""
    moved = [first.outputs[0], *[ref(given + len(first.steps) + i) for i in range(len(second.steps))]]
    added = [Step(step.target, fill(step.args, moved), fill(step.kwargs, moved), step.val) for step in second.steps]
    return Expansion((*first.steps, *added), fill(second.outputs, moved), first.constants, first.random)


def collect_refs(template: Any, into: set[int]) -> None:
    """Add the numbers of all `Ref`s in a template to `into`."""
    kind = type(template)
    if kind is Ref:
        into.add(template.index)
    elif kind is tuple or kind is list:
        for item in template:
            collect_refs(item, into)
    elif kind is dict:
        for item in template.values():
            collect_refs(item, into)


DROPPED = {
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.detach_copy.default,
    aten.alias_copy.default,
}


def is_inactive_dropout(target: Any, args: Sequence[Any]) -> bool:
    """Whether this is a dropout composite that hands its input on (evaluation, or probability zero)."""
    kinds = (
        aten.dropout.default,
        aten.feature_dropout.default,
        aten.alpha_dropout.default,
        aten.feature_alpha_dropout.default,
    )
    return target in kinds and (not args[2] or args[1] == 0)


def draws(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator that can draw random numbers does so with these arguments."""
    name = target.overloadpacket.__name__
    if "scaled_dot_product" in name:
        given = dict(zip(torch_private.argument_names(target), args, strict=False)) | kwargs
        return given.get("dropout_p", 0.0) != 0.0
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "native_dropout", "rrelu"):
        given = dict(zip(torch_private.argument_names(target), args, strict=False)) | kwargs
        return bool(given.get("train", given.get("training", True))) and given.get("dropout", 1.0) != 0.0
    return True
