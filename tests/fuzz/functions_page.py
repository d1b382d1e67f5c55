"""docs/functions.md from the table of functions: operators, where their rules come from, what becomes of a placement.

In: the cases of functions.py. Out: the page's text; `text()` records every function once for each placement of its
first tensor on a mesh of two devices, and reads nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from functions import CASES, Case, tensors_of, with_tensors
from placing import choices

import dtorch
from dtorch import Replicate
from dtorch.ir import ops
from dtorch.ir.layout import WHOLE
from dtorch.ir.spec import to_spec
from dtorch.sharding.rules import mappings_of

MESH = dtorch.init_device_mesh("cpu", (2,))
HEAD = """# Functions

Every function here is tested on eager tensors against torch (tests/fuzz/test_functions.py): on one device bit for bit,
then on meshes of 2, 3 and 2 × 2 devices, in these placements of its tensors:

* an axis can replicate a tensor, cut each of its dims, and hold it as a sum whose parts differ (not of booleans);
* all combinations over all tensors and axes where they are 128 at most: so on one axis for all but some functions of
  three tensors or more, and on 2 × 2 for functions of one tensor;
* else combinations in which every two choices meet: of any two tensors on any two axes, and of one tensor on both axes.
  So each tensor has every placement on 2 × 2 too. `ALL_PLACEMENTS=700` raises the 128, and takes minutes;
* on one axis also the average (of 2), the maximum and the minimum of one tensor, the others replicated.

The page is made by that test from its table (tests/fuzz/functions.py): `DTORCH_ACCEPT=1 pytest
tests/fuzz/test_functions.py -k page` writes it. A function that is not listed works too if its ATen operators have a
rule; without one its inputs are replicated.

* *operators*: the ATen operators that the function is recorded as. Random numbers are drawn on the host beforehand, by
  torch, and are an input of these. `host`: all of the result is drawn there, or depends on data (`multinomial`,
  `bernoulli` of a tensor), for which the inputs are read. `none`: the result is the input itself.
* *rule*: where the sharding rule comes from: `own`, `torch` (its strategy tables) or `replicate` (none is known).
* *placements*: what the first tensor's placement gives for the first result (for a function that writes its argument,
  the argument keeps its own), the other inputs replicated. `!` marks those for which values have to be sent between
  devices first.

| function | operators | rule | placements |
|---|---|---|---|
"""


def short(placement: Any) -> str:
    """S(0), R or P(sum)."""
    return str(to_spec((placement,))[0])


def sources(graph: Any) -> list[tuple[str, str]]:
    """The operators of a placed step with the sources of their rules."""
    found = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target in (operator.getitem, ops.redistribute):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
        made = list(tensors_of([node.meta["val"]]))
        found.append((str(node.target).removeprefix("aten."), mappings_of(node.target, args, kwargs, made)[1]))
    return found


def communicates(graph: Any) -> bool:
    """Whether a placed step moves an input between devices; cutting what every device has moves nothing."""
    moves = [node.args[1:] for node in graph.graph.nodes if node.target is ops.redistribute]
    return any(had != has and had != WHOLE for before, after in moves for had, has in zip(before, after))


def row(case: Case) -> str:
    """One line of the table."""
    given = list(tensors_of([list(case.args), case.kwargs]))
    named: dict[str, str] = {}
    gives = []
    for placement in choices(given[0]):
        others = [[Replicate()]] * (len(given) - 1)
        placed = [dtorch.distribute_tensor(t, MESH, p) for t, p in zip(given, [[placement], *others])]
        dtorch.sync()
        recorder = placed[0].recorder
        args, kwargs = with_tensors([list(case.args), dict(case.kwargs)], iter(placed))
        result = case.function(*args, **kwargs)
        steps = [s.entry.placed for s in recorder.state.path() if hasattr(s.entry, "placed")]
        for step in steps:
            named.update(sources(step.graph))
        made = next(iter(tensors_of(result)), None)
        mark = "!" if any(communicates(step.graph) for step in steps) else ""
        if made is not None:
            gives.append(f"{short(placement)}→{short(made.placements[0])}{mark}")
    on_host = "none" if made is not None and any(made is tensor for tensor in placed) else "host"
    operators = ", ".join(f"`{name}`" for name in named) or on_host
    rules = ", ".join(sorted(set(named.values()))) or "–"
    return f"| `{case.name}` | {operators} | {rules} | {', '.join(gives) or 'a value'} |"


def text() -> str:
    """The whole page; of several cases of one function the first."""
    first = {case.name: case for case in reversed(CASES)}
    lines = [row(first[name]) for name in dict.fromkeys(case.name for case in CASES)]
    return HEAD + "\n".join(lines) + "\n"
