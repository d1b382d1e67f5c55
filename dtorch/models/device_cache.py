"""A transformers `Cache` whose keys and values stay on the devices, as donated state of the compiled step.

In: key and value states of each layer. Out: what StaticCache gives: buffers of a fixed length that are written in
place. One length counter serves all layers, so a step has one small host argument whatever the number of layers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, StaticLayer

from dtorch.capture.structure import StateLeaf, register_container
from dtorch.errors import InputError

FULL = "full_attention"


def supports(config: Any) -> bool:
    """Whether every layer of a decoder attends to everything before it (no sliding windows, no linear layers)."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return all(kind == FULL for kind in kinds)
    return getattr(text, "sliding_window", None) is None and getattr(text, "num_hidden_layers", None) is not None


class Progress:
    """How many tokens a cache holds, shared by its layers; `positions` are those being written by this forward."""

    def __init__(self, length: torch.Tensor) -> None:
        self.length = length
        self.positions: torch.Tensor | None = None
        self.written: set[int] = set()

    def advance(self, layer: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """Positions for `count` new tokens of a layer; the first layer of a forward moves the length on."""
        if self.positions is None or layer in self.written:
            self.positions = torch.arange(count, device=like.device) + self.length
            self.length.add_(count)
            self.written.clear()
        self.written.add(layer)
        return self.positions


class DeviceLayer(StaticLayer):
    """Keys and values of one layer, shape (batch, heads, max_cache_len, head_dim)."""

    _layer_type = None  # transformers must not list this class among its own layer types

    def __init__(self, max_cache_len: int, index: int, progress: Progress) -> None:
        super().__init__(max_cache_len)
        self.index, self.progress = index, progress

    @property
    def cumulative_length(self) -> torch.Tensor:
        """The number of tokens held, a scalar int64 tensor on the host."""
        return self.progress.length

    @cumulative_length.setter
    def cumulative_length(self, value: torch.Tensor) -> None:
        pass  # StaticLayer's constructor sets one of its own; the shared one stands

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the buffers, in the step that first needs them."""
        batch, heads = key_states.shape[:2]
        self.device = key_states.device
        self.keys = key_states.new_zeros((batch, heads, self.max_cache_len, key_states.shape[-1]))
        self.values = value_states.new_zeros((batch, heads, self.max_cache_len, value_states.shape[-1]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new states behind those there; gives the whole buffers."""
        if key_states.shape[-2] > self.max_cache_len:
            raise InputError(
                f"{key_states.shape[-2]} tokens do not fit in a cache made for {self.max_cache_len}: make_cache takes "
                "the length of the prompt and of all tokens to come."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions = self.progress.advance(self.index, key_states.shape[-2], key_states)
        self.keys.index_copy_(2, positions, key_states)
        self.values.index_copy_(2, positions, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """Tokens held: 0, or the host's counter."""
        return self.progress.length if self.is_initialized else 0

    def reset(self) -> None:
        """Forget everything; the buffers are made anew by the next step."""
        self.keys = self.values = None
        self.is_initialized = False

    def _map(self, change: Any) -> None:
        if self.is_initialized:
            self.keys, self.values = _on_host(self.keys, change), _on_host(self.values, change)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the batch, for beam search."""
        self._map(lambda full: full.index_select(0, beam_idx.to(full.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each entry of the batch."""
        self._map(lambda full: full.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some entries of the batch."""
        self._map(lambda full: full[indices, ...])


class DeviceCache(Cache):
    """Serves where StaticCache or DynamicCache would, for models whose layers all use full attention."""

    def __init__(self, config: Any, max_cache_len: int) -> None:
        if max_cache_len < 1:
            raise InputError(f"a cache holds at least one token, not {max_cache_len}")
        text = config.get_text_config(decoder=True)
        self.progress = Progress(torch.zeros((), dtype=torch.long))
        layers = [DeviceLayer(max_cache_len, index, self.progress) for index in range(text.num_hidden_layers)]
        super().__init__(layers=layers)

    @property
    def max_cache_len(self) -> int:
        """How many tokens there is room for."""
        return self.layers[0].max_cache_len

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.progress.length.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; `tokens_to_remove` is negative, as the library has it."""
        if tokens_to_remove > 0:
            raise InputError("crop takes a negative int: how many tokens to remove from the end.")
        self.progress.length.sub_(abs(tokens_to_remove))

    def __deepcopy__(self, memo: dict) -> DeviceCache:
        made = _bare(self.max_cache_len, len(self.layers), self.progress.length.clone())
        for mine, other in zip(made.layers, self.layers):
            if other.is_initialized:
                keep = lambda full: full  # noqa: E731
                _fill(mine, _on_host(other.keys, keep), _on_host(other.values, keep))
        memo[id(self)] = made
        return made


def _bare(max_cache_len: int, count: int, length: torch.Tensor) -> DeviceCache:
    cache = DeviceCache.__new__(DeviceCache)
    cache.progress = Progress(length)
    Cache.__init__(cache, layers=[DeviceLayer(max_cache_len, index, cache.progress) for index in range(count)])
    return cache


def _fill(layer: DeviceLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.keys, layer.values = keys, values
    layer.device = keys.device
    layer.is_initialized = True


def _on_host(tensor: Any, change: Any) -> Any:
    """A device tensor changed on the host and placed again as before."""
    from dtorch.compiled.program import device_tensor

    remote = tensor.remote
    full = change(remote.fetch()).contiguous()
    return device_tensor(remote.runtime.put(full, remote.spec))


def _flatten(cache: DeviceCache) -> tuple[list[Any], Any]:
    children: list[Any] = [cache.progress.length]
    ready = tuple(layer.is_initialized for layer in cache.layers)
    for layer in cache.layers:
        if layer.is_initialized:
            children += [StateLeaf(layer.keys), StateLeaf(layer.values)]
    return children, (cache.max_cache_len, ready)


def _unflatten(children: list[Any], context: Any, original: DeviceCache | None) -> DeviceCache:
    max_cache_len, ready = context
    cache = original if original is not None else _bare(max_cache_len, len(ready), children[0])
    tensors = iter(children[1:])
    for layer, initialized in zip(cache.layers, ready):
        if initialized:
            _fill(layer, next(tensors), next(tensors))
    return cache


register_container(DeviceCache, _flatten, _unflatten)
