"""THE ordered list of passes, and the immutable pipeline that calls take it in.

In: passes, their names, or plain callables. Out: a `PassPipeline` whose order within each level is the order in
which they run. To add a pass to DTorch: write its file, then give it a line in `default_passes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dtorch.errors import PassError
from dtorch.passes.base import LEVELS, Pass, as_pass, unknown_name


@dataclass(frozen=True)
class PassPipeline:
    """Passes in order, and the names of those switched off. Every method returns a new pipeline."""

    passes: tuple[Pass, ...] = ()
    disabled: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = self.names()
        for name in names:
            if names.count(name) > 1:
                raise PassError(f'Pass "{name}" stands twice in one pipeline; give one of them another name.')

    @staticmethod
    def of(given: Any) -> PassPipeline:
        """What a user may give as `passes=`: None (the default), a pipeline, or callables added to the default."""
        if given is None:
            return default_passes()
        if isinstance(given, PassPipeline):
            return given
        pipeline = default_passes()
        for entry in given if isinstance(given, Iterable) and not isinstance(given, str) else (given,):
            pipeline = pipeline.append(entry)
        return pipeline

    def key(self) -> PassPipeline | None:
        """The pipeline itself as part of a cache's key, or None if one of its passes has an unhashable option."""
        try:
            hash(self)
        except TypeError:
            return None
        return self

    def names(self) -> tuple[str, ...]:
        """The names of all passes in order, disabled ones too."""
        return tuple(entry.name for entry in self.passes)

    def enabled(self, level: str | None = None) -> tuple[Pass, ...]:
        """The passes that run, in order; at one level if it is given."""
        return tuple(p for p in self.passes if p.name not in self.disabled and level in (None, p.level))

    def insert_after(self, name: str, entry: Any) -> PassPipeline:
        """Put a pass (or a registered name, or a callable) right after the pass called `name`."""
        return self._insert(self._index(name) + 1, entry, self.passes[self._index(name)].level)

    def insert_before(self, name: str, entry: Any) -> PassPipeline:
        """Put a pass (or a registered name, or a callable) right before the pass called `name`."""
        return self._insert(self._index(name), entry, self.passes[self._index(name)].level)

    def append(self, entry: Any) -> PassPipeline:
        """Put a pass last of its level; a plain callable runs once, at the end of level "global"."""
        added = self._unique(as_pass(entry))
        last = max((i + 1 for i, p in enumerate(self.passes) if _rank(p) <= _rank(added)), default=0)
        return self._insert(last, added, added.level)

    def replace(self, entry: Pass) -> PassPipeline:
        """Exchange the pass of the same name, to give it other options."""
        index = self._index(entry.name)
        return replace(self, passes=(*self.passes[:index], entry, *self.passes[index + 1 :]))

    def disable(self, name: str) -> PassPipeline:
        """Switch a pass off; PassError for a required one."""
        if self[name].required:
            raise PassError(f'Pass "{name}" cannot be disabled: later stages rely on what it does.')
        return replace(self, disabled=self.disabled | {name})

    def enable(self, name: str) -> PassPipeline:
        """Switch a disabled pass on again."""
        return replace(self, disabled=self.disabled - {self[name].name})

    def __getitem__(self, name: str) -> Pass:
        return self.passes[self._index(name)]

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __repr__(self) -> str:
        lines = ["PassPipeline("]
        for level in LEVELS:
            for entry in (p for p in self.passes if p.level == level):
                notes = [entry.numerics, *(["required"] if entry.required else [])]
                notes += ["disabled"] if entry.name in self.disabled else []
                shown = repr(entry) if not repr(entry).endswith("()") and "name=" not in repr(entry) else ""
                lines.append(f"  {level:<10} {entry.name:<28} {', '.join(notes)}  {shown}".rstrip())
        return "\n".join([*lines, ")"])

    def _index(self, name: str) -> int:
        names = self.names()
        if name not in names:
            raise PassError(unknown_name("pass in this pipeline", name, names))
        return names.index(name)

    def _insert(self, index: int, entry: Any, level: Any) -> PassPipeline:
        added = self._unique(as_pass(entry, level))
        return replace(self, passes=(*self.passes[:index], added, *self.passes[index:]))

    def _unique(self, entry: Pass) -> Pass:
        """Callables may share a name (two lambdas): number the later ones."""
        taken, name, count = self.names(), entry.name, 1
        if not hasattr(entry, "function"):
            return entry
        while name in taken and entry not in self.passes:
            count += 1
            name = f"{entry.name}_{count}"
        return entry if name == entry.name else replace(entry, name=name)


def _rank(entry: Pass) -> int:
    return LEVELS.index(entry.level)


@lru_cache(maxsize=1)
def default_passes() -> PassPipeline:
    """The passes that DTorch runs unless told otherwise, in order."""
    from dtorch.passes.common_subexpressions import CommonSubexpressions
    from dtorch.passes.dead_code import DeadCode, DeadCollectives
    from dtorch.passes.fold_redistributes import FoldRedistributes, FoldReductions
    from dtorch.passes.put_in_place import PutInPlace
    from dtorch.passes.remove_noops import RemoveNoops
    from dtorch.passes.reuse_in_place import ReuseInPlace
    from dtorch.passes.share_scalars import ShareScalars

    return PassPipeline(
        (
            RemoveNoops(),
            CommonSubexpressions(),
            FoldRedistributes(),
            FoldReductions(),
            DeadCode(),
            DeadCollectives(),
            ShareScalars(),
            PutInPlace(),
            ReuseInPlace(),
        )
    )
