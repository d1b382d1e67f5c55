"""What placement choice comes to: how many collectives a model costs, and that what a user asks for is honoured.

In: models without hints, with the presets of transformers, with pins. Out: collectives of the plan, placements of
weights, sizes of the parts on each device, and eager's results.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from model_zoo import gpt2, llama, mlp, noise, qwen3, token_ids
from null.agreement import assert_near, mesh_of
from torch import nn

import dtorch
from dtorch import Replicate, Shard
from dtorch.ir.spec import from_spec

NO_NAMES = None


def collectives(compiled: Any) -> Counter[str]:
    """Collectives of the plan last used, waits apart."""
    names = [each.kernel.split(".")[1] for each in compiled.plan().instructions if each.kernel.startswith("_c10d_")]
    return Counter(name for name in names if name != "wait_tensor")


def parts(compiled: Any, name: str) -> list[tuple[int, ...]]:
    """Shapes of a weight's distinct parts, in the order of the devices."""
    data = compiled._build.weights.by_name[name].remote.data
    return [tuple(part.shape) for part in data] if isinstance(data, list) else [tuple(data.shape)]


class PlainLayer(nn.Module):
    """A Llama layer written by hand: norms, grouped rotary attention, gated MLP. No library's names, no hints."""

    def __init__(self, width: int = 64, heads: int = 4, kv_heads: int = 4, inner: int = 128) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.before = nn.RMSNorm(width)
        self.queries = nn.Linear(width, heads * self.size, bias=False)
        self.keys = nn.Linear(width, kv_heads * self.size, bias=False)
        self.values = nn.Linear(width, kv_heads * self.size, bias=False)
        self.joined = nn.Linear(heads * self.size, width, bias=False)
        self.between = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) → the same."""
        batch, length, _ = x.shape
        normed = self.before(x)
        q = self.queries(normed).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.keys(normed).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.values(normed).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        angles = torch.outer(torch.arange(length), 0.1 ** torch.arange(self.size // 2))
        q, k = _rotated(q, angles), _rotated(k, angles)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.joined(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.between(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()), -1)


def run_against_eager(model: nn.Module, mesh: Any, *args: Any, **options: Any) -> Any:
    """The compiled module after one call that agreed with eager."""
    compiled = dtorch.compile(model.eval(), mesh, **options)
    with torch.no_grad():
        assert_near(compiled(*args), model(*args))
    return compiled


# --- without hints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("tp",), NO_NAMES], ids=["named", "unnamed"])
@pytest.mark.parametrize("count", [2, 4])
def test_an_mlp_without_hints_is_one_all_reduce(count: int, names: Any) -> None:
    model, args, _ = mlp()
    compiled = run_against_eager(model, mesh_of(count, names=names), *args)
    assert collectives(compiled) == {"all_reduce": 1}
    placed = compiled.placements()
    assert placed["0.weight"] == (Shard(0),) and placed["0.bias"] == (Shard(0),)
    assert placed["2.weight"] == (Shard(1),) and placed["2.bias"] == (Replicate(),)


@pytest.mark.parametrize("names", [("tp",), NO_NAMES], ids=["named", "unnamed"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_plain_llama_layer_is_two_all_reduces(layers: int, count: int, names: Any) -> None:
    model = nn.Sequential(*[PlainLayer() for _ in range(layers)])
    compiled = run_against_eager(model, mesh_of(count, names=names), noise(2, 16, 64))
    assert collectives(compiled) == {"all_reduce": 2 * layers}


@pytest.mark.parametrize("shape", [(432,), (12, 36), (4, 9, 12)], ids=str)
def test_hundreds_of_devices_are_no_matter(shape: tuple[int, ...]) -> None:
    model, args, kwargs = llama()
    compiled = dtorch.compile(model, mesh_of(*shape), placements={"lm_head.weight": {"tp": Shard(0)}})
    with torch.no_grad():
        assert_near(compiled(*args, **kwargs), model(*args, **kwargs))
    held = parts(compiled, "lm_head.weight")
    assert len(held) >= 9 and sum(rows * columns for rows, columns in held) == model.lm_head.weight.numel()


def test_the_data_axis_costs_no_collective() -> None:
    compiled = run_against_eager(PlainLayer(), mesh_of(2, 2), noise(4, 16, 64))
    assert collectives(compiled) == {"all_reduce": 2}
    assert all(placed[0] == Replicate() for placed in compiled.placements().values())


# --- presets of transformers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "count"),
    [(llama(), 2), (llama(num_key_value_heads=4), 2), (llama(num_key_value_heads=4), 4), (qwen3(), 2)],
    ids=["llama-gqa-2", "llama-2", "llama-4", "qwen3-2"],
)
def test_a_decoder_with_its_preset_is_two_all_reduces_a_layer_and_one_for_the_embedding(model: Any, count: int) -> None:
    model, _, kwargs = model
    compiled = dtorch.compile(model, mesh_of(count))
    compiled(**kwargs)
    assert collectives(compiled)["all_reduce"] == 2 * model.config.num_hidden_layers + 1
    assert sum(collectives(compiled).values()) <= 2 * model.config.num_hidden_layers + 2


def test_the_preset_cuts_what_the_model_says() -> None:
    model, _, kwargs = llama()
    compiled = dtorch.compile(model, mesh_of(2))
    compiled(**kwargs)
    placed = compiled.placements()
    for layer in range(model.config.num_hidden_layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            assert placed[f"model.layers.{layer}.{name}.weight"] == (Shard(0),), name
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert placed[f"model.layers.{layer}.{name}.weight"] == (Shard(1),), name
        assert placed[f"model.layers.{layer}.input_layernorm.weight"] == (Replicate(),)


def test_nine_heads_on_two_devices_are_five_and_four() -> None:
    model, _, kwargs = llama(num_attention_heads=9, num_key_value_heads=3, hidden_size=72, head_dim=8)
    compiled = dtorch.compile(model, mesh_of(2))
    with torch.no_grad():
        assert_near(compiled(**kwargs), model(**kwargs))
    # Three groups of three query heads and one KV head each: two groups and one.
    assert parts(compiled, "model.layers.0.self_attn.q_proj.weight") == [(48, 72), (24, 72)]
    assert parts(compiled, "model.layers.0.self_attn.k_proj.weight") == [(16, 72), (8, 72)]
    model, _, kwargs = llama(num_attention_heads=9, num_key_value_heads=9, hidden_size=72, head_dim=8)
    compiled = dtorch.compile(model, mesh_of(2))
    with torch.no_grad():
        assert_near(compiled(**kwargs), model(**kwargs))
    assert parts(compiled, "model.layers.0.self_attn.q_proj.weight") == [(40, 72), (32, 72)]
    assert parts(compiled, "model.layers.0.self_attn.o_proj.weight") == [(72, 40), (72, 32)]


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_kv_heads_fewer_than_the_axis(kv_heads: int, count: int) -> None:
    model, _, kwargs = llama(num_attention_heads=8, num_key_value_heads=kv_heads)
    compiled = dtorch.compile(model, mesh_of(count))
    with torch.no_grad():
        assert_near(compiled(**kwargs), model(**kwargs))


# --- what a user asks for --------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Two linears with biases behind an embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 6, inner: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, width)
        self.first = nn.Linear(width, inner)
        self.second = nn.Linear(inner, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (batch, length) → (batch, length, width)."""
        return self.second(torch.tanh(self.first(self.embed(ids))))


