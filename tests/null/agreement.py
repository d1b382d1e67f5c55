"""How results of a compiled module are held against eager's: meshes by shape, all tensors of a result, tolerances.

In: results of any class the models give. Out: assertion errors that name the tensor which is too far away.
"""

from __future__ import annotations

from typing import Any

import torch

import dtorch

AXES = {1: ("tp",), 2: ("dp", "tp"), 3: ("dp", "tp", "cp")}
OF_LARGEST = {torch.float32: 2e-5, torch.float64: 1e-12}
EAGER_DISTANCES = 1.5


def mesh_of(*shape: int, names: tuple[str, ...] | None = ()) -> dtorch.DeviceMesh:
    """A cpu mesh with the usual axis names for its number of axes, `names`, or none (None)."""
    return dtorch.init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)] if names == () else names)


def tensors_in(result: Any, path: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a result by path: containers, model outputs, caches."""
    if isinstance(result, torch.Tensor):
        return {path: result}
    if hasattr(result, "layers") and hasattr(result, "get_seq_length"):
        result = {f"layer{i}": (layer.keys, layer.values) for i, layer in enumerate(result.layers)}
    if isinstance(result, dict):
        items = list(result.items())
    elif isinstance(result, (tuple, list)):
        items = list(enumerate(result))
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, child in items:
        found.update(tensors_in(child, f"{path}.{key}" if path else str(key)))
    return found


def classes_in(result: Any) -> Any:
    """The classes of a result and of what it holds, keys included; a parameter comes out as a tensor."""
    if isinstance(result, dict):
        return type(result), [(key, classes_in(child)) for key, child in result.items()]
    if isinstance(result, (tuple, list)):
        return type(result), [classes_in(child) for child in result]
    return torch.Tensor if isinstance(result, torch.nn.Parameter) else type(result)


def assert_same_bits(result: Any, expected: Any) -> None:
    """Same classes, dtypes, shapes and bits."""
    assert classes_in(result) == classes_in(expected)
    given, wanted = tensors_in(result), tensors_in(expected)
    assert given.keys() == wanted.keys()
    for path, want in wanted.items():
        assert given[path].dtype == want.dtype and given[path].shape == want.shape, path
        assert torch.equal(given[path], want), f"{path}: {farthest(given[path], want):.3g} away at most"


def assert_near(result: Any, expected: Any, of_largest: float | None = None) -> None:
    """Same classes, dtypes and shapes; values within the tolerance of the dtype times the largest magnitude."""
    assert classes_in(result) == classes_in(expected)
    given, wanted = tensors_in(result), tensors_in(expected)
    assert given.keys() == wanted.keys()
    for path, want in wanted.items():
        have = given[path]
        assert have.dtype == want.dtype and have.shape == want.shape, (path, have.dtype, have.shape)
        if not want.is_floating_point() or want.numel() == 0:
            assert torch.equal(have, want), path
            continue
        bound = (of_largest or OF_LARGEST[want.dtype]) * float(want.abs().max())
        assert farthest(have, want) <= bound, f"{path}: {farthest(have, want):.3g} away, at most {bound:.3g} allowed"


def assert_as_near_as_eager(result: Any, eager: Any, exact: Any) -> None:
    """Low precision: no output farther from the float64 result than 1.5 times eager's own distance (mean square)."""
    assert classes_in(result) == classes_in(eager)
    given, wanted, true = tensors_in(result), tensors_in(eager), tensors_in(exact)
    assert given.keys() == wanted.keys() == true.keys()
    for path, want in wanted.items():
        have = given[path]
        assert have.dtype == want.dtype and have.shape == want.shape, path
        own, bound = _rms(have, true[path]), EAGER_DISTANCES * _rms(want, true[path])
        assert own <= bound, f"{path}: {own:.3g} from the float64 result, at most {bound:.3g} allowed"


def farthest(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors; infinity where one is NaN."""
    if one.numel() == 0:
        return 0.0
    difference = (one.double() - other.double()).abs()
    return float("inf") if bool(difference.isnan().any()) else float(difference.max())


def _rms(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).square().mean().sqrt())
