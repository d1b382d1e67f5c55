"""What is legal for one op, in words: the placements that its inputs may have on one mesh axis, by its rule.

In: a node of a global graph. Out: the distinct lists of input placements, partial ones last, and their text.
"""

from __future__ import annotations

from torch.fx import Node

from dtorch.ir.layout import WHOLE, Pending, Placed
from dtorch.sharding.factors import carry, cut
from dtorch.sharding.problem import template_of

SHOWN = 24  # so many are printed; more are counted

Inputs = tuple[Placed | None, ...]  # None: the values are not read, any placement will do


def legal_inputs(node: Node) -> list[Inputs]:
    """Every list of input placements that the op's rule allows on one axis, dims cut as torch.chunk does."""
    results = node.meta["val"]
    template = template_of(node, list(results) if isinstance(results, (list, tuple)) else [results])
    found: list[Inputs] = [(WHOLE,) * len(template.input_shapes)]
    for mapping in template.mappings:
        strategies = [cut(mapping, factor) for factor in mapping.cuttable()]
        strategies += [carry(mapping, positions) for positions in mapping.linear]
        for inputs, _ in strategies:
            found.append(tuple([None if i in mapping.ignored else placed for i, placed in enumerate(inputs)]))
    if template.alternatives is not None:
        found += [tuple(inputs) for inputs, _ in template.alternatives.strategies]
    return sorted(dict.fromkeys(found), key=lambda inputs: any(type(placed) is Pending for placed in inputs))


def legal_text(node: Node) -> str:
    """The lists as messages show them: `(R, R), (S(0), S(0)), (P, P)`."""
    found = legal_inputs(node)
    shown = [f"({', '.join('any' if placed is None else repr(placed) for placed in inputs)})" for inputs in found]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more
