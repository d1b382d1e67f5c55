"""The peer of `bench_steps`: the same Llama with torch DTensor, one rank of torchrun on Gloo.

Rank 0 reads a count from standard input, all ranks run that many steps, rank 0 prints the median in milliseconds.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist
from llama_models import llama, token_ids
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> None:
    """Serve until a count of 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    layers, hidden = int(sys.argv[1]), int(sys.argv[2])
    model, ids = llama(layers, hidden), token_ids()
    styles = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel())
    styles |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
    styles |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
    for layer in model.model.layers:
        parallelize_module(layer, mesh, styles)
    while True:
        count = torch.zeros(1, dtype=torch.int64)
        if dist.get_rank() == 0:
            print("ready", flush=True)
            count[0] = int(sys.stdin.readline() or 0)
        dist.broadcast(count, 0)
        if not count:
            break
        times = []
        with torch.no_grad():
            for _ in range(int(count)):
                began = time.perf_counter()
                model(ids, use_cache=False)
                times.append((time.perf_counter() - began) * 1e3)
        if dist.get_rank() == 0:
            print(statistics.median(times), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
