"""What is asked of the placement of each graph input, on each mesh axis: pinned, cut in some dim, or free.

In: a Problem with marked units, the signature, and what user and presets say by name. Out: for one axis, the
`given` of the search: placements at hand, or `Free` options. The names of mesh axes carry the conventions: dp
cuts the batch of what the host gives and keeps weights whole; any other axis is for weights to be cut over.
"""

from __future__ import annotations

from collections.abc import Mapping as Lookup
from collections.abc import Sequence
from dataclasses import dataclass

from dtorch.errors import PlacementError
from dtorch.ir.cost import CostModel
from dtorch.ir.layout import WHOLE, Placed, Split
from dtorch.ir.signature import InputSpec, Signature
from dtorch.sharding.moves import At, Free, intervals
from dtorch.sharding.problem import Problem, Value

DATA_AXES = ("dp", "cfg")


@dataclass(frozen=True)
class Ask:
    """What is asked for one input on one axis. `soft`: a preset's wish, dropped where it does not divide well."""

    placed: Placed
    soft: bool = False
    exact: bool = False  # `placed` is to be taken with its outer and unit as they are


@dataclass(frozen=True)
class Requests:
    """What is asked, by graph input name and mesh axis index; inputs left out follow the axis's convention.

    `resident`: positions of the results that stay on the devices from step to step, as a new cache does.
    """

    asks: Lookup[tuple[str, int], Ask]
    axis_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    resident: frozenset[int] = frozenset()


def given_on_axis(
    problem: Problem,
    signature: Signature,
    requests: Requests,
    axis: int,
    cost: CostModel,
    earlier: Sequence[Sequence[Placed]] = (),
) -> dict[int, At | Free]:
    """Placements or options of every graph input on one axis; `earlier`: each value's placement on earlier axes."""
    count = requests.mesh_shape[axis]
    batch = batch_size(signature)
    given: dict[int, At | Free] = {}
    for name, index in problem.inputs.items():
        spec = signature.by_name.get(name)
        value = problem.values[index]
        if spec is None or spec.kind == "constant" or count == 1:
            given[index] = (WHOLE,)
            continue
        ask = requests.asks.get((name, axis))
        if ask is not None:
            given[index] = _asked(value, ask, count, cost, spec.target)
        elif requests.axis_names[axis] in DATA_AXES:
            given[index] = _on_data_axis(value, spec, batch, count)
        elif spec.kind == "user":
            given[index] = (WHOLE,)
        else:
            cuts = [(placed[index], size) for placed, size in zip(earlier, requests.mesh_shape)]
            given[index] = _free(value, spec.kind, count, cost, cuts)
    return given


def batch_size(signature: Signature) -> int | None:
    """Size of the first dim of the first tensor the host gives that has one: taken for the batch."""
    for spec in signature.inputs:
        if spec.kind == "user" and spec.shape:
            return spec.shape[0]
    return None


def _asked(value: Value, ask: Ask, count: int, cost: CostModel, name: str) -> At | Free:
    if type(ask.placed) is not Split or ask.exact:
        return (ask.placed,)
    dim, rank = ask.placed.dim, len(value.shape)
    if not -rank <= dim < rank:
        legal = f"Legal: Shard(0) to Shard({rank - 1}), or Replicate()" if rank else "A scalar can only be Replicate()"
        raise PlacementError(f"Shard({dim}) is asked for {name}, which has {rank} dimensions in this call. {legal}")
    dim %= rank
    cuts = [Split(dim, outer, unit) for outer, unit in intervals(value.shape[dim], value.units[dim], count)]
    keep_s = value.size_bytes / cost.weight_bytes_per_s
    if ask.soft:
        cuts = [cut for cut in cuts if value.shape[dim] // (cut.outer * cut.unit) >= count]
        return Free(tuple(cuts), keep_s) if cuts else (WHOLE,)
    return Free(tuple(cuts), keep_s)


def _on_data_axis(value: Value, spec: InputSpec, batch: int | None, count: int) -> At | Free:
    if spec.kind == "state":
        cut = value.shape and value.shape[0] == batch and value.shape[0] >= count
        return (Split(0),) if cut else (WHOLE,)
    if spec.kind != "user" or not value.shape or value.shape[0] != batch or value.shape[0] < count:
        return (WHOLE,)  # fewer samples than devices: every device computes them, none holds an empty part
    return (Split(0),)


def _free(value: Value, kind: str, count: int, cost: CostModel, cuts: list[tuple[Placed, int]]) -> Free:
    options: list[Placed] = [WHOLE]
    for dim, size in enumerate(value.shape):
        pieces = count
        for placed, other in cuts:
            if type(placed) is Split and placed.dim == dim:
                pieces *= other
        if size > 1:
            options += [
                Split(dim, outer, unit)
                for outer, unit in intervals(size, value.units[dim], pieces)
                if size // (outer * unit) >= pieces
            ]
    keep_s = value.size_bytes / cost.weight_bytes_per_s if len(value.shape) > 1 else 0.0
    if kind == "state":
        keep_s = value.size_bytes / (2 * cost.network_bytes_per_s)
    return Free(tuple(options), keep_s)


