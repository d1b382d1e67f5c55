"""An operator of one's own on a mesh: a `torch.library` op, and the rule that says how it may be sharded.

Run it: `python examples/custom_op_rule.py`. Without the rule the op runs whole on every device, with a warning;
with it, cut ones work too. docs/sharding.md explains the notation.
"""

import warnings

import torch
from torch import nn

import dtorch


@torch.library.custom_op("example::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, as one operator."""
    return torch.nn.functional.silu(gate) * up


@swiglu.register_fake
def _(gate, up):
    return torch.empty_like(up)


class GatedLayer(nn.Module):
    """The feed-forward layer of a Llama, with the operator above inside."""

    def __init__(self, width=64, inner=192):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        """(batch, width) → (batch, width)."""
        return self.down(swiglu(self.gate(x), self.up(x)))


def show(title, model, x, mesh):
    """Compile and run, then print the collectives of a step and where the first weight lies."""
    compiled = dtorch.compile(model, mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", dtorch.errors.ShardingWarning)
        result = compiled(x)
    torch.testing.assert_close(result, model(x))
    print(title)
    for warning in caught:
        print("  warning:", warning.message)
    print("  gate.weight:", *compiled.placements()["gate.weight"])
    print("  collectives:", dict(compiled.passes()[-1].collectives))


def main():
    """The same layer without and with the rule."""
    torch.manual_seed(0)
    model, x = GatedLayer().eval(), torch.randn(8, 64)
    mesh = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=["tp"])
    show("without a rule", model, x, mesh)
    # Both arguments and the result have the same dims, whatever their number, and none depends on another.
    dtorch.register_sharding_rule("example::swiglu", "..., ... -> ...")
    show("with the rule", model, x, mesh)


if __name__ == "__main__":
    main()
