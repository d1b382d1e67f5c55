"""The `dtorch` command: `dtorch status`, `dtorch worker`.

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
    _add_worker(commands.add_parser("worker", help="serve devices of this host to a program elsewhere"))
    given = parser.parse_args(arguments)
    return _status() if given.command == "status" else _worker(given)


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Joins a program that called dtorch.init(cluster='external') and serves it devices until it ends. Under "
        "torchrun or srun with several tasks on a host, the first serves the devices of all; the others end at once."
    )
    parser.add_argument("--controller", required=True, metavar="tcp://HOST:PORT", help="where the program is")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--devices", metavar="0,1", help="ids, in the program's meshes, of the devices to serve")
    which.add_argument("--count", type=int, metavar="N", help="how many to serve; the program chooses their ids")
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help="has the secret; else DTORCH_SECRET has it")
    parser.add_argument("--address", metavar="IP", help="of this host for the other ones; else how it reaches HOST")
    parser.add_argument("--wait", type=float, default=300.0, metavar="S", help="for the program to appear (300 s)")


def _worker(given: argparse.Namespace) -> int:
    from dtorch.errors import DeviceError, OptionError
    from dtorch.runtime.hub import serve_host
    from dtorch.runtime.placing import share_of

    try:
        devices = None if given.devices is None else [int(each) for each in given.devices.split(",")]
        secret = given.secret_file.read_text().strip() if given.secret_file else os.environ.get("DTORCH_SECRET")
    except (ValueError, OSError) as error:
        print(f"dtorch worker: {error}", file=sys.stderr)
        return 2
    count = given.count
    if devices is None and count is None:
        share = share_of(os.environ)
        if share is None:
            print("dtorch worker: another task of this host serves its devices", flush=True)
            return 0
        devices, count = share
    try:
        return serve_host(given.controller, devices, count or 0, secret or None, given.wait, given.address)
    except (DeviceError, OptionError) as error:
        print(f"dtorch worker: {error}", file=sys.stderr, flush=True)
        return 1


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
