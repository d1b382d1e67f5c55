"""Graphs and a summary as files, for `DTORCH_DUMP=directory` and `compile(dump=...)`.

In: a directory, the snapshots of a compilation in order, and what the summary should say. Out: `NNN-stage.py` for
each stage whose text differs from the one before, and `summary.json`. What cannot be written is a warning.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from dtorch.ir.snapshot import Snapshot
from dtorch.ir.text import graph_text as _graph_text


def graph_text(graph_module: GraphModule, level: str) -> str:
    """The graph as Python-like text, one line a node, byte-identical from run to run."""
    return _graph_text(graph_module.graph, level)


def write_dumps(directory: str | Path, snapshots: Iterable[Snapshot], summary: Mapping[str, Any]) -> tuple[Path, ...]:
    """Write the dumps of one compilation; returns the files written.

    Numbers count the snapshots given; one that equals the one before it is left out. Never raises: a full disk or a
    directory that cannot be made is a warning, and the run goes on.
    """
    written: list[Path] = []
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        previous, stages = None, []
        for number, snapshot in enumerate(snapshots):
            text = snapshot.text()
            if text != previous:
                path = folder / f"{number:03d}-{_file_name(snapshot.stage)}.py"
                path.write_text(text, encoding="utf-8")
                written.append(path)
                stages.append({"stage": snapshot.stage, "level": snapshot.level, "file": path.name})
            previous = text
        path = folder / "summary.json"
        path.write_text(json.dumps({**summary, "stages": stages}, indent=1, default=str) + "\n", encoding="utf-8")
        written.append(path)
    except Exception as error:  # a dump is for looking at: no failure of it is worth the user's run
        warnings.warn(f"could not write the dumps to {folder}: {type(error).__name__}: {error}", stacklevel=2)
    return tuple(written)


def fresh_directory(parent: str | Path, title: str, number: int = 0) -> Path:
    """A directory `parent/title-NNN` that did not exist, so that compilations do not overwrite each other's dumps.

    NNN is `number` or the next one that is free. Raises OSError if it cannot be made.
    """
    while True:
        path = Path(parent) / f"{_file_name(title)}-{number:03d}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.exists():  # a file stands where a parent directory should
                raise
            number += 1


def _file_name(stage: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", stage).strip("._") or "stage"
