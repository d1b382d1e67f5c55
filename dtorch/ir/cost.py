"""What work and communication cost, from explicit device numbers: the one model every decision is weighed by.

In: placements, byte counts, axis sizes. Out: seconds. The defaults describe no real machine. Their ratios are those
of one (about a thousand operations in the time of one byte sent), and keeping a weight whole has a price of its own,
so that a model of any size is worth sharding and choices do not flip with the size of a test model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtorch.ir.layout import PENDING, Pending, Placed, Split, Whole


@dataclass(frozen=True)
class CostModel:
    """Numbers of one device and of the links between devices.

    flops_per_s: multiply and add count two. memory_bytes_per_s: reads plus writes. network_bytes_per_s: what
    one device sends. collective_s / launch_s: fixed time of one collective / one kernel. weight_bytes_per_s:
    how dear it is to keep a weight's bytes on every device of an axis instead of cutting it.
    """

    flops_per_s: float = 1e12
    memory_bytes_per_s: float = 1e12
    network_bytes_per_s: float = 1e9
    collective_s: float = 1e-6
    launch_s: float = 1e-9
    weight_bytes_per_s: float = 5e7

    def convert(self, source: Placed, target: Placed, size_bytes: float, count: int) -> float:
        """Seconds to bring a value of `size_bytes` (uncut on this axis) from one placement to another.

        Volumes are those of ring algorithms on `count` devices: (n-1)/n of the value for an all-gather, a
        reduce-scatter; twice that for an all-reduce; 1/n of it for an all-to-all. Impossible ones cost inf.
        """
        if source == target:
            return 0.0
        moved = size_bytes * (count - 1) / count / self.network_bytes_per_s
        copied = 2 * size_bytes / self.memory_bytes_per_s
        if type(source) is Whole:
            if type(target) is Split:
                return self.launch_s + copied / count * 0.1  # most are views
            return self.launch_s + copied if target == PENDING else math.inf
        if type(source) is Split:
            if type(target) is Whole:
                return self.collective_s + moved + copied
            if type(target) is Split:
                if source.dim != target.dim:
                    return self.collective_s + moved / count + 2 * copied / count
                return self.collective_s + moved + 2 * copied  # other units of one dim: gathered, cut again
            return math.inf
        if type(target) is Whole:
            return self.collective_s + 2 * moved + copied
        if type(target) is Split:
            # Weighed like an all-reduce: whether reduce-scatter and all-gather around a region (sequence
            # parallelism) pay off is for the passes to say, with the order of work in view.
            return self.collective_s + 2 * moved + copied
        return math.inf

    def compute(self, flops: float, moved_bytes: float) -> float:
        """Seconds of one kernel: the slower of arithmetic and memory, plus its launch."""
        return max(flops / self.flops_per_s, moved_bytes / self.memory_bytes_per_s) + self.launch_s


def is_reduction_pair(first: Placed, second: Placed) -> bool:
    """Whether two Pending placements of one value on two axes may be resolved in any order."""
    linear = ("sum", "avg")
    return (
        type(first) is Pending
        and type(second) is Pending
        and (first.op == second.op or (first.op in linear and second.op in linear))
    )
