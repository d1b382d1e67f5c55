"""Where a tensor's elements lie in memory: the order of its dims, how far it reaches, whether elements share a place.

In: shapes and strides, in elements. Out: plain numbers and answers; no tensor is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence


def memory_order(strides: Sequence[int]) -> list[int]:
    """Dims from the outermost to the innermost in memory; those that take none (expanded ones) come first."""
    return sorted(range(len(strides)), key=lambda dim: (strides[dim] != 0, -strides[dim], dim))


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many places of memory lie from a tensor's first element to its last, both counted."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share memory; false for whatever slices and permutations of dense memory give."""
    if 0 in shape:
        return False
    last = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride <= last:
            return True
        last += (size - 1) * stride
    return False
