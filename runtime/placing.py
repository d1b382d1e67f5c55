"""Which devices a host serves when nobody says so: what torchrun and srun tell each task.

In: the environment of one task. Out: ids and a count for the first task of a host, None for its other tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch


def share_of(environment: Mapping[str, str]) -> tuple[list[int] | None, int] | None:
    """(device ids or None, how many) that this task serves, or None if another task of its host serves them.

    torchrun: ranks are device ids; the first rank of a host serves those of all its ranks. srun with several tasks a
    host: the same, with ids where tasks are laid out in blocks. Else: all visible GPUs, or one device of a CPU; the
    program chooses the ids.
    """
    if "LOCAL_RANK" in environment and "RANK" in environment:
        if int(environment["LOCAL_RANK"]):
            return None
        count = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        first = int(environment["RANK"])
        return list(range(first, first + count)), count
    count = _tasks_here(environment)
    if count > 1:
        if int(environment.get("SLURM_LOCALID", "0")):
            return None
        in_blocks = not environment.get("SLURM_DISTRIBUTION", "block").startswith(("cyclic", "plane", "arbitrary"))
        first = int(environment["SLURM_PROCID"])
        return (list(range(first, first + count)) if in_blocks else None), count
    return None, max(1, torch.cuda.device_count())


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Tasks of this step on this node, from a list such as "4(x2),3"."""
    if "SLURM_PROCID" not in environment:
        return 0
    counts: list[int] = []
    for entry in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if found is None:
            return 1
        counts += [int(found[1])] * int(found[2] or 1)
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else 1
