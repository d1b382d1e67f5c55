"""`generate()` of transformers around the compiled forward, with the cache on the devices.

In: tiny decoders. Out: eager's tokens with a static cache, few captures, no step that copies a cache.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from model_zoo import ZOO, llama, token_ids
from null.agreement import assert_near, assert_same_bits, mesh_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, GenerationConfig, StaticCache

import dtorch
from dtorch.errors import InputError
from dtorch.models.device_cache import DeviceCache

NAMES = ["llama", "qwen3", "gpt2", "mixtral"]
SHAPES = [(1,), (2,), (3,), (2, 2)]
IDS = token_ids(2, 7).clamp_min(2)


@cache
def eager(name: str) -> Any:
    """The model, in float64 where its layers can: then tokens can be compared without fear of near ties."""
    model = ZOO[name](torch.float64)[0]
    if name == "mixtral":
        model.set_experts_implementation("batched_mm")
    return model


@cache
def compiled(name: str, shape: tuple[int, ...]) -> Any:
    return dtorch.compile(eager(name), mesh_of(*shape))


def tokens(model: Any, ids: torch.Tensor = IDS, new: int = 6, **options: Any) -> Any:
    """What `generate` gives with 6 new tokens; greedy unless told otherwise."""
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    if not isinstance(model, dtorch.CompiledModule):
        options["cache_implementation"] = "static"
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=new, **options)


def captures(module: Any) -> int:
    return module.cache_info()["captures"]


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_eagers(name: str, shape: tuple[int, ...]) -> None:
    assert torch.equal(tokens(compiled(name, shape)), tokens(eager(name)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_sampled_tokens_are_eagers(name: str, shape: tuple[int, ...]) -> None:
    sampled = []
    for model in (eager(name), compiled(name, shape)):
        torch.manual_seed(7)
        sampled.append(tokens(model, do_sample=True, temperature=1.5, top_k=20))
    assert torch.equal(*sampled)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_left_padded_batches_give_eagers_tokens(name: str, shape: tuple[int, ...]) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    ids = IDS.masked_fill(mask == 0, 0)
    found = tokens(compiled(name, shape), ids, attention_mask=mask)
    assert torch.equal(found, tokens(eager(name), ids, attention_mask=mask))


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_beams_are_eagers(name: str, shape: tuple[int, ...]) -> None:
    found = tokens(compiled(name, shape), num_beams=2)
    with torch.no_grad():
        wanted = eager(name).generate(
            IDS, max_new_tokens=6, num_beams=2, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    assert torch.equal(found, wanted)


EXOTIC: dict[str, dict[str, Any]] = {
    "static by name": dict(cache_implementation="static"),
    "dynamic by name": dict(cache_implementation="dynamic"),
    "no cache": dict(use_cache=False),
    "two of each": dict(do_sample=True, num_return_sequences=2),
    "four beams": dict(num_beams=4, num_return_sequences=2),
    "sampled beams": dict(num_beams=3, do_sample=True),
    "penalties": dict(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=2),
    "a configuration": dict(generation_config=GenerationConfig(max_new_tokens=4, do_sample=True, pad_token_id=0)),
    "prompt lookup": dict(prompt_lookup_num_tokens=2),
}


@pytest.mark.parametrize("options", EXOTIC.values(), ids=EXOTIC)
def test_the_librarys_other_ways_to_generate(options: dict[str, Any]) -> None:
    ids = IDS[:1] if "prompt_lookup_num_tokens" in options else IDS
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0} | options
    found = []
    for model in (eager("llama"), compiled("llama", (2,))):
        torch.manual_seed(3)
        with torch.no_grad():
            found.append(model.generate(ids, **options))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_scores_come_along(name: str) -> None:
    options = dict(return_dict_in_generate=True, output_scores=True, output_hidden_states=True, new=3)
    found, wanted = tokens(compiled(name, (2,)), **options), tokens(eager(name), **options)
    assert found.keys() == wanted.keys()
    assert_near((found.scores, found.hidden_states), (wanted.scores, wanted.hidden_states), 1e-6)


def test_generation_from_embeddings() -> None:
    embedded = eager("llama").get_input_embeddings()(IDS).detach()
    options = dict(inputs_embeds=embedded, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        assert torch.equal(compiled("llama", (2,)).generate(**options), eager("llama").generate(**options))


def test_float32_tokens_are_eagers() -> None:
    model = llama()[0]
    assert torch.equal(tokens(dtorch.compile(model, mesh_of(2)), new=12), tokens(model, new=12))


def test_generation_stops_at_the_end_token() -> None:
    whole = tokens(eager("llama"), IDS[:1], new=8)[0, IDS.shape[1] :]
    end = int(whole[3])
    found = tokens(compiled("llama", (2,)), IDS[:1], new=8, eos_token_id=end)
    assert torch.equal(found, tokens(eager("llama"), IDS[:1], new=8, eos_token_id=end))
    assert found.shape[1] - IDS.shape[1] == whole.tolist().index(end) + 1


def test_a_streamer_gets_every_token_as_it_comes() -> None:
    class Listener:
        def __init__(self) -> None:
            self.heard: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.heard += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    listener = Listener()
    found = tokens(compiled("llama", (2,)), IDS[:1], streamer=listener)
    assert listener.heard == found[0].tolist() and listener.ended


# --- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_logits_on_one_device_are_eagers_bits_with_a_static_cache(name: str, dtype: torch.dtype) -> None:
    model = ZOO[name](dtype)[0]
    if name == "mixtral" and dtype == torch.float64:
        model.set_experts_implementation("batched_mm")
    options = dict(output_logits=True, return_dict_in_generate=True, new=4)
    found, wanted = tokens(dtorch.compile(model, mesh_of(1)), **options), tokens(model, **options)
    assert type(found) is type(wanted)
    assert torch.equal(found.sequences, wanted.sequences)
    assert_same_bits(found.logits, wanted.logits)


@pytest.mark.parametrize("name", NAMES)
def test_logits_on_a_mesh_are_near_eagers(name: str) -> None:
    model = ZOO[name](torch.float32)[0]
    options = dict(output_logits=True, return_dict_in_generate=True, new=4)
    assert_near(tokens(dtorch.compile(model, mesh_of(2)), **options).logits, tokens(model, **options).logits)


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_one_plan_for_the_prompt_and_one_for_all_other_tokens(name: str) -> None:
    module = dtorch.compile(eager(name), mesh_of(2))
    tokens(module, new=2)
    assert captures(module) == 2
    tokens(module, new=2)
    assert captures(module) == 2, "a second call of the same shapes compiled again"
    longer = dtorch.compile(eager(name), mesh_of(2))
    tokens(longer, new=9)
    assert captures(longer) == 2 and longer.cache_info()["hits"] == 7


def test_sampling_and_greedy_share_their_plans() -> None:
    module = dtorch.compile(eager("llama"), mesh_of(2))
    tokens(module)
    tokens(module, do_sample=True)
    assert captures(module) == 2


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_decode_step_copies_no_cache(name: str, shape: tuple[int, ...]) -> None:
    module = dtorch.compile(eager(name), mesh_of(*shape))
    tokens(module, new=3)
    plan, layers = module.plan(), module.config.num_hidden_layers
    kernels = [each.kernel for each in plan.instructions]
    assert kernels.count("aten.index_copy_.default") == 2 * layers
    assert "aten.index_copy.default" not in kernels and "aten.clone.default" not in kernels
    states = {item.name for item in plan.inputs if item.kind == "state" and item.donated}
    written = {item.mutates for item in plan.outputs if item.mutates in states}
    assert len(written) == 2 * layers and all(item.inplace for item in plan.outputs if item.mutates in written)
    assert module.passes()["put_in_place"].rewrites == 2 * layers


def test_a_decode_steps_cache_keeps_its_bytes() -> None:
    module = dtorch.compile(eager("llama"), mesh_of(2))
    with torch.no_grad():
        held = module.make_cache(16)
        module(IDS, past_key_values=held, use_cache=True)
        before = [[part.data_ptr() for part in _parts(layer.keys)] for layer in held.layers]
        for step in range(3):
            module(IDS[:, step : step + 1], past_key_values=held, use_cache=True)
        assert [[part.data_ptr() for part in _parts(layer.keys)] for layer in held.layers] == before


class NewBytes(TorchDispatchMode):
    """Counts the bytes of memory that operations allocate: of results which share none with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        held = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        for each in tree_leaves(result):
            if torch.is_tensor(each) and each.untyped_storage().data_ptr() not in held:
                self.total += each.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_decode_step_allocates_less_than_one_layers_cache(name: str, shape: tuple[int, ...]) -> None:
    module, length, used = dtorch.compile(eager(name), mesh_of(*shape)), 512, NewBytes()
    with torch.no_grad():
        held = module.make_cache(length)
        module(IDS, past_key_values=held, use_cache=True)
        module(IDS[:, :1], past_key_values=held, use_cache=True)
        with used:
            module(IDS[:, 1:2], past_key_values=held, use_cache=True)
    one = sum(part.nbytes for part in _parts(held.layers[0].keys))
    assert 0 < used.total < one, f"{used.total} bytes are new, a layer's keys are {one}"


