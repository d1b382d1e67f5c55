"""Every model of the zoo on every mesh and dtype, against eager.

In: `model_zoo.ZOO`. Out: `(1,)` gives eager's bits; other meshes stay within the tolerances of `agreement`.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from model_zoo import ZOO
from null.agreement import assert_as_near_as_eager, assert_near, assert_same_bits, mesh_of
from torch.overrides import TorchFunctionMode

import dtorch

SHAPES = [(2,), (3,), (4,), (2, 2), (2, 2, 2)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class Throughout64(TorchFunctionMode):
    """What a model computes in float32 whatever its dtype (norms, routers, T5's softmax) is computed in float64.

    Without it a float64 model is only as exact as its float32 parts, on one device as on many.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "float" and isinstance(args[0], torch.Tensor):
            return args[0].double()
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        named = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return function(*args, **named)


def surroundings(dtype: torch.dtype) -> Any:
    return Throughout64() if dtype == torch.float64 else nullcontext()


@cache
def example(name: str, dtype: torch.dtype) -> tuple:
    """Model, arguments, eager's result, and for bfloat16 the float64 result of the same weights and inputs."""
    model, args, kwargs = ZOO[name](dtype)
    if dtype == torch.float64:
        _without_grouped_mm(model)
    if dtype == torch.bfloat16:
        _without_choices(model)
    exact = None
    with torch.no_grad():
        with surroundings(dtype):
            eager = model(*args, **kwargs)
        if dtype == torch.bfloat16:
            twin = _without_grouped_mm(copy.deepcopy(model).double())
            with Throughout64():
                exact = twin(*[_double(each) for each in args], **kwargs)
    return model, args, kwargs, eager, exact


def _without_choices(model: torch.nn.Module) -> None:
    """Every token goes to all experts: a near tie that rounding decides otherwise is no matter of distance."""
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = model.config.num_local_experts


def _without_grouped_mm(model: torch.nn.Module) -> torch.nn.Module:
    """torch's grouped matrix product takes no float64: transformers has another way to run experts."""
    if hasattr(getattr(model, "config", None), "num_experts_per_tok"):
        model.set_experts_implementation("batched_mm")
    return model


def _double(item: Any) -> Any:
    return item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=_named)
@pytest.mark.parametrize("name", ZOO)
def test_one_device_gives_eagers_bits(name: str, dtype: torch.dtype) -> None:
    model, args, kwargs, eager, _ = example(name, dtype)
    with surroundings(dtype):
        assert_same_bits(dtorch.compile(model, mesh_of(1))(*args, **kwargs), eager)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=_named)
@pytest.mark.parametrize("name", ZOO)
def test_a_mesh_gives_eagers_result(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model, args, kwargs, eager, exact = example(name, dtype)
    with surroundings(dtype):
        result = dtorch.compile(model, mesh_of(*shape))(*args, **kwargs)
    if exact is None:
        assert_near(result, eager)
    else:
        assert_as_near_as_eager(result, eager, exact)


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_axes_without_names_give_eagers_result(name: str, shape: tuple[int, ...]) -> None:
    model, args, kwargs, eager, _ = example(name, torch.float64)
    with Throughout64():
        result = dtorch.compile(model, mesh_of(*shape, names=None))(*args, **kwargs)
    assert_near(result, eager)
    if shape == (1,):
        assert_same_bits(result, eager)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "cnn"])
def test_the_second_call_replays_the_same_program(name: str) -> None:
    model, args, kwargs, eager, _ = example(name, torch.float32)
    compiled = dtorch.compile(model, mesh_of(2))
    first = compiled(*args, **kwargs)
    assert_same_bits(compiled(*args, **kwargs), first)
    assert compiled.cache_info()["captures"] == 1 and compiled.cache_info()["hits"] == 1
    assert_near(first, eager)
