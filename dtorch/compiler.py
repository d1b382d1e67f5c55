"""The driver: the stages in order, from a captured program to a plan, with a snapshot and a record of each.

In: a `Traced` program, a mesh shape, what is asked of placements, a pass pipeline. Out: `Compiled`: the plan, and
every graph on the way. It knows neither where the program came from nor where the plan will run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch.fx import GraphModule

from dtorch import watch
from dtorch.capture.traced import Traced
from dtorch.ir.cost import CostModel
from dtorch.ir.liveness import peak_bytes
from dtorch.ir.plan import Plan
from dtorch.ir.signature import Signature
from dtorch.ir.snapshot import Snapshot, take_snapshot
from dtorch.ir.verify import verify
from dtorch.lower.emit import emit
from dtorch.lower.lower import lower
from dtorch.lower.schedule import schedule
from dtorch.options import current, logger, progress
from dtorch.passes.base import Level, Numerics, PassContext
from dtorch.passes.manager import PassManager, PassRecord
from dtorch.passes.pipeline import PassPipeline
from dtorch.sharding.propagate import Placement, propagate
from dtorch.sharding.requests import Requests

T = TypeVar("T")
STAGES = 5  # capture, propagate, lower, schedule, emit


@dataclass(frozen=True)
class Settings:
    """What shapes a compilation besides the program: passes, numerics budget, device numbers, limit for bisecting."""

    pipeline: PassPipeline
    numerics: Numerics = "reassociates"
    cost: CostModel = field(default_factory=CostModel)
    limit: int | None = None
    dump_directory: Path | None = None
    title: str = "module"


@dataclass
class Compiled:
    """One compiled program: the plan, the placements, and how it came about.

    `snapshots` and `records` are in the order of the stages; stages that are no passes ("capture", "propagate",
    "lower", "schedule", "emit") have records too. `seconds` is the time of all stages after capture.
    """

    traced: Traced
    placement: Placement
    plan: Plan
    snapshots: list[Snapshot]
    records: list[PassRecord]
    seconds: float


def compile_program(
    traced: Traced, requests: Requests, settings: Settings, placement: Placement | None = None
) -> Compiled:
    """Run every stage after capture on one program. The traced graph is consumed: it becomes the global graph.

    `placement`: that of a graph which is placed already (recorded eager code); then nothing is chosen here.
    """
    stages = _Stages(traced.signature, requests, settings)
    graph = traced.graph
    stages.note("capture", "global", graph, traced.time_ms)
    found = placement or stages.timed(
        "propagate", "global", graph, lambda: propagate(graph, traced.signature, requests, settings.cost)
    )
    stages.passes(graph, "global")
    local = stages.timed("lower", "local", None, lambda: lower(graph, requests.mesh_shape, requests.axis_names))
    stages.passes(local, "local")
    stages.timed("schedule", "scheduled", local, lambda: schedule(local))
    stages.passes(local, "scheduled")
    plan = stages.timed(
        "emit",
        None,
        local,
        lambda: emit(local, traced.signature, found, requests.mesh_shape, requests.axis_names),
        snapshot=False,
    )
    stages.steps.close()
    seconds = time.perf_counter() - stages.started
    compiled = Compiled(traced, found, plan, stages.snapshots, stages.records, seconds)
    watch.compiled(settings.title, plan.lines)
    logger("comm").info("%s", _Lazily(lambda: collectives_text(compiled)))
    logger("placements").info("%s", _Lazily(lambda: placements_text(compiled)))
    return compiled


class _Stages:
    """Times stages, pictures graphs, runs passes: the bookkeeping around `compile_program`."""

    def __init__(self, signature: Signature, requests: Requests, settings: Settings) -> None:
        self.started = time.perf_counter()
        self.snapshots: list[Snapshot] = []
        self.records: list[PassRecord] = []
        self.steps = progress(range(STAGES), STAGES, f"compiling {settings.title}")
        next(self.steps)
        context = PassContext(
            mesh_shape=requests.mesh_shape,
            axis_names=requests.axis_names,
            options=current(),
            signature=signature,
            numerics=settings.numerics,
            cost_model=settings.cost,
            dump_directory=settings.dump_directory,
        )
        self.context = context
        self.manager = PassManager(settings.pipeline, context, settings.limit, self.records, self.snapshots)

    def note(self, stage: str, level: str, graph: GraphModule, time_ms: float, snapshot: bool = True) -> None:
        """Record a stage that is no pass, and picture the graph after it."""
        count = len(graph.graph.nodes)
        # Placements decide where sums are split over devices; every other stage only writes out what was decided.
        splits = stage == "propagate" and any(size > 1 for size in self.context.mesh_shape)
        numerics = "reassociates" if splits else "bitwise"
        peak = peak_bytes(graph.graph)
        self.records.append(PassRecord(stage, level, numerics, 0, time_ms, count, count, _collectives(graph), peak))
        next(self.steps, None)
        if snapshot:
            self.snapshots.append(take_snapshot(graph, stage, level))
            logger("graph").info("%s\n%s", stage, _Lazily(self.snapshots[-1].text))

    def timed(
        self, stage: str, level: Level | None, graph: GraphModule | None, work: Callable[[], T], snapshot: bool = True
    ) -> T:
        """Run a stage, verify the graph it leaves, and note it."""
        began = time.perf_counter()
        result = work()
        if graph is None:
            assert isinstance(result, GraphModule), f"stage {stage} made no graph"
            graph = result
        if self.context.options.verify and level is not None:
            verify(graph, level, self.context.signature, self.context.axis_sizes)
        self.note(stage, level or "plan", graph, (time.perf_counter() - began) * 1e3, snapshot)
        return result

    def passes(self, graph: GraphModule, level: Level) -> None:
        """Run the pipeline's passes of a level."""
        self.manager.run(graph, level)


def _collectives(graph: GraphModule) -> Counter[str]:
    from dtorch.ir.schema import collective_name, is_collective

    return Counter(collective_name(node) for node in graph.graph.nodes if is_collective(node))


def collectives_text(compiled: Compiled) -> str:
    """The collectives of a plan in order, one a line: kind, mesh axis, and the user's line."""
    lines = [f"{compiled.plan.digest}: communication of one run"]
    for instruction in compiled.plan.instructions:
        if instruction.stream.startswith("comm:"):
            kind = instruction.kernel.split(".")[1]
            axis = instruction.stream.partition(":")[2]
            lines.append(f"{kind:<24} over {axis:<8} {compiled.plan.lines[instruction.line]}")
    return "\n".join(lines)


def placements_text(compiled: Compiled) -> str:
    """The placements of all inputs, one a line."""
    axes = ", ".join(
        f"{name}={size}" for name, size in zip(compiled.plan.axis_names, compiled.plan.mesh_shape)
    )
    lines = [f"mesh({axes})"]
    for item in compiled.plan.inputs:
        lines.append(f"{item.kind:<8} {item.target:<60} {list(item.shape)} {list(item.spec)}")
    return "\n".join(lines)


class _Lazily:
    """Text that is made only if a log handler asks for it."""

    def __init__(self, make: Callable[[], str]) -> None:
        self.make = make

    def __str__(self) -> str:
        return self.make()