IDS = token_ids(3, 5, 11)


@pytest.mark.parametrize(
    "placements",
    [
        {"first.weight": {"tp": Shard(0)}, "second.weight": {"tp": Shard(1)}},
        {"first.weight": {"tp": Shard(1)}, "first.bias": {"tp": Replicate()}},
        {"first.weight": {"tp": Shard(0)}, "first.bias": {"tp": Shard(0)}, "second.bias": {"tp": Shard(0)}},
        {"first.weight": [Shard(-1)], "second.weight": (Shard(-2),)},
        {"embed.weight": {"tp": Shard(0)}},
        {"embed.weight": {"tp": Shard(1)}},
        {"*.weight": {"tp": Replicate()}, "*.bias": {"tp": Replicate()}},
        {"*.weight": {"tp": Shard(1)}},
        {"**.weight": {"tp": Shard(0)}},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_pins_are_honoured_and_biases_added_once(placements: Any, count: int) -> None:
    model = Layers()
    compiled = run_against_eager(model, mesh_of(count), IDS, placements=placements)
    for pattern, asked in placements.items():
        dims = [asked["tp"]] if isinstance(asked, dict) else list(asked)
        for name, placed in compiled.placements().items():
            if name == pattern or (pattern[0] == "*" and name.endswith(pattern[1:])):
                rank = len(compiled._build.weights.by_name[name].shape)
                want = [Shard(each.dim % rank) if type(each) is Shard else each for each in dims]
                assert list(placed) == want, name


def test_a_vocabulary_cut_unevenly_holds_each_row_once() -> None:
    compiled = run_against_eager(Layers(), mesh_of(4), IDS, placements={"embed.weight": {"tp": Shard(0)}})
    assert parts(compiled, "embed.weight") == [(3, 6), (3, 6), (3, 6), (2, 6)]
    assert collectives(compiled)["all_reduce"] + collectives(compiled)["reduce_scatter_tensor"] >= 1


def test_a_pin_beats_the_models_preset() -> None:
    model, _, kwargs = llama()
    name = "model.layers.0.mlp.up_proj.weight"
    compiled = dtorch.compile(model, mesh_of(2), placements={name: {"tp": Shard(1)}})
    with torch.no_grad():
        assert_near(compiled(**kwargs), model(**kwargs))
    assert compiled.placements()[name] == (Shard(1),)
    assert compiled.placements()["model.layers.1.mlp.up_proj.weight"] == (Shard(0),)


@pytest.mark.parametrize("asked", [{"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Replicate()}, [Shard(0)]], ids=str)
@pytest.mark.parametrize("count", [2, 4])
def test_inputs_are_placed_as_asked(asked: Any, count: int) -> None:
    compiled = run_against_eager(Layers(), mesh_of(count), IDS, inputs={"ids": asked})
    (given,) = [item for item in compiled.plan().inputs if item.kind == "user"]
    want = asked["tp"] if isinstance(asked, dict) else asked[0]
    assert from_spec(given.spec) == (want,)


def test_an_input_can_be_cut_over_two_axes() -> None:
    compiled = run_against_eager(
        Layers(), mesh_of(2, 2), IDS, inputs={"ids": {"dp": Shard(0), "tp": Shard(1)}}
    )
    (given,) = [item for item in compiled.plan().inputs if item.kind == "user"]
    assert from_spec(given.spec) == (Shard(0), Shard(1))


def test_a_tied_embedding_and_head_are_stored_once() -> None:
    model, _, kwargs = llama(tie_word_embeddings=True)
    compiled = dtorch.compile(model, mesh_of(2))
    with torch.no_grad():
        assert_near(compiled(**kwargs), model(**kwargs))
    store = compiled._build.weights
    assert store.by_name["lm_head.weight"] is store.by_name["model.embed_tokens.weight"]
    weights = [item.target for item in compiled.plan().inputs if item.kind == "weight"]
    assert len(weights) == len(set(weights)) == len(list(model.parameters()))
    held = sum(rows * columns for rows, columns in parts(compiled, "lm_head.weight"))
    assert held == model.config.vocab_size * model.config.hidden_size


def test_gpt2_keeps_its_tie_and_agrees() -> None:
    model, _, kwargs = gpt2()
    compiled = dtorch.compile(model, mesh_of(3))
    with torch.no_grad():
        assert_near(compiled(**kwargs), model(**kwargs))
    store = compiled._build.weights
    assert store.by_name["lm_head.weight"] is store.by_name["transformer.wte.weight"]


@pytest.mark.parametrize("index", [30, -1])
def test_an_index_outside_a_cut_vocabulary_fails_as_on_one_device(index: int) -> None:
    model = nn.Embedding(30, 8)
    compiled = dtorch.compile(model, mesh_of(4), placements={"weight": {"tp": Shard(0)}})
    with pytest.raises(IndexError):
        model(torch.tensor([1, index]))
    with pytest.raises(IndexError):
        compiled(torch.tensor([1, index]))
    assert torch.equal(compiled(torch.tensor([1, 29])), model(torch.tensor([1, 29])))


@pytest.mark.parametrize("number", [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 0, 2.5])
def test_numbers_that_make_something_of_zeros_need_the_sum_first(number):
    plain = torch.tensor([[1.0, -2.0, 0.0]])
    partial = dtorch.distribute_tensor(plain, dtorch.init_device_mesh("cpu", (2,)), [dtorch.Partial()])
    for _ in range(3):
        for function in (torch.mul, torch.div, torch.Tensor.__rmul__):
            for given in (1.5, number, 3.5):  # in the place of a number that changes, too
                got, want = function(partial, given).to_torch(), function(plain, given)
                torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)
