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


def test_a_padding_mask_is_read_and_the_graph_is_for_its_answer():
    model, _, kwargs = ZOO["llama"]()
    whole, padded = torch.ones(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long)
    padded[0, :5] = 0
    for mask in (whole, padded):
        call = kwargs | dict(attention_mask=mask)
        with torch.no_grad():
            expected = model(**call)
        traced = captured(model, (), call)
        assert_same(run_traced(traced, model, (), call), expected)
        assert traced.reads and all(read.request.only_user_inputs for read in traced.reads)
        assert "masking_utils.py" in traced.reads[0].request.where


def test_decoding_with_a_cache_that_comes_in_and_goes_out():
    model, _, _ = ZOO["llama"]()
    ids = ZOO["llama"]()[2]["input_ids"]
    caches = [None, None]
    for position in (slice(0, 6), slice(6, 7), slice(7, 8)):
        with torch.no_grad():
            expected = model(input_ids=ids[:, position], past_key_values=caches[0], use_cache=True)
        call = dict(input_ids=ids[:, position], past_key_values=caches[1], use_cache=True)
        result = run_traced(captured(model, (), call), model, (), call)
        assert_same(result.logits, expected.logits)
        if caches[1] is not None:
            assert result.past_key_values is caches[1]  # the caller's object, grown
        caches = [expected.past_key_values, result.past_key_values]
    assert caches[1].get_seq_length() == 8 and type(caches[1]) is type(caches[0])


def test_a_static_cache_is_written_in_place():
    from transformers import StaticCache

    model, _, _ = ZOO["llama"]()
    ids = ZOO["llama"]()[2]["input_ids"]
    caches = [StaticCache(config=model.config, max_cache_len=12) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(input_ids=ids[:, :6], past_key_values=cache)
        expected = model(input_ids=ids[:, 6:7], past_key_values=caches[0]).logits
    call = dict(input_ids=ids[:, 6:7], past_key_values=caches[1])
    traced = captured(model, (), call)
    assert_same(run_traced(traced, model, (), call).logits, expected)
    assert_same(caches[1].layers[1].keys, caches[0].layers[1].keys)
    assert {spec.mutates for spec in traced.signature.outputs if spec.mutates} >= {"past_key_values_layers_0_keys"}


@pytest.mark.parametrize("name", ["mlp", "llama", "t5_encoder"])
def test_autocast_around_a_model(name):
    model, args, kwargs = ZOO[name]()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(*args, **kwargs)
        traced = captured(model, args, kwargs)
    assert_same(run_traced(traced, model, args, kwargs), expected)
