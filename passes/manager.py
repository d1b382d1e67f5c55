"""Runs a pipeline's passes on a graph, and does around each what no pass author should have to.

In: a GraphModule and its level. Out: the graph rewritten, one `PassRecord` for each pass, one `Snapshot` for each
pass that changed something. A pass that fails, lies about its count or leaves an invalid graph is a PassError.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import GraphModule, Node

from dtorch.errors import PassError, VerifyError
from dtorch.ir import schema
from dtorch.ir.liveness import peak_bytes
from dtorch.ir.snapshot import Snapshot, take_snapshot
from dtorch.ir.text import node_line
from dtorch.ir.verify import verify
from dtorch.options import logger
from dtorch.passes.base import NUMERICS, CallablePass, Level, Pass, PassContext
from dtorch.passes.dead_code import remove_dead_nodes
from dtorch.passes.metadata import refresh_metadata
from dtorch.passes.pipeline import PassPipeline
from dtorch.torch_private import watch_replacements


@dataclass(frozen=True)
class PassRecord:
    """What one pass did.

    `time_ms` includes metadata, verification and the snapshot. `collectives` and `peak_bytes` (arguments left out)
    are those of the graph after the pass. `skipped` says why it did not run ("" if it did); `messages` are what it
    logged.
    """

    name: str
    level: str
    numerics: str
    rewrites: int
    time_ms: float
    nodes_before: int
    nodes_after: int
    collectives: Counter[str]
    peak_bytes: int
    skipped: str = ""
    messages: tuple[str, ...] = ()


@dataclass
class PassManager:
    """Runs one pipeline for one compilation; call `run` once for each level and stage module.

    `limit`: how many optional passes may run in all, counted over all calls of `run`, for bisecting; required
    passes always run. `records` and `snapshots` grow in the order of the runs.
    """

    pipeline: PassPipeline
    context: PassContext
    limit: int | None = None
    records: list[PassRecord] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    optional_passes_run: int = 0

    def run(self, graph_module: GraphModule, level: Level) -> int:
        """Run the pipeline's passes of `level` in order; returns the rewrites made in all."""
        before = take_snapshot(graph_module, "start", level)
        facts = _Facts.of(graph_module, before)
        total, changed = 0, False
        for entry in self.pipeline.enabled(level):
            reason = self._reason_to_skip(entry)
            if reason:
                self.records.append(facts.record(entry, 0, 0.0, facts, reason))
                continue
            self.optional_passes_run += not entry.required
            logged = len(self.context.messages)
            started = time.perf_counter()
            rewrites, after = self._run_one(entry, graph_module, before)
            time_ms = (time.perf_counter() - started) * 1e3
            now = facts
            if after is not before:
                now = _Facts.of(graph_module, after)
                self.snapshots.append(after)
                changed = True
            messages = tuple(self.context.messages[logged:])
            self.records.append(facts.record(entry, rewrites, time_ms, now, "", messages))
            logger("passes").info("%s: %d rewrites, %.1f ms, %d nodes", entry.name, rewrites, time_ms, now.nodes)
            before, facts, total = after, now, total + rewrites
        if changed:
            graph_module.recompile()
        return total

    def _reason_to_skip(self, entry: Pass) -> str:
        if entry.required:
            return ""
        if self.limit is not None and self.optional_passes_run >= self.limit:
            return f"limit of {self.limit} optional passes"
        budget = NUMERICS.index(self.context.numerics)
        if NUMERICS.index(entry.numerics) > budget and not isinstance(entry, CallablePass):
            return f"numerics: {entry.numerics} is beyond {self.context.numerics}"
        return ""

    def _run_one(self, entry: Pass, graph_module: GraphModule, before: Snapshot) -> tuple[int, Snapshot]:
        """Run a pass and check what it did; the snapshot after it is `before` itself if nothing changed."""
        origins: dict[str, str] = {}
        try:
            with watch_replacements(graph_module, lambda old, new, user: origins.setdefault(new, old)):
                rewrites = entry.run(graph_module, self.context)
        except Exception as error:
            what = f"raised {type(error).__name__}: {error}{_node_at_fault(error)}"
            raise self._failure(entry, graph_module, what) from error
        after = take_snapshot(graph_module, entry.name, entry.level)
        touched = after.changed_from(before)
        if touched and isinstance(entry, CallablePass) and remove_dead_nodes(graph_module.graph):
            after = take_snapshot(graph_module, entry.name, entry.level)
        if isinstance(entry, CallablePass) and (rewrites is None or rewrites is graph_module):
            rewrites = touched
        if type(rewrites) is not int or rewrites < 0:
            found = f"returned {type(rewrites).__name__} {str(rewrites)[:40]!r}, not the count of its rewrites"
            raise self._failure(entry, graph_module, f"{found} (an int, 0 if it changed nothing)")
        if touched and not rewrites:
            first = next((row.name for row in after.rows if row not in before.rows), after.rows[-1].name)
            raise self._failure(entry, graph_module, f"changed {touched} nodes (such as %{first}) but returned 0")
        if not touched:
            return rewrites, before
        try:
            made = refresh_metadata(before, after, entry.name, origins, self.context)
            if getattr(self.context.options, "verify", True):
                verify(graph_module, entry.level, self.context.signature, self.context.axis_sizes)
        except VerifyError as error:
            raise self._failure(entry, graph_module, f"left an invalid graph.\n{error}", VerifyError) from error
        return rewrites, take_snapshot(graph_module, entry.name, entry.level) if made else after

    def _failure(
        self, entry: Pass, graph_module: GraphModule, what: str, kind: type[PassError] = PassError
    ) -> PassError:
        """The error for a pass, with the graph it left written where the user can read it."""
        return kind(f'Pass "{entry.name}" ({entry.level}) {what}\n{self._dump(entry, graph_module)}')

    def _dump(self, entry: Pass, graph_module: GraphModule) -> str:
        if self.context.dump_directory is None:
            return "Set DTORCH_DUMP=directory to keep the graph as the pass left it."
        try:
            text = take_snapshot(graph_module, entry.name, entry.level).text()
            path = Path(self.context.dump_directory) / f"failed-{entry.name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except Exception as error:  # the graph may be broken beyond printing: the pass's own error matters more
            return f"The graph could not be dumped ({type(error).__name__}: {error})."
        return f"The graph as the pass left it: {path}"


