"""What a benchmark reports, and how two things are timed fairly on a noisy machine.

In: callables. Out: medians of interleaved runs; a `Bar` says what was compared, the figures, and whether it holds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """One figure of ours beside a peer's. `limit` is for `ours` in `unit`, or for the ratio when `of_ratio`; None: no
    bar, a comparison to read.
    """

    name: str
    ours: float
    peer: float | None
    limit: float | None
    unit: str
    peer_name: str
    of_ratio: bool = True

    @property
    def ratio(self) -> float | None:
        """Ours ÷ the peer's."""
        return None if not self.peer else self.ours / self.peer

    @property
    def holds(self) -> bool | None:
        """Whether the bar is met; None where there is none."""
        if self.limit is None:
            return None
        value = self.ratio if self.of_ratio else self.ours
        return value is not None and value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """The bar as plain data."""
        return asdict(self) | {"ratio": self.ratio, "holds": self.holds}

    def line(self) -> str:
        """One line for a terminal."""
        ratio = "-" if self.ratio is None else f"{self.ratio:.3f}"
        peer = "-" if self.peer is None else f"{self.peer:.4g}"
        what = "ratio" if self.of_ratio else self.unit
        verdict = {True: "holds", False: "MISSED", None: "-"}[self.holds]
        limit = "no limit" if self.limit is None else f"limit {self.limit:g} ({what})"
        return (
            f"{verdict:6} {self.name:58} ours {self.ours:.4g} {self.unit}, {self.peer_name} {peer} {self.unit}, "
            f"ratio {ratio}, {limit}"
        )


def alternate(first: Callable[[], Any], second: Callable[[], Any], rounds: int, warm: int = 2) -> tuple[float, float]:
    """Median seconds of two callables, run in turn: a slow moment of the machine hits both."""
    for _ in range(warm):
        first()
        second()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for function, found in zip((first, second), times):
            found.append(seconds(function))
    return statistics.median(times[0]), statistics.median(times[1])


def seconds(function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    gc.collect()
    began = clock()
    function()
    return clock() - began
