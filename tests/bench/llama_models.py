"""The Llama-shaped models that benchmarks share."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch


def llama(layers: int, hidden: int = 256, heads: int = 8) -> torch.nn.Module:
    """A random Llama in eval mode, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def token_ids(length: int = 16) -> torch.Tensor:
    """Ids of shape (1, length)."""
    return torch.randint(2, 64, (1, length), generator=torch.Generator().manual_seed(0))
