"""What the compiler did with a module: the pass table, graphs at every stage, diffs, the plan, placements; dumps.

In: the program last used. Out: tables, graphs, text. Stages are named by `.passes()`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dtorch.compiled.program import Program
from dtorch.compiler import Compiled
from dtorch.errors import InputError
from dtorch.ir.snapshot import Snapshot
from dtorch.ir.spec import from_spec
from dtorch.report.diff import diff_snapshots, find_snapshot
from dtorch.report.dump import fresh_directory, write_dumps
from dtorch.report.table import PassTable


class Inspection:
    """The methods of a compiled module that show what was done; `_last`, `_trees` and `_build` are the module's."""

    _last: Program | None
    _trees: Any
    _build: Any

    def passes(self) -> PassTable:
        """The table of stages and passes of the program last used."""
        compiled = self._program().compiled
        return PassTable(tuple(compiled.records), tuple(snapshot.stage for snapshot in compiled.snapshots))

    def graph(self, at: str = "lower") -> torch.fx.GraphModule:
        """The graph of the program last used, as it was after a stage or pass (`.passes()` lists them)."""
        return self._snapshot(at).graph_module()

    def graph_text(self, at: str = "lower") -> str:
        """That graph as text, one line a node."""
        return self._snapshot(at).text()

    def diff(self, before: str, after: str) -> str:
        """A unified diff of two stages of the program last used."""
        return diff_snapshots(self._snapshot(before), self._snapshot(after))

    def plan(self) -> Any:
        """The plan of the program last used: pure data."""
        return self._program().compiled.plan

    def placements(self) -> dict[str, tuple]:
        """Public placements of the weights of the program last used, by name."""
        return {item.target: from_spec(item.spec) for item in self.plan().inputs if item.kind in ("weight", "buffer")}

    def cache_info(self) -> dict[str, int]:
        """How many captures there were, how many calls hit a compiled program, how many programs are kept."""
        kept = sum(1 for tree in self._trees.values() for _ in tree.programs())
        return {**self._build.counts, "programs": kept}

    def _program(self) -> Program:
        if self._last is None:
            raise InputError("Nothing is compiled yet: call the module once, then look at its passes and graphs.")
        return self._last

    def _snapshot(self, stage: str) -> Snapshot:
        return find_snapshot(self._program().compiled.snapshots, stage)


def write_dump(folder: Path, title: str, mesh: str, compiled: Compiled) -> None:
    """Write the graphs of a compilation and a summary into a new folder inside `folder`; a failure is a warning."""
    summary = {
        "title": title,
        "mesh": mesh,
        "plan": compiled.plan.digest,
        "seconds": compiled.seconds,
        "passes": PassTable(tuple(compiled.records)).as_dicts(),
    }
    try:
        where = fresh_directory(folder, title)
    except OSError:
        where = folder
    write_dumps(where, compiled.snapshots, summary)
