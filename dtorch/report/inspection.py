"""What the compiler did with a program: the pass table, graphs at every stage, diffs, the plan; and the same as files.

In: a `Compiled`. Out: tables, graphs, text. Compiled modules and segments of eager code share these methods; stages
are named by `.passes()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dtorch.compiler import Compiled
from dtorch.ir.plan import Plan
from dtorch.ir.snapshot import Snapshot
from dtorch.report.diff import diff_snapshots, find_snapshot
from dtorch.report.dump import fresh_directory, write_dumps
from dtorch.report.table import PassTable


class Inspection:
    """The methods that show how a program was compiled; a class that has them says by `_inspected` which program."""

    def _inspected(self) -> Compiled:
        raise NotImplementedError  # abstract: modules and segments say which program they show

    def passes(self) -> PassTable:
        """The table of stages and passes."""
        compiled = self._inspected()
        return PassTable(tuple(compiled.records), tuple(snapshot.stage for snapshot in compiled.snapshots))

    def graph(self, at: str = "lower") -> torch.fx.GraphModule:
        """The graph as it was after a stage or pass (`.passes()` lists them)."""
        return self._snapshot(at).graph_module()

    def graph_text(self, at: str = "lower") -> str:
        """That graph as text, one line a node."""
        return self._snapshot(at).text()

    def diff(self, before: str, after: str) -> str:
        """A unified diff of two stages."""
        return diff_snapshots(self._snapshot(before), self._snapshot(after))

    def plan(self) -> Plan:
        """The plan: pure data."""
        return self._inspected().plan

    def _snapshot(self, stage: str) -> Snapshot:
        return find_snapshot(self._inspected().snapshots, stage)


def write_dump(
    folder: Path, title: str, mesh: str, compiled: Compiled, number: int = 0, more: Mapping[str, Any] | None = None
) -> None:
    """Write the graphs of a compilation and a summary into a new folder inside `folder`; a failure is a warning.

    number: the new folder's, or the next one that is free. more: what else the summary says.
    """
    summary = {
        "title": title,
        "mesh": mesh,
        "plan": compiled.plan.digest,
        "seconds": compiled.seconds,
        **(more or {}),
        "passes": PassTable(tuple(compiled.records)).as_dicts(),
    }
    try:
        where = fresh_directory(folder, title, number)
    except OSError:
        where = folder
    write_dumps(where, compiled.snapshots, summary)
