"""Counting what the compiler and the devices do while a block of code runs: for users' own tests.

In: a word from the driver for every program compiled, and from whoever runs plans for every run. Out:
`assert_no_recompile` and `expect_collectives`, which fail the test that holds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

WATCHES: list[Watch] = []
SETTLE: list[Callable[[], None]] = []
"""Called before counts are looked at, so that what was recorded has run: the room that holds graphs registers here."""


class Watch:
    """What happened since it was opened. `compiled`: programs, in words; `collectives`: how many ran, by kind."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.collectives: Counter[str] = Counter()


@contextmanager
def watch() -> Iterator[Watch]:
    """Count inside; what was recorded before has run by then, and what is recorded inside has at the end."""
    _settle()
    found = Watch()
    WATCHES.append(found)
    try:
        yield found
        _settle()
    finally:
        WATCHES.remove(found)


def _settle() -> None:
    for wait in SETTLE:
        wait()


def compiled(title: str, lines: Sequence[str]) -> None:
    """Note that a program was compiled; `lines`: where the user wrote it."""
    for each in WATCHES:
        each.compiled.append(f"{title}, {lines[0]}" if lines else title)


def ran(kernels: Sequence[Any]) -> None:
    """Note a run of a plan with these instructions."""
    counts = Counter(collective for item in kernels if (collective := _collective(item.kernel)))
    for each in WATCHES:
        each.collectives.update(counts)


def _collective(kernel: str) -> str | None:
    """`all_reduce` of `_c10d_functional.all_reduce.default`; waiting for one is not counted."""
    library, _, rest = kernel.partition(".")
    name = rest.partition(".")[0]
    return name if library.startswith("_c10d_") and name != "wait_tensor" else None


@contextmanager
def assert_no_recompile() -> Iterator[None]:
    """Fail unless everything inside ran programs that were compiled before: for tests of loops after warm-up.

    Covers modules of `dtorch.compile` and eager code, on all threads of the process.

    Raises:
        AssertionError: names every program that was compiled, with the first line it came from.
    """
    with watch() as found:
        yield
    if found.compiled:
        shown = "\n  ".join(found.compiled[:8])
        raise AssertionError(
            f"{len(found.compiled)} programs were compiled inside assert_no_recompile():\n  {shown}\n"
            "DTORCH_LOGS=recompiles says what differed from the programs that there were."
        )


@contextmanager
def expect_collectives(**counts: int) -> Iterator[None]:
    """Fail unless exactly so many collectives run inside, by kind: `expect_collectives(all_reduce=2)`.

    Args:
        counts: by `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` and so on, as `passes()` shows them;
            kinds left out must not run at all. Each counts once for all devices, as often as its plan runs.

    Raises:
        AssertionError: other collectives ran; says which.
    """
    with watch() as found:
        yield
    wanted = Counter({kind: count for kind, count in counts.items() if count})
    if found.collectives != wanted:
        ran_text = ", ".join(f"{kind}={count}" for kind, count in sorted(found.collectives.items())) or "none"
        wanted_text = ", ".join(f"{kind}={count}" for kind, count in sorted(wanted.items())) or "none"
        raise AssertionError(f"expected collectives: {wanted_text}; there ran: {ran_text}.")
