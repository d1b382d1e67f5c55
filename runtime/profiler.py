"""Measured events of all workers on one clock: which kernel ran when, on which device, for which line.

In: what workers measured while profiling was on, with their clocks. Out: a `Timeline` to read, or to save as a trace
that chrome://tracing and Perfetto open.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtorch.runtime.protocol import Kind

if TYPE_CHECKING:
    from dtorch.runtime.cluster import Cluster


@dataclass(frozen=True)
class Event:
    """One instruction of one run. Times in microseconds since profiling began, on the controller's clock."""

    device: str
    plan: int
    kernel: str
    stream: str
    line: str
    begin_us: float
    end_us: float


class Timeline:
    """Events of all devices, by the time they began. Filled when the block of `dtorch.profile()` ends."""

    def __init__(self) -> None:
        self.events: tuple[Event, ...] = ()
        self.began_ns = time.perf_counter_ns()

    def save(self, path: str | Path) -> None:
        """Write a trace that Perfetto and chrome://tracing open: a process for each device, a row for each stream."""
        rows: list[dict[str, Any]] = []
        devices = {device: number for number, device in enumerate(sorted({event.device for event in self.events}))}
        for device, number in devices.items():
            rows.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": device}})
        for event in self.events:
            rows.append(
                {
                    "ph": "X", "pid": devices[event.device], "tid": event.stream, "name": event.kernel,
                    "ts": event.begin_us, "dur": event.end_us - event.begin_us,
                    "args": {"plan": event.plan, "line": event.line},
                }
            )  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": rows}))

    def totals(self) -> dict[tuple[str, str], float]:
        """Microseconds by (device, kernel), largest first."""
        found: dict[tuple[str, str], float] = {}
        for event in self.events:
            key = event.device, event.kernel
            found[key] = found.get(key, 0.0) + event.end_us - event.begin_us
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def __repr__(self) -> str:
        return f"Timeline({len(self.events)} events on {len({event.device for event in self.events})} devices)"


def clock_offset_ns(sent_ns: int, told_ns: int, heard_ns: int) -> int:
    """How far a worker's clock is ahead, by what it told between our sending and our hearing (Cristian's estimate).

    Zero where the difference is within the round trip: the same machine has one clock.
    """
    offset = told_ns - (sent_ns + heard_ns) // 2
    return offset if abs(offset) > heard_ns - sent_ns else 0


def events_of(device: str, told: Mapping[str, Any], began_ns: int, offset_ns: int) -> list[Event]:
    """What one worker measured, on our clock."""
    found = []
    for plan, kernel, stream, line, begin_ns, end_ns in told["events"]:
        begin, end = ((at - offset_ns - began_ns) / 1e3 for at in (begin_ns, end_ns))
        found.append(Event(device, plan, kernel, stream, line, begin, end))
    return found


def begin(cluster: Cluster) -> None:
    """Let all workers measure from now on."""
    for device in list(cluster.workers):
        cluster.ask(device, Kind.PROFILE)


def end(cluster: Cluster, timeline: Timeline) -> None:
    """Let all workers tell what they measured, and measure no more."""
    found = list(timeline.events)
    for device in list(cluster.workers):
        message, sent, heard = cluster.ask(device, Kind.PROFILE, 0)
        offset = clock_offset_ns(sent, message.data["clock"], heard)
        found += events_of(f"{cluster.device_type}:{device}", message.data, timeline.began_ns, offset)
    timeline.events = tuple(sorted(found, key=lambda event: event.begin_us))
