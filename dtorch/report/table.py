"""The table that `compiled.passes()` returns: one line a pass, in 100 columns of plain text.

In: the pass manager's records and the names of the snapshots there are. Out: a `PassTable`, which prints,
iterates over the records and finds one by name.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dtorch.errors import InputError, nearest
from dtorch.passes.manager import PassRecord

WIDTH = 100
_COLUMNS = "{:<26} {:<9} {:<12} {:>8} {:>9} {:>10}  {}"
_INDENT = 81
_SHORT = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class PassTable:
    """The records of one compilation, in the order in which the passes ran; `snapshots` names its stages."""

    records: tuple[PassRecord, ...]
    snapshots: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[PassRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: int | str) -> PassRecord:
        if isinstance(key, int):
            return self.records[key]
        for record in self.records:
            if record.name == key:
                return record
        names = [record.name for record in self.records]
        close = ", ".join(nearest(key, names)) or "none"
        raise InputError(f'No pass named "{key}" is in this table. Nearest: {close}. All: {", ".join(names)}.')

    def as_dicts(self) -> list[dict[str, Any]]:
        """The records as plain data, for `summary.json`."""
        return [asdict(record) | {"collectives": dict(record.collectives)} for record in self.records]

    def __str__(self) -> str:
        header = _COLUMNS.format("pass", "level", "numerics", "rewrites", "time", "peak", "collectives").rstrip()
        lines = [header, "-" * WIDTH]
        for record in self.records:
            lines += _lines(record)
        total = sum(record.rewrites for record in self.records), sum(record.time_ms for record in self.records)
        lines += ["-" * WIDTH, _COLUMNS.format("total", "", "", total[0], f"{total[1]:.1f} ms", "", "").rstrip()]
        if self.snapshots:
            named = "snapshots: " + ", ".join(self.snapshots)
            lines += textwrap.wrap(named, WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
        return "\n".join(lines)

    __repr__ = __str__


def _lines(record: PassRecord) -> list[str]:
    name = record.name if len(record.name) <= 26 else record.name[:25] + "…"
    if record.skipped:
        row = _COLUMNS.format(name, record.level, record.numerics, "-", "-", "-", "").rstrip()
        return [row, *textwrap.wrap(f"skipped: {record.skipped}", WIDTH, initial_indent="  ", subsequent_indent="  ")]
    found = textwrap.wrap(_collectives(record.collectives), WIDTH - _INDENT, break_on_hyphens=False) or ["-"]
    row = _COLUMNS.format(
        name,
        record.level,
        record.numerics,
        record.rewrites,
        f"{record.time_ms:.1f} ms",
        bytes_text(record.peak_bytes),
        found[0],
    )
    return [row, *(" " * _INDENT + more for more in found[1:])]


def _collectives(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {_SHORT.get(name, name)}" for name, count in sorted(counts.items()))


def bytes_text(count: int) -> str:
    """`1.5 MiB`, in the largest binary unit that leaves a number of at least 1."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
