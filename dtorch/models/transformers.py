"""Models of the transformers library: presets, and `generate()` unchanged around the compiled forward.

In: a `PreTrainedModel`. Out: its tensor-parallel styles, and on the compiled module `generate` (the library's own
loop on the host, with a cache that lives on the devices) and `make_cache` for loops of one's own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from dtorch.capture.structure import OBJECT, register_container
from dtorch.errors import InputError
from dtorch.models.device_cache import DeviceCache, supports
from dtorch.models.plain import Adapter
from dtorch.torch_private import tensor_stores, unshare_stores


class TransformersAdapter(Adapter):
    """What compiling a `PreTrainedModel` needs besides compiling."""

    def styles(self, model: torch.nn.Module) -> Mapping[str, str]:
        """The plan that the model declares (`base_model_tp_plan` with the head's own `_tp_plan`), fully prefixed."""
        declared = getattr(model, "_tp_plan", None)
        if declared:
            return dict(declared)
        plan = getattr(model.config, "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        inside = prefix and hasattr(model, prefix)
        return {f"{prefix}.{name}" if inside else name: style for name, style in plan.items()}

    def fill_buffers(self, model: torch.nn.Module, entries: Sequence[Any]) -> None:
        """Compute buffers that no file holds (rotary frequencies, position ids) the way the library does."""
        missing = {entry.names[0]: entry for entry in entries if entry.host is None and not entry.persistent}
        if not missing:
            return
        modules = {name.rpartition(".")[0] for name in missing}
        for path in modules:
            module = copy.copy(model.get_submodule(path))
            unshare_stores(module)
            _, buffers = tensor_stores(module)
            buffers.update(
                {name: torch.empty_like(buffer, device="cpu") for name, buffer in buffers.items() if buffer is not None}
            )
            with torch.no_grad():
                model._init_weights(module)
            for name, buffer in buffers.items():
                entry = missing.get(f"{path}.{name}" if path else name)
                if entry is not None and buffer is not None:
                    entry.host = buffer.to(entry.dtype)

    def attach(self, compiled: Any) -> None:
        """Give the compiled module `generate` and `make_cache`."""
        host = compiled.host_module
        if not hasattr(host, "generate"):
            return
        shell = _shell(compiled, host)
        compiled.__dict__["generate"] = shell.generate
        compiled.__dict__["generation_config"] = host.generation_config
        compiled.__dict__["make_cache"] = lambda max_length: make_cache(host, max_length)


def make_cache(model: PreTrainedModel, max_length: int) -> DeviceCache:
    """A cache for `max_length` tokens that lives on the devices; pass it as the model's cache argument."""
    if not supports(model.config):
        raise InputError(
            f"{type(model).__name__} has layers that need another cache than full attention: pass the library's own "
            "cache instead."
        )
    return DeviceCache(model.config, max_length)


def _shell(compiled: Any, host: PreTrainedModel) -> PreTrainedModel:
    """A stand-in for the model whose forward is the compiled one: what `generate` drives."""
    shell = copy.copy(host)
    unshare_stores(shell)  # without the model's own hooks, which are in the compiled graph

    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    signature = inspect.signature(host.forward)
    forward.__signature__ = signature  # type: ignore[attr-defined]
    shell.forward = forward
    shell.get_compiled_call = lambda config: shell.__call__
    original = shell._prepare_cache_for_generation

    def prepare(generation_config: Any, model_kwargs: dict, *rest: Any, **named: Any) -> Any:
        key = "cache" if "cache" in signature.parameters else "past_key_values"
        length = named.get("max_cache_length", rest[-1] if rest else None)
        wanted = generation_config.cache_implementation in (None, "dynamic", "static")
        if (
            wanted
            and model_kwargs.get(key) is None
            and generation_config.use_cache is not False
            and not host.config.is_encoder_decoder
            and not generation_config.is_assistant
            and isinstance(length, int)
            and shell._supports_default_dynamic_cache()
            and supports(host.config)
        ):
            if generation_config.max_cache_len is not None and generation_config.cache_implementation == "static":
                length = max(length, generation_config.max_cache_len)
            model_kwargs[key] = DeviceCache(host.config, length)
            return None
        return original(generation_config, model_kwargs, *rest, **named)

    shell._prepare_cache_for_generation = prepare
    if host.config.is_encoder_decoder:
        encoder = _compiled_encoder(compiled, host)
        shell.get_encoder = lambda *args, **kwargs: encoder
    return shell


def _compiled_encoder(compiled: Any, host: PreTrainedModel) -> Any:
    """The encoder as a compiled module of its own on the same weights: `generate` calls it once, by itself."""
    encoder = host.get_encoder()
    path = next(name for name, module in host.named_modules() if module is encoder)
    part = compiled.part(path)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return type(part).forward(part, *args, **kwargs)

    forward.__signature__ = inspect.signature(encoder.forward)  # type: ignore[attr-defined]
    part.__dict__["forward"] = forward
    return part


# The library's own caches: taken apart even while they hold no tensor, since the forward is going to fill them.
register_container(Cache, OBJECT.flatten, OBJECT.unflatten)
register_container(CacheLayerMixin, OBJECT.flatten, OBJECT.unflatten)