def _node_at_fault(error: BaseException) -> str:
    """The node that the pass was looking at when it raised: the innermost frame's local variable that holds one."""
    found, trace = None, error.__traceback__
    while trace is not None:
        found = next((held for held in trace.tb_frame.f_locals.values() if isinstance(held, Node)), found)
        trace = trace.tb_next
    if found is None:
        return ""
    return f"\n  while looking at {node_line(found)}\n  from {schema.where(found) or 'an unknown line'}"


@dataclass(frozen=True)
class _Facts:
    """What records say of a graph; worked out again only when a pass changed it."""

    nodes: int
    collectives: Counter[str]
    peak_bytes: int

    @staticmethod
    def of(graph_module: GraphModule, snapshot: Snapshot) -> _Facts:
        counts = Counter(schema.collective_name(row.node) for row in snapshot.rows if schema.is_collective(row.node))
        return _Facts(len(snapshot.rows), counts, peak_bytes(graph_module.graph))

    def record(
        self, entry: Pass, rewrites: int, time_ms: float, after: _Facts, skipped: str, messages: tuple[str, ...] = ()
    ) -> PassRecord:
        return PassRecord(
            entry.name,
            entry.level,
            entry.numerics,
            rewrites,
            time_ms,
            self.nodes,
            after.nodes,
            after.collectives,
            after.peak_bytes,
            skipped,
            messages,
        )