def _parts(tensor: Any) -> list[torch.Tensor]:
    data = tensor.remote.data
    return data if isinstance(data, list) else [data]


# --- caches of one's own ---------------------------------------------------------------------------------------------


def decode(model: Any, held: Any, ids: torch.Tensor = IDS, prompt: int = 4) -> torch.Tensor:
    """Logits of all positions: a prompt, then one token at a time."""
    with torch.no_grad():
        found = [model(input_ids=ids[:, :prompt], past_key_values=held, use_cache=True)]
        for position in range(prompt, ids.shape[1]):
            held = found[-1].past_key_values
            found.append(model(input_ids=ids[:, position : position + 1], past_key_values=held, use_cache=True))
    return torch.cat([each.logits for each in found], 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_dynamic_cache_passed_by_hand_works(shape: tuple[int, ...]) -> None:
    model = eager("llama")
    wanted, held = decode(model, DynamicCache(config=model.config)), DynamicCache(config=model.config)
    found = decode(compiled("llama", shape), held)
    assert float((found - wanted).abs().max()) < 1e-6
    assert held.get_seq_length() == IDS.shape[1]
    assert type(held.layers[0].keys) is torch.Tensor


def test_a_cache_that_the_model_makes_is_the_librarys_own() -> None:
    with torch.no_grad():
        result = compiled("llama", (2,))(IDS, use_cache=True)
    assert type(result.past_key_values) is DynamicCache and result.past_key_values.get_seq_length() == IDS.shape[1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_device_cache_in_a_loop_of_ones_own(name: str, shape: tuple[int, ...]) -> None:
    model, module = eager(name), compiled(name, shape)
    held = module.make_cache(IDS.shape[1] + 2)
    assert isinstance(held, DeviceCache) and held.get_seq_length() == 0
    found = decode(module, held)
    wanted = decode(model, StaticCache(config=model.config, max_cache_len=IDS.shape[1] + 2))
    assert float((found - wanted).abs().max()) < 1e-6
    if shape == (1,):
        assert torch.equal(found, wanted)
    assert int(held.get_seq_length()) == IDS.shape[1] and held.max_cache_len == IDS.shape[1] + 2


def test_crop_takes_back_the_last_tokens() -> None:
    module = compiled("llama", (2,))
    held = module.make_cache(12)
    whole = decode(module, held)
    held.crop(-3)
    assert int(held.get_seq_length()) == IDS.shape[1] - 3
    with torch.no_grad():
        again = module(input_ids=IDS[:, -3:-2], past_key_values=held, use_cache=True).logits
    assert torch.equal(again, whole[:, -3:-2])
    with pytest.raises(InputError, match="negative"):
        held.crop(2)


def test_reset_forgets_everything() -> None:
    module = compiled("llama", (2,))
    held = module.make_cache(12)
    first = decode(module, held)
    held.reset()
    assert int(held.get_seq_length()) == 0
    assert torch.equal(decode(module, held), first)


def test_reordering_a_cache_reorders_its_batch() -> None:
    module = compiled("llama", (2,))
    held, swapped = module.make_cache(12), module.make_cache(12)
    decode(module, held, IDS[:, :-1])
    decode(module, swapped, IDS[[1, 0], :-1])
    held.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        last = IDS[[1, 0], -1:]
        found = module(input_ids=last, past_key_values=held, use_cache=True).logits
        wanted = module(input_ids=last, past_key_values=swapped, use_cache=True).logits
    assert torch.equal(found, wanted)


def test_a_copied_cache_goes_its_own_way() -> None:
    module = compiled("llama", (2,))
    held = module.make_cache(12)
    decode(module, held, IDS[:, :-1])
    twin = copy.deepcopy(held)
    with torch.no_grad():
        module(input_ids=IDS[:, :1], past_key_values=held, use_cache=True)
        assert int(twin.get_seq_length()) == IDS.shape[1] - 1
        one = module(input_ids=IDS[:, -1:], past_key_values=twin, use_cache=True).logits
    other = decode(module, module.make_cache(12))[:, -1:]
    assert torch.equal(one, other)


def test_a_prompt_longer_than_the_cache_is_refused() -> None:
    module = compiled("llama", (2,))
    held = module.make_cache(3)
    with pytest.raises(InputError, match="7 tokens .* cache made for 3"), torch.no_grad():
        module(input_ids=IDS, past_key_values=held, use_cache=True)
    assert int(held.get_seq_length()) == 0
    with pytest.raises(InputError, match="at least one"):
        module.make_cache(0)


def test_a_step_beyond_the_caches_end_fails_and_changes_nothing() -> None:
    module = compiled("llama", (2,))
    held = module.make_cache(IDS.shape[1])
    decode(module, held)
    with pytest.raises(IndexError), torch.no_grad():
        module(input_ids=IDS[:, :1], past_key_values=held, use_cache=True)
    assert int(held.get_seq_length()) == IDS.shape[1]


def test_a_cache_goes_from_one_generate_to_the_next() -> None:
    module, model = compiled("llama", (2,)), eager("llama")
    held = module.make_cache(32)
    first = tokens(module, past_key_values=held, return_dict_in_generate=True)
    assert first.past_key_values is held
    longer = torch.cat([first.sequences, IDS[:, :3]], 1)
    assert torch.equal(tokens(module, longer, past_key_values=held), tokens(model, longer))
    assert int(held.get_seq_length()) == longer.shape[1] + 5


@pytest.mark.parametrize("change", ["select", "repeat"])
def test_the_batch_of_a_cache_can_change(change: str) -> None:
    module = compiled("llama", (2,))
    held = module.make_cache(12)
    decode(module, held, IDS[:, :-1])
    rows = torch.tensor([1] if change == "select" else [0, 0, 1, 1])
    if change == "select":
        held.batch_select_indices(rows)
    else:
        held.batch_repeat_interleave(2)
    with torch.no_grad():
        found = module(input_ids=IDS[rows, -1:], past_key_values=held, use_cache=True).logits
    whole = decode(module, module.make_cache(12))[:, -1:]
    assert float((found - whole[rows]).abs().max()) < 1e-6


def test_two_caches_do_not_know_of_each_other() -> None:
    module = compiled("llama", (2,))
    one, other = module.make_cache(12), module.make_cache(12)
    with torch.no_grad():
        module(input_ids=IDS[:, :4], past_key_values=one, use_cache=True)
        module(input_ids=IDS[:, 1:5], past_key_values=other, use_cache=True)
        found = module(input_ids=IDS[:, 4:5], past_key_values=one, use_cache=True).logits
    wanted = decode(module, module.make_cache(12))[:, 4:5]
    assert torch.equal(found, wanted)


# --- the model's attributes ------------------------------------------------------------------------------------------


def test_attributes_of_the_model_pass_through() -> None:
    model, module = eager("llama"), compiled("llama", (2,))
    assert module.config is model.config or module.config.to_dict() == model.config.to_dict()
    assert module.device == model.device and module.dtype == model.dtype
    assert module.generation_config.to_dict() == model.generation_config.to_dict()
    assert module.main_input_name == model.main_input_name
    assert module.can_generate() is True
    assert module.training is False
    with pytest.raises(AttributeError, match="neither the compiled module nor LlamaForCausalLM"):
        module.no_such_thing
