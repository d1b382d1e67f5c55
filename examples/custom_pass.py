"""A rewrite of one's own: a pass over the `torch.fx` graph that makes every GELU the cheap, approximate one.

Run it: `python examples/custom_pass.py`. docs/passes.md says what a pass may rely on and must do.
"""

import torch
from torch import nn
from torch.fx import GraphModule

import dtorch

gelu = torch.ops.aten.gelu.default


@dtorch.register_pass(level="global", numerics="approximate")
def approximate_gelu(graph_module: GraphModule, context) -> int:
    """gelu(x) → gelu(x, approximate="tanh"); returns how many it rewrote."""
    exact = [node for node in graph_module.graph.find_nodes(op="call_function", target=gelu) if not node.kwargs]
    for node in exact:
        node.kwargs = {"approximate": "tanh"}
    return len(exact)


def main():
    """Compile a small model with the pass, show what it did, and that the results are nearly the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
    passes = dtorch.default_passes().insert_before("dead_code", approximate_gelu)

    compiled = dtorch.compile(model, mesh, passes=passes, numerics="approximate")
    x = torch.randn(8, 64)
    difference = (compiled(x) - model(x)).abs().max().item()
    print(compiled.diff("propagate", "approximate_gelu"))
    print(compiled.passes())
    print(f"largest difference from the plain model: {difference:.0e}")
    assert 0 < difference < 1e-3


if __name__ == "__main__":
    main()
