"""Dynamic capture equals eager and static capture bit for bit, at sizes it was not captured at too."""

import pytest
import torch
from interpreting import assert_same, captured, check_graph, run_traced
from model_zoo import ZOO, token_ids
from torch import nn

from dtorch.capture.export import export_module
from dtorch.capture.module import flatten_arguments
from dtorch.capture.specialize import concretize
from dtorch.errors import InputError


@pytest.mark.parametrize("name", ZOO)
def test_an_exported_model_equals_eager_and_the_recorded_one(name):
    dtype = torch.float32
    model, args, kwargs = ZOO[name](dtype)
    with torch.no_grad():
        expected = model(*args, **kwargs)
    traced = export_module(model, args, kwargs)
    check_graph(traced)
    assert_same(run_traced(traced, model, args, kwargs), expected)
    recorded = captured(model, args, kwargs)
    assert {spec.target: spec.tied for spec in recorded.signature.inputs if spec.kind in ("weight", "buffer")} == {
        spec.target: spec.tied for spec in traced.signature.inputs if spec.kind in ("weight", "buffer")
    }


@pytest.mark.parametrize(
    "name", ["mlp", "llama", "llama_cached", "qwen3_moe", "mixtral", "gpt2", "t5_encoder", "clip_text"]
)
def test_a_dynamic_program_serves_other_sizes(name):
    model, args, kwargs = ZOO[name]()
    traced = export_module(model, args, kwargs, dynamic_shapes=True)
    for batch, length in ((3, 24), (2, 16), (5, 7)):
        if name == "mlp":
            call = (torch.randn(batch, length, 64),), {}
        else:
            call = (), kwargs | dict(input_ids=token_ids(batch, length))
        with torch.no_grad():
            expected = model(*call[0], **call[1])
        static = concretize(traced, flatten_arguments(model, *call))
        check_graph(static)
        assert all(
            type(size) is int
            for node in static.graph.graph.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
            for size in node.meta["val"].shape
        )
        assert_same(run_traced(static, model, *call), expected)


def test_sizes_that_do_not_fit_are_named():
    model = nn.Linear(6, 3).eval()
    traced = export_module(model, (torch.randn(4, 6),), dynamic_shapes={"input": {0: "batch"}})
    with pytest.raises(InputError, match="input"):
        concretize(traced, flatten_arguments(model, (torch.randn(4, 7),), {}))
    with pytest.raises(InputError, match="no tensor arguments"):
        export_module(model, (torch.randn(4, 6),), dynamic_shapes={"inptu": {0: "batch"}})


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(6))
        self.table = torch.arange(6.0)

    def forward(self, x, out):
        self.n += x.sum(0)
        out["x"].add_(1)
        out["new"] = x * self.table
        return x + self.n, out


def test_mutations_constants_and_changed_containers_come_through_both_ways():
    x = torch.randn(4, 6)
    for capture in (captured, export_module):
        model, eager = Written().eval(), Written().eval()
        first, second = {"x": torch.zeros(3)}, {"x": torch.zeros(3)}
        with torch.no_grad():
            expected = eager(x, first)
        traced = capture(model, (x, second))
        assert_same(run_traced(traced, model, (x, second)), expected)
        assert_same(second, first)
        assert_same(model.n, eager.n)
        assert {spec.mutates for spec in traced.signature.outputs} == {None, "n", "out_x"}
