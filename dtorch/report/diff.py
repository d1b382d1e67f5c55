"""What changed between two stages of a compilation, as a unified diff of their graphs' text.

In: snapshots. Out: text. Passes keep the names of the nodes they do not touch, so only touched nodes show.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from dtorch.errors import InputError, nearest
from dtorch.ir.snapshot import Snapshot


def diff_snapshots(before: Snapshot, after: Snapshot, context: int = 3) -> str:
    """A unified diff with `context` unchanged lines around each change; "" if the graphs read the same."""
    lines = difflib.unified_diff(
        before.text().splitlines(), after.text().splitlines(), before.stage, after.stage, lineterm="", n=context
    )
    return "".join(line + "\n" for line in lines)


def find_snapshot(snapshots: Sequence[Snapshot], stage: str) -> Snapshot:
    """The last snapshot of a stage. Raises InputError with the nearest names, and all of them, if there is none."""
    for snapshot in reversed(snapshots):
        if snapshot.stage == stage:
            return snapshot
    names = list(dict.fromkeys(snapshot.stage for snapshot in snapshots))
    close = nearest(stage, names)
    hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise InputError(
        f'There is no snapshot named "{stage}". {hint}Snapshots: {", ".join(names)}. '
        "(A pass that changed nothing has none.)"
    )
