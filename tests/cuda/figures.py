"""GPU figures: a compiled Llama on one device and on virtual devices of one card, next to torch eager.

In: a CUDA card. Out: a table on stdout and a JSON file. Without a card it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))


def milliseconds(function: Callable[[], Any], rounds: int = 30) -> float:
    """Median wall time of one call, the card's work included."""
    for _ in range(5):
        function()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("| figures | no CUDA device: nothing measured |")
        return 0
    from llama_models import llama, token_ids

    import dtorch

    model = llama(16, hidden=1024, heads=16).cuda().half()
    ids = token_ids(128).cuda()
    rows: dict[str, float] = {}
    with torch.no_grad(), dtorch.options.override(same_device=True, virtual_devices=8):
        rows["torch eager, ms"] = milliseconds(lambda: model(ids, use_cache=False))
        for count in (1, 2, 8):
            mesh = dtorch.init_device_mesh("cuda", (count,), mesh_dim_names=["tp"])
            compiled = dtorch.compile(model, mesh)
            rows[f"compiled on {count} virtual devices, ms"] = milliseconds(lambda c=compiled: c(ids, use_cache=False))
    facts = {"card": torch.cuda.get_device_name(0), "torch": torch.__version__, "figures": rows}
    arguments.output.write_text(json.dumps(facts, indent=1) + "\n")
    for name, value in rows.items():
        print(f"| {name} | {value:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
