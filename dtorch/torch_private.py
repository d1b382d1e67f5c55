"""The one file that touches torch's private modules and attributes, so that a new torch breaks here and only here.

In: torch objects. Out: small functions with plain results, in a section for each stage that needs them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


# --- for ir and passes: operator schemas, collectives, graph hooks ------------------------------------------------


OpOverload = torch._ops.OpOverload


@dataclass(frozen=True)
class SchemaFacts:
    """What an operator's schema promises about memory and randomness.

    `aliases`: position of the argument that the results may share memory with, or None. `mutates`: positions of
    arguments that it writes. `seeded`: results depend on the random state. `returns`: how many results.
    """

    aliases: int | None
    mutates: tuple[int, ...]
    seeded: bool
    returns: int


@lru_cache(maxsize=None)
def schema_facts(op: OpOverload) -> SchemaFacts:
    """Read `SchemaFacts` off an ATen overload; once for each overload."""
    schema = op._schema
    mutates = tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    read_sets = {
        name: i
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None
        for name in a.alias_info.before_set
    }
    aliases = next(
        (
            read_sets[name]
            for result in schema.returns
            if result.alias_info is not None
            for name in sorted(result.alias_info.before_set)
            if name in read_sets
        ),
        None,
    )
    return SchemaFacts(aliases, mutates, torch.Tag.nondeterministic_seeded in op.tags, len(schema.returns))


@lru_cache(maxsize=1)
def functional_collectives() -> dict[str, OpOverload]:
    """The functional collectives by name, and `wait_tensor`; their ops exist without torch.distributed's start."""
    importlib.import_module("torch.distributed._functional_collectives")
    names = (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "broadcast",
        "wait_tensor",
    )
    return {name: getattr(torch.ops._c10d_functional, name).default for name in names}


@contextmanager
def watch_replacements(graph_module: torch.fx.GraphModule, seen: Callable[[str, str, Any], None]) -> Iterator[None]:
    """Call `seen(old node's name, new node's name, user node)` whenever a use of a node is replaced by another."""

    def hook(old: Any, new: str, user: Any) -> None:
        seen(old.name, new, user)

    graph_module._register_replace_node_hook(hook)
    try:
        yield
    finally:
        graph_module._unregister_replace_node_hook(hook)


def size_hint(size: Any) -> int:
    """A plain int for a size that may be symbolic, without a guard: the traced example's size, else 1."""
    if type(size) is int:
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else 1
