"""Which program a call needs: the key of its arguments and surroundings, and the values its program was made for.

In: flattened arguments. Out: a key (equal keys capture alike), and a tree of guards: programs that compute the
values which the model's Python code branched on, leading to the compiled program for those values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch.capture.structure import Flat
from dtorch.capture.traced import Read, ReadRequest


def call_key(flat: Flat) -> tuple:
    """Everything static about a call: structure, plain values, metadata of tensors, dtype and autocast state."""
    return (
        flat.tree,
        tuple([_leaf_key(leaf) for leaf in flat.leaves]),
        torch.get_default_dtype(),
        tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")),
    )


def kind_key(flat: Flat) -> tuple:
    """As `call_key`, without sizes and strides: equal keys are calls that may share a symbolic capture."""
    tree, leaves, *rest = call_key(flat)
    return (tree, tuple([(len(shape), dtype, *others) for shape, _, dtype, *others in leaves]), *rest)


def _leaf_key(leaf: torch.Tensor) -> tuple:
    remote = getattr(leaf, "remote", None)
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, None if remote is None else remote.spec)


def key_difference(key: tuple, others: list[tuple], names: list[str]) -> str:
    """What about a call differs from the nearest call before it, in words, for the recompiles log."""
    if not others:
        return "first call"
    best: list[str] | None = None
    for other in others:
        found = []
        if other[0] != key[0]:
            found.append("arguments have another structure or other plain values")
        if len(other[1]) == len(key[1]):
            for name, now, before in zip(names, key[1], other[1]):
                for what, new, old in zip(("shape", "stride", "dtype", "device", "placement"), now, before):
                    if new != old:
                        found.append(f"{name}: {what} {_plain(new)}, was {_plain(old)}")
                        break
        if other[2:] != key[2:]:
            found.append("default dtype or autocast changed")
        if best is None or len(found) < len(best):
            best = found
    return "; ".join(best or ["another call"])


def _plain(item: Any) -> str:
    return str(tuple(item)) if isinstance(item, torch.Size) else str(item)


def value_key(value: torch.Tensor) -> tuple:
    """A hashable form of a host tensor, equal for equal bits."""
    flat = value.detach().contiguous().reshape(-1)
    return (value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


@dataclass
class Guard:
    """A value that decides which program runs: `request` computes it, `branches` lead on by its value."""

    request: ReadRequest
    branches: dict[tuple, Any] = field(default_factory=dict)


class GuardTree:
    """All programs for one key, by the values that their capture read."""

    def __init__(self) -> None:
        self.root: Any = None

    def find(self, evaluate: Callable[[ReadRequest], torch.Tensor]) -> Any:
        """The program for a call whose guards `evaluate` computes; None if it has not been made yet."""
        node = self.root
        while isinstance(node, Guard):
            node = node.branches.get(value_key(evaluate(node.request)))
        return node

    def add(self, reads: list[Read], program: Any) -> None:
        """Hang a program under the values that were read while it was captured."""
        if not reads:
            self.root = program
            return
        if not isinstance(self.root, Guard):
            self.root = Guard(reads[0].request)
        node = self.root
        for read, following in zip(reads, [*reads[1:], None]):
            key = value_key(read.value)
            if following is None:
                node.branches[key] = program
                return
            if not isinstance(node.branches.get(key), Guard):
                node.branches[key] = Guard(following.request)
            node = node.branches[key]

    def programs(self) -> Iterator[Any]:
        """All programs in the tree."""
        stack = [self.root] if self.root is not None else []
        while stack:
            node = stack.pop()
            if isinstance(node, Guard):
                stack.extend(node.branches.values())
            else:
                yield node
