"""Placements by name: what a user gives as `placements=` / `inputs=`, and what models say of themselves.

In: patterns (glob over qualified names) with placements by mesh axis, or tensor-parallel styles by module name.
Out: `Ask`s by (name, axis index). A user's pattern that matches nothing is an error with the nearest names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dtorch.errors import PlacementError, nearest
from dtorch.ir.layout import Pending, Split, Whole
from dtorch.ir.spec import to_spec
from dtorch.mesh import DeviceMesh
from dtorch.placements import normalize
from dtorch.sharding.requests import Ask

COLUMN, ROW = -2, -1  # dims of a (out, in) weight that a column- / row-parallel layer cuts
STYLES: dict[str, int] = {
    "colwise": COLUMN,
    "colwise_rep": COLUMN,
    "colwise_gather_output": COLUMN,
    "packed_colwise": COLUMN,
    "rowwise": ROW,
    "rowwise_rep": ROW,
    "packed_rowwise": ROW,
    "embedding_rowwise": COLUMN,
    "embedding_colwise": ROW,
}
"""What the style names of `config.base_model_tp_plan` in transformers mean for a weight; others ask for nothing."""


def user_asks(
    given: Mapping[str, Any] | None, ranks: Mapping[str, int | None], mesh: DeviceMesh, what: str
) -> dict[tuple[str, int], Ask]:
    """Asks from `{pattern: placements}`; `ranks` has the names there are and their number of dims, None if unknown."""
    if given is not None and not isinstance(given, Mapping):
        raise PlacementError(
            f'{what} must be a dict from names or globs to placements, such as {{"*.weight": {{"tp": Shard(0)}}}}; '
            f"got {given!r}"
        )
    asks: dict[tuple[str, int], Ask] = {}
    unmatched = []
    for pattern, placements in (given or {}).items():
        if not isinstance(pattern, str):
            raise PlacementError(f"{what}: keys are names or globs, not {pattern!r}.")
        names = [name for name in ranks if matches(pattern, name)]
        if not names:
            unmatched.append(pattern)
        for name in names:
            for axis, placed in _placed(placements, mesh, ranks[name], f"{what}[{pattern!r}] on {name}").items():
                asks[name, axis] = Ask(placed)
    if unmatched:
        shown = []
        for pattern in unmatched:
            close = nearest(pattern, list(ranks), 3)
            shown.append(f"{pattern!r}" + (f" (nearest: {', '.join(close)})" if close else ""))
        raise PlacementError(
            f"{what}: these patterns match nothing: {'; '.join(shown)}. Patterns are globs over qualified names, such "
            f"as 'model.layers.*.self_attn.q_proj.weight' or '**.q_proj.weight'; there are {len(ranks)} names, the "
            f"first: {', '.join(list(ranks)[:3])}."
        )
    return asks


def _placed(placements: Any, mesh: DeviceMesh, rank: int | None, where: str) -> dict[int, Any]:
    """Placed values by axis index; axes that a dict leaves out are not asked for."""
    try:
        spec = to_spec(normalize(placements, mesh, rank))
    except PlacementError as error:
        raise PlacementError(f"{where}: {error}") from None
    axes = [mesh.axis(name) for name in placements] if isinstance(placements, Mapping) else list(range(mesh.ndim))
    if any(type(spec[axis]) is Pending for axis in axes):
        raise PlacementError(
            f"{where}: Partial cannot be asked of a value that is given whole. Use Shard or Replicate."
        )
    return {axis: spec[axis] for axis in axes}


def style_asks(
    styles: Mapping[str, str], ranks: Mapping[str, int], mesh: DeviceMesh, axes: Iterable[str] = ("tp",)
) -> dict[tuple[str, int], Ask]:
    """Soft asks from tensor-parallel styles by module (or parameter) name, for the mesh axes called `axes`."""
    asks: dict[tuple[str, int], Ask] = {}
    indices = [mesh.axis(name) for name in axes if mesh.find_axis(name) is not None]
    if not indices:
        return asks
    for pattern, style in styles.items():
        dim = STYLES.get(style)
        if dim is None:
            continue
        for name, rank in ranks.items():
            module, _, leaf = name.rpartition(".")
            if not (matches(pattern, name) or matches(pattern, module)):
                continue
            if leaf == "bias" and rank == 1:
                placed: Any = Split(0) if dim == COLUMN else Whole()
            elif rank >= 2:
                placed = Split(rank + dim)
            else:
                continue
            for axis in indices:
                asks[name, axis] = Ask(placed, soft=True)
    return asks


def matches(pattern: str, name: str) -> bool:
    """Whether a glob matches a whole qualified name.

    `*` stands for one or more characters of one name part, `**` for one or more characters and dots.
    """
    parts = re.split(r"(\*+)", pattern)
    expression = "".join({"*": r"[^.]+", "**": r".+"}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(expression, name) is not None


