"""Which traces the recorder's trie keeps when there are too many steps: those that were recorded last, in full.

In: the root of a trie in whose ends `used` says when a trace last ended there. Out: the same trie without the branches
that only older traces need. Plans go with their states. What is pending or queued is untouched: a trace that was
handed on holds its own states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtorch.capture import repeat

if TYPE_CHECKING:
    from dtorch.capture.eager import State


def forget_old(root: State, keep: int) -> int:
    """Cut branches off until at most `keep` states are left (but the last trace stays); how many are left.

    Takes time in proportion to the whole trie: call it seldom.
    """
    states = [root]
    for state in states:
        states.extend(state.next.values())
    kept: set[Any] = {root}
    for end in sorted((state for state in states if state.used), key=lambda state: -state.used):
        path, state = [], end
        while state not in kept:
            path.append(state)
            state = state.parent  # type: ignore[assignment]  # only the root has none
        if len(kept) > 1 and len(kept) + len(path) > keep:
            break
        kept.update(path)
    for state in states:
        # Short ways may lead several steps on, to a state that goes although the next one stays.
        state.next = {key: child for key, child in state.next.items() if child in kept}
        state.fast = {key: known for key, known in state.fast.items() if _leads_into(known, kept)}
        if not _leads_into(state.edge, kept):
            state.edge = repeat.NOWHERE
    return len(kept)


def _leads_into(known: Any, kept: set[Any]) -> bool:
    state = getattr(known, "state", None)
    return state is None or state in kept
