"""Run all benchmarks and write what they found.

    python tests/bench/run.py [--output docs/benchmarks] [--only NAME ...]

Writes OUTPUT.json and OUTPUT.md: each bar with our figure, the peer's, the ratio, the limit and whether it holds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import time
import warnings
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
NAMES = (
    "bench_propagation", "bench_compile", "bench_calls", "bench_eager", "bench_first_call", "bench_steps",
    "bench_workers",
)  # fmt: skip


def main() -> int:
    """Run, print, write; the exit status is 0 even when a bar is missed: the file says so."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=None, help="write OUTPUT.json and OUTPUT.md")
    parser.add_argument("--only", nargs="*", default=None, choices=NAMES, help="benchmarks to run")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    found = []
    for name in arguments.only or NAMES:
        began = time.perf_counter()
        for bar in importlib.import_module(name).bars():
            print(bar.line(), flush=True)
            found.append(bar)
        print(f"       {name}: {time.perf_counter() - began:.0f} s", flush=True)
    if arguments.output is not None:
        write(arguments.output, found)
    return 0


def write(output: Path, found: list) -> None:
    """The two files."""
    import torch

    facts = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {_processor()}, 1 thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    body = {**facts, "bars": [bar.as_dict() for bar in found]}
    output.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")
    rows = ["| bar | ours | peer | ratio | limit | holds |", "|---|---|---|---|---|---|"]
    for bar in found:
        ratio = "" if bar.ratio is None else f"{bar.ratio:.3f}"
        peer = "" if bar.peer is None else f"{bar.peer:.4g} {bar.unit} ({bar.peer_name})"
        limit = "" if bar.limit is None else f"≤ {bar.limit:g}" + ("" if bar.of_ratio else f" {bar.unit}")
        holds = {True: "yes", False: "no", None: ""}[bar.holds]
        rows.append(f"| {bar.name} | {bar.ours:.4g} {bar.unit} | {peer} | {ratio} | {limit} | {holds} |")
    text = (
        "# Benchmarks\n\nWritten by `make bench`. Machines are noisy: read the ratios. Each bar times ours and "
        f"the peer in one process.\n\n{facts['date']}; {facts['machine']}; "
        f"Python {facts['python']}; torch {facts['torch']}.\n\n"
        + "\n".join(rows)
        + "\n\nFigures on GPUs are not measured yet: `tests/cuda/run.sh` is there to take them.\n"
    )
    output.with_suffix(".md").write_text(text)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


if __name__ == "__main__":
    sys.exit(main())
