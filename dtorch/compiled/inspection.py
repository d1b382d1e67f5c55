"""What the compiler did with a module: `Inspection` of the program last used, its weights' placements, the cache.

In: the module's programs. Out: what `dtorch.report.inspection` shows of one of them.
"""

from __future__ import annotations

from typing import Any

from dtorch.compiled.program import Program
from dtorch.compiler import Compiled
from dtorch.errors import InputError
from dtorch.ir.spec import from_spec
from dtorch.report.inspection import Inspection


class ModuleInspection(Inspection):
    """The methods of a compiled module that show what was done; `_last`, `_trees` and `_build` are the module's."""

    _last: Program | None
    _trees: Any
    _build: Any

    def placements(self) -> dict[str, tuple]:
        """Public placements of the weights of the program last used, by name."""
        return {item.target: from_spec(item.spec) for item in self.plan().inputs if item.kind in ("weight", "buffer")}

    def cache_info(self) -> dict[str, int]:
        """How many captures there were, how many calls hit a compiled program, how many programs are kept."""
        kept = sum(1 for tree in self._trees.values() for _ in tree.programs())
        return {**self._build.counts, "programs": kept}

    def _inspected(self) -> Compiled:
        return self._program().compiled

    def _program(self) -> Program:
        if self._last is None:
            raise InputError("Nothing is compiled yet: call the module once, then look at its passes and graphs.")
        return self._last
