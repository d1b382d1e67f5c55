"""`distribute_module`: the parameters and buffers of an ordinary module become distributed tensors, in place.

In: a torch.nn.Module, a mesh, placements by glob over parameter names. Out: the same module, which runs eagerly on the
mesh. Its state_dict gathers full torch tensors and its load_state_dict cuts them: hooks of torch.nn.Module do both.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from dtorch import torch_private
from dtorch.capture.symbol import Tensor
from dtorch.errors import InputError, MeshError, PlacementError
from dtorch.factories import from_torch
from dtorch.ir.layout import WHOLE, Spec
from dtorch.ir.spec import from_spec
from dtorch.mesh import DeviceMesh
from dtorch.sharding.presets import user_asks

Module = TypeVar("Module", bound=torch.nn.Module)


def distribute_module(module: Module, mesh: DeviceMesh, placements: Mapping[str, Any] | None = None) -> Module:
    """Replace a module's parameters and buffers by distributed tensors and return it.

    The module's code is not touched: call it with distributed or plain tensors. Tied parameters stay tied.
    `state_dict()` gives full torch tensors and `load_state_dict()` takes them, each device getting its part; the same
    holds for every submodule. (`state_dict(keep_vars=True)` gives the distributed parameters themselves.)

    Args:
        module: any torch.nn.Module, on the host or distributed already.
        mesh: where its tensors go.
        placements: by glob over names of parameters and buffers, placements as `dtorch.compile` takes them:
            `{"**.q_proj.weight": {"tp": Shard(0)}}`. All others are replicated.

    Raises:
        PlacementError: a pattern that matches nothing, placements that do not fit, tied names that are asked to lie
            differently. InputError: a parameter on the meta device. MeshError: `mesh` is no DeviceMesh.
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"distribute_module takes a torch.nn.Module, not {type(module).__name__}.")
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"distribute_module takes a dtorch.DeviceMesh, not {type(mesh).__name__}: dtorch.init_device_mesh('cpu', "
            "(2,), mesh_dim_names=['tp'])."
        )
    tensors = _named_tensors(module)
    _check_values(tensors)
    specs = _specs(tensors, mesh, placements)
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for store in torch_private.tensor_stores(part):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _placed(tensor, mesh, specs[id(tensor)])
                store[name] = made[id(tensor)]
        _add_hooks(part)
    return module


def _named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


def _check_values(tensors: Mapping[str, torch.Tensor]) -> None:
    without = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if without:
        more = " ..." if len(without) > 6 else ""
        raise InputError(
            f"{len(without)} tensors of the module are on the meta device and have no values: "
            f"{', '.join(without[:6])}{more}. Make the module on the CPU, or load its weights with "
            "load_state_dict(..., assign=True) first."
        )


def _specs(tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh, placements: Any) -> dict[int, Spec]:
    """The Spec of each tensor, by its id: all names of a tied one are asked together."""
    ranks: dict[str, int | None] = {name: tensor.dim() for name, tensor in tensors.items()}
    chosen: dict[tuple[int, int], tuple[Any, str]] = {}
    for (name, axis), ask in user_asks(placements, ranks, mesh, "placements").items():
        placed, other = chosen.setdefault((id(tensors[name]), axis), (ask.placed, name))
        if placed != ask.placed:
            raise PlacementError(
                f"placements: {other} and {name} are one tied parameter, and axis {mesh.axis_label(axis)} of "
                f"{mesh.summary} is asked to hold it as {placed} and as {ask.placed}. Ask for one of them."
            )
    return {
        id(tensor): tuple(chosen.get((id(tensor), axis), (WHOLE, ""))[0] for axis in range(mesh.ndim))
        for tensor in tensors.values()
    }


def _placed(tensor: torch.Tensor, mesh: DeviceMesh, spec: Spec) -> Any:
    made = from_torch(tensor.detach(), mesh, from_spec(spec))
    if isinstance(tensor, torch.nn.Parameter):
        torch_private.mark_parameter(made)  # nn.Parameter(made) would record a view of it
    return made.requires_grad_(tensor.requires_grad)


# --- state dicts --------------------------------------------------------------------------------------------------


def _add_hooks(module: torch.nn.Module) -> None:
    if not torch_private.has_state_dict_hook(module, _gather):  # a module distributed again has them already
        module.register_state_dict_post_hook(_gather)
        module.register_load_state_dict_pre_hook(_cut)


_GATHERED: weakref.WeakValueDictionary[tuple[int, int], torch.Tensor] = weakref.WeakValueDictionary()
"""Full tensors by the ids of the state dict being made and of the parameter: tied names share one, as in torch."""


def _own_tensors(module: torch.nn.Module) -> dict[str, Any]:
    """The distributed tensors that a module itself holds, not its children."""
    parameters, buffers = torch_private.tensor_stores(module)
    held = {**parameters, **buffers}
    return {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}


def _gather(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """After a module has written its entries: full torch tensors in place of distributed ones."""
    for name, tensor in _own_tensors(module).items():
        found = state_dict.get(prefix + name)
        if not isinstance(found, Tensor) or found is tensor:  # not saved, or kept with keep_vars=True
            continue
        key = (id(state_dict), id(tensor))
        full = _GATHERED.get(key)
        if full is None or not any(each is full for each in state_dict.values()):  # an id may have had another life
            full = _GATHERED[key] = tensor.to_torch().detach()
        state_dict[prefix + name] = full


def _cut(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module reads its entries: full tensors placed as its own are, so that a device is sent its part."""
    for name, tensor in _own_tensors(module).items():
        given = state_dict.get(prefix + name)
        if isinstance(given, torch.Tensor) and given.shape == tensor.shape and given.device.type != "meta":
            state_dict[prefix + name] = from_torch(given.detach(), tensor.device_mesh, tensor.placements)
