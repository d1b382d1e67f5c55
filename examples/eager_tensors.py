"""Ordinary PyTorch on a mesh of devices, line by line: no launcher, no ranks, and nothing is compiled by hand.

Tensors are cut over simulated devices, a small transformer block is put together from parallel layers, and a module
written without a thought of devices is distributed as it is. Every result must be that of plain torch, or the program
fails.
"""

import argparse
import sys

import torch
from torch import nn

import dtorch
from dtorch import Replicate, Shard


class Mlp(nn.Module):
    """A block as anyone writes it: it knows nothing of devices."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        """`x` (..., width); the same shape comes out."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class ParallelMlp(Mlp):
    """The same with layers that are cut over the axis "tp": one all-reduce a call."""

    def __init__(self, width, mesh):
        super().__init__(width)
        self.up = dtorch.nn.ColumnParallelLinear(width, 4 * width, device_mesh=mesh)
        self.down = dtorch.nn.RowParallelLinear(4 * width, width, device_mesh=mesh)


def compare(what, found, expected):
    """Print how far two results are from each other; more than rounding ends the program."""
    difference = (found.to_torch() - expected).abs().max().item()
    print(f"{what:<28} {str(found.placements):<32} largest difference {difference:.0e}")
    if difference > 1e-5:
        sys.exit("The values differ from plain torch's.")


@torch.no_grad()
def main():
    """Tensors, parallel layers, a distributed module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs=2, default=[2, 2], metavar=("DP", "TP"), help="default: 2 2")
    arguments = parser.parse_args()
    mesh = dtorch.init_device_mesh("cpu", tuple(arguments.devices), mesh_dim_names=["dp", "tp"])
    print(f"{mesh.summary}; placements are listed by axis")

    plain = torch.randn(6, 5, 16)
    x = dtorch.distribute_tensor(plain, mesh, [Shard(0), Replicate()])
    weight = dtorch.distribute_tensor(torch.eye(16), mesh, [Replicate(), Shard(1)])
    compare("x @ weight", x @ weight, plain)
    compare("softmax over the cut dim", (x @ weight).softmax(-1), plain.softmax(-1))

    model = Mlp(16)
    expected = model(plain)
    parallel = ParallelMlp(16, mesh)
    parallel.load_state_dict(model.state_dict())  # full tensors; every device gets its part
    compare("parallel layers", parallel(x), expected)

    placements = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
    distributed = dtorch.distribute_module(Mlp(16), mesh, placements)
    distributed.load_state_dict(parallel.state_dict())  # state dicts are plain torch tensors
    compare("unchanged module", distributed(x), expected)


if __name__ == "__main__":
    main()
