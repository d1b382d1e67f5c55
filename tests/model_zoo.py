"""Tiny random models of the families that DTorch must serve, seeded: for the tests of every stage.

In: a name and a dtype. Out: `(model in eval mode, args, kwargs)`; `ZOO` maps names to the functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

Example = tuple[nn.Module, tuple, dict[str, Any]]

VOCABULARY, HIDDEN, LAYERS = 128, 64, 2


def token_ids(batch: int = 2, length: int = 16, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Seeded ids of shape (batch, length)."""
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randint(0, vocabulary, (batch, length), generator=generator)


def noise(*shape: int) -> torch.Tensor:
    """Seeded normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ready(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Seeded values in every weight (library initialisers leave biases and norms at 0 and 1), in `dtype`, eval mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def mlp(dtype: torch.dtype = torch.float32) -> Example:
    """Linear, GELU, linear on (4, 7, 64)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
    return _ready(model, dtype), (noise(4, 7, HIDDEN).to(dtype),), {}


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=2)
        self.group = nn.GroupNorm(4, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Scores (batch, 10) of an image (batch, 3, height, width)."""
        hidden = torch.relu(self.norm(self.stem(image)))
        hidden = nn.functional.max_pool2d(hidden, 2)
        hidden = nn.functional.silu(self.group(self.down(hidden)))
        return self.head(hidden.mean((2, 3)).flatten(1))


def cnn(dtype: torch.dtype = torch.float32) -> Example:
    """Convolutions, batch and group norm, pooling and a head on (2, 3, 16, 16)."""
    torch.manual_seed(0)
    model = _ready(_Convolutions(), dtype)
    with torch.no_grad():
        model.norm.running_mean.normal_(generator=torch.Generator().manual_seed(1))
    return model, (noise(2, 3, 16, 16).to(dtype),), {}


def decoder_config(**changes: Any) -> dict[str, Any]:
    """Configuration of a tiny decoder: hidden 64, 2 layers, 4 heads, 2 KV heads, vocabulary 128."""
    config = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return config | changes


def _language_model(cls: Any, config: Any, dtype: torch.dtype, **kwargs: Any) -> Example:
    torch.manual_seed(0)
    return _ready(cls(config), dtype), (), dict(input_ids=token_ids(), use_cache=False) | kwargs


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> Example:
    """Llama with grouped KV heads, untied head; `changes` go to the configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _language_model(LlamaForCausalLM, LlamaConfig(**decoder_config(**changes)), dtype)


def llama_multi_head(dtype: torch.dtype = torch.float32) -> Example:
    """Llama with as many KV heads as heads."""
    return llama(dtype, num_key_value_heads=4)


def llama_tied(dtype: torch.dtype = torch.float32) -> Example:
    """Llama whose head is the embedding."""
    return llama(dtype, tie_word_embeddings=True)


def llama_cached(dtype: torch.dtype = torch.float32) -> Example:
    """Llama that returns its cache."""
    model, args, kwargs = llama(dtype)
    return model, args, kwargs | dict(use_cache=True)


def qwen3(dtype: torch.dtype = torch.float32) -> Example:
    """Qwen3: norms on queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _language_model(Qwen3ForCausalLM, Qwen3Config(**decoder_config(head_dim=16)), dtype)


def qwen3_moe(dtype: torch.dtype = torch.float32) -> Example:
    """Qwen3 with 4 experts, 2 for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **decoder_config(head_dim=16), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=HIDDEN
    )
    return _language_model(Qwen3MoeForCausalLM, config, dtype)


def mixtral(dtype: torch.dtype = torch.float32) -> Example:
    """Mixtral with 4 experts, 2 for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**decoder_config(), num_local_experts=4, num_experts_per_tok=2)
    return _language_model(MixtralForCausalLM, config, dtype)


def gpt2(dtype: torch.dtype = torch.float32) -> Example:
    """GPT-2: learned positions, fused QKV, tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=1
    )
    return _language_model(GPT2LMHeadModel, config, dtype)


def t5_encoder(dtype: torch.dtype = torch.float32) -> Example:
    """T5's encoder: relative positions, gated GELU."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=2 * HIDDEN,
        num_layers=LAYERS,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return _ready(T5EncoderModel(config), dtype), (), dict(input_ids=token_ids())


def clip_text(dtype: torch.dtype = torch.float32) -> Example:
    """CLIP's text model: causal encoder, pooled at the end token."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=127,
    )
    return _ready(CLIPTextModel(config), dtype), (), dict(input_ids=token_ids())


ZOO: dict[str, Callable[..., Example]] = {
    "mlp": mlp,
    "cnn": cnn,
    "llama": llama,
    "llama_multi_head": llama_multi_head,
    "llama_tied": llama_tied,
    "llama_cached": llama_cached,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "t5_encoder": t5_encoder,
    "clip_text": clip_text,
}
