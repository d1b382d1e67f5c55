"""Mixed work on two workers for as long as asked, watching memory: run by hand, never by CI.

    python tests/bench/soak.py [MINUTES]

Prints a line a minute: steps done, resident MiB of the program and of each worker, values kept, descriptors open.
Exit status 1 if memory or descriptors grew by more than a tenth after the first tenth of the time.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time

import torch
from llama_models import llama, token_ids

import dtorch
from dtorch import Partial, Replicate, Shard


def resident_mib(pid: int | str = "self") -> float:
    """Memory of a process."""
    with open(f"/proc/{pid}/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(minutes: float) -> int:
    """Soak; the exit status."""
    torch.set_num_threads(1)
    dtorch.init(workers="process", devices=2)
    draw, mesh = random.Random(0), dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
    compiled, ids = dtorch.compile(llama(2, 64), mesh), token_ids()
    x = dtorch.distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)])
    steps, first, began, told = 0, None, time.monotonic(), 0.0

    def figures() -> list[float]:
        gc.collect()
        return [
            resident_mib(),
            *(resident_mib(entry["pid"]) for entry in dtorch.status()),
            len(os.listdir("/proc/self/fd")),
        ]

    while time.monotonic() - began < minutes * 60:
        kind = draw.randrange(6)
        if kind == 0:
            compiled(ids, use_cache=False)
        elif kind == 1:
            futures = [(x * n).sum().redistribute(placements=[Replicate()]).to_torch_async() for n in range(20)]
            assert float(futures[draw.randrange(20)].get()) >= 0
        elif kind == 2:
            large = dtorch.distribute_tensor(
                torch.randn(600, 600), mesh, [draw.choice([Shard(0), Replicate(), Partial()])]
            )
            assert large.to_torch().shape == (600, 600)
        elif kind == 3:
            y = x
            for _ in range(30):
                y = (y * 0.5 + 1).redistribute(placements=[draw.choice([Shard(0), Shard(1), Replicate()])])
            assert abs(float(y.mean()) - 2) < 0.01
        elif kind == 4:
            try:
                x[dtorch.distribute_tensor(torch.tensor([999]), mesh, [Replicate()])].to_torch()
            except IndexError:
                pass
        else:
            z = x.clone()
            z[draw.randrange(64)] = 2.0
            z.add_(1).sum().item()
        steps += 1
        passed = time.monotonic() - began
        if first is None and passed > minutes * 6:
            first = figures()
        if passed - told >= 60:
            told = passed
            print(
                f"{passed / 60:5.1f} min  {steps} pieces of work  {[round(figure) for figure in figures()]}", flush=True
            )
    last = figures()
    print(f"from {[round(f) for f in first or last]} to {[round(f) for f in last]} after {steps} pieces of work")
    dtorch.shutdown()
    return int(any(end > begin * 1.1 + 8 for begin, end in zip(first or last, last)))


if __name__ == "__main__":
    # The work has ever new plans: with the default the caches would grow for long before they are full.
    os.environ.setdefault("DTORCH_EAGER_CACHE_STEPS", "2000")
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0))
