"""Is a worker well? What its process, its signs of life and its work say.

In: a worker's record, the time, the limits. Out: None, or the text of the error that says what became of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from dtorch.options import Options
from dtorch.runtime.launch import Process

STOPPED_S = 0.4  # a process that stays stopped for longer is lost to the others


@dataclass
class WorkerRecord:
    """What is known of one worker by who looks after it. `state`: "starting", "up" or "dead"."""

    device: int
    process: Process
    state: str = "starting"
    facts: dict[str, Any] = field(default_factory=dict)
    pulse: dict[str, Any] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    stopped_since: float | None = None


def diagnose(record: WorkerRecord, now: float, options: Options) -> str | None:
    """What is wrong with a worker that is not known to be dead."""
    ended = record.process.ended()
    who = f"the worker of device {record.device} (pid {record.process.pid})"
    if ended is not None:
        return f"{who} ended with {ended}{_doing(record)}.{_last_words(record)}"
    if record.process.stopped():
        record.stopped_since = record.stopped_since or now
        if now - record.stopped_since >= STOPPED_S:
            return f"{who} is stopped{_doing(record)}: it was ended, since all others would wait for it."
    else:
        record.stopped_since = None
    if record.state == "up" and now - record.heard > options.silence_s:
        return f"{who} gave no sign of life for {options.silence_s:g} s{_doing(record)}: it was ended."
    busy_s = record.pulse.get("busy_s", 0.0)
    if busy_s > options.step_limit_s:
        return (
            f"{who} is stuck{_doing(record)}: it has been at it for {busy_s:.1f} s, and the limit is "
            f"{options.step_limit_s:g} s (option step_limit_s). It was ended."
        )
    return None


def _doing(record: WorkerRecord) -> str:
    at = record.pulse.get("at")
    what = record.pulse.get("what")
    return f" in command {at}{f' ({what})' if what else ''}" if at else ""


def _last_words(record: WorkerRecord) -> str:
    lines = list(record.process.log)[-5:]
    return "\n  its last lines:\n    " + "\n    ".join(lines) if lines else ""
