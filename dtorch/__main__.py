"""The `dtorch` command: `dtorch status`.

In: arguments of a shell. Out: text, and an exit status of 0 if all is well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(prog="dtorch", description="Looks after DTorch's workers.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="the workers of all programs of this user on this machine")
    parser.parse_args(arguments)
    return _status()


def _status() -> int:
    found = list(_programs())
    if not found:
        print("no program of yours has workers on this machine")
        return 1
    for program in found:
        age = time.time() - program["time"]
        late = f", silent for {age:.0f} s" if age > 5 else ""
        print(f"program {program['pid']}: {len(program['workers'])} workers{late}")
        columns = ("worker", "host", "pid", "state", "queue", "values", "memory", "heard", "doing")
        rows = [_row(entry) for entry in program["workers"]]
        widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
        for row in (columns, *rows):
            print("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())
    return 0


def _programs() -> Any:
    for path in sorted(Path(tempfile.gettempdir()).glob("dtorch-*/status.json")):
        try:
            if path.stat().st_uid == os.getuid():
                program = json.loads(path.read_text())
                os.kill(program["pid"], 0)
                yield program
        except (OSError, ValueError, KeyError):  # it ended just now, or was killed and left its folder
            continue


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    return (
        entry["worker"],
        entry["host"],
        str(entry["pid"]),
        entry["state"],
        str(entry["queue"]),
        str(entry["values"]),
        f"{entry['memory_bytes'] / 2**20:.0f} MiB",
        f"{entry['heard_s']:.1f} s",
        entry["doing"],
    )


if __name__ == "__main__":
    sys.exit(main())
