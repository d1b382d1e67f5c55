"""Compiled modules on virtual devices of one CUDA card, against the same model in eager mode on that card."""

from __future__ import annotations

import pytest
import torch
from model_zoo import ZOO

import dtorch
from dtorch.capture.structure import flatten

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

MESHES = ((1,), (2,), (2, 2))


def on_card(value: object) -> object:
    """Tensors of arguments moved to the card."""
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "cnn", "llama", "gpt2", "mixtral", "t5_encoder", "clip_text"])
def test_results_equal_eager_on_the_card(name: str, mesh_shape: tuple[int, ...]) -> None:
    model, args, kwargs = ZOO[name](torch.float32)
    model = model.cuda()
    args = tuple(on_card(value) for value in args)
    kwargs = {key: on_card(value) for key, value in kwargs.items()}
    with torch.no_grad():
        expected = flatten(model(*args, **kwargs)).leaves
    with dtorch.options.override(same_device=True, virtual_devices=8):
        mesh = dtorch.init_device_mesh("cuda", mesh_shape, mesh_dim_names=("dp", "tp")[-len(mesh_shape) :])
        results = flatten(dtorch.compile(model, mesh)(*args, **kwargs)).leaves
    for result, wanted in zip(results, expected, strict=True):
        assert result.device.type == "cuda"
        if mesh_shape == (1,):
            assert torch.equal(result, wanted)
        else:
            torch.testing.assert_close(result, wanted, rtol=2e-4, atol=2e-5)


def test_generate_on_the_card() -> None:
    model, _, _ = ZOO["llama"](torch.float32)
    model = model.cuda()
    ids = torch.randint(1, 90, (2, 7), device="cuda")
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    expected = model.generate(ids, cache_implementation="static", **settings)
    with dtorch.options.override(same_device=True, virtual_devices=8):
        compiled = dtorch.compile(model, dtorch.init_device_mesh("cuda", (2,), mesh_dim_names=["tp"]))
        assert torch.equal(compiled.generate(ids, **settings), expected)
