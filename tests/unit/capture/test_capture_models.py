"""Captured models equal eager bit for bit, on every model of the zoo."""

import pytest
import torch
from interpreting import assert_same, captured, run_traced
from model_zoo import ZOO


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ZOO)
def test_a_captured_model_equals_eager_bit_for_bit(name, dtype):
    model, args, kwargs = ZOO[name](dtype)
    with torch.no_grad():
        expected = model(*args, **kwargs)
    traced = captured(model, args, kwargs)
    assert_same(run_traced(traced, model, args, kwargs), expected)


def test_capture_leaves_the_model_as_it_was():
    model, args, kwargs = ZOO["llama"]()
    before = {name: id(value) for name, value in model.named_parameters()}
    captured(model, args, kwargs)
    assert {name: id(value) for name, value in model.named_parameters()} == before
    assert all(type(value) is torch.nn.Parameter for value in model.parameters())


def test_nodes_tell_the_models_line_and_module():
    model, args, kwargs = ZOO["llama"]()
    traced = captured(model, args, kwargs)
    calls = [node for node in traced.graph.graph.nodes if node.op == "call_function"]
    attention = next(node for node in calls if "scaled_dot_product_attention" in str(node.target))
    assert "sdpa_attention.py" in attention.meta["where"] and "scaled_dot_product_attention" in attention.meta["where"]
    assert attention.meta["module"] == "model.layers.0.self_attn"
    linear = next(node for node in calls if node.target is torch.ops.aten.linear.default)
    assert linear.meta["module"] == "model.layers.0.self_attn.q_proj" and "modeling_llama.py" in linear.meta["where"]
