"""The entry points: `compile` puts host copy, mesh, runtime, weights, placements and passes together.

In: a model and a mesh. Out: a `CompiledModule`. All parts are joined here and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dtorch.capture.host import make_host
from dtorch.capture.symbol import Tensor
from dtorch.compiled import Build, CompiledModule
from dtorch.compiled.weight_files import assign, read_sources
from dtorch.compiled.weights import WeightStore, release_memory, snapshot
from dtorch.compiler import Settings
from dtorch.errors import InputError, MeshError, UnsupportedError, nearest
from dtorch.mesh import DeviceMesh
from dtorch.models.adapters import adapter_for
from dtorch.options import current
from dtorch.passes.base import NUMERICS, Numerics
from dtorch.passes.pipeline import PassPipeline
from dtorch.runtime.session import SESSION
from dtorch.sharding.presets import style_asks, user_asks

_FOREIGN = {
    "tp_size": "a mesh with an axis named tp",
    "tensor_parallel_size": "a mesh with an axis named tp",
    "pipeline_parallel_size": "a mesh with an axis named pp",
    "ulysses_degree": "a mesh with an axis named ulysses_cp",
    "ring_degree": "a mesh with an axis named ring_cp",
    "plan": "placements=",
    "tp_plan": "placements=",
    "parallelize_plan": "placements=",
    "device_mesh": "mesh (the second argument)",
    "backend": "passes= and mode=",
    "fullgraph": "strict=",
    "dynamic_shapes": "dynamic=",
    "state_dict": "weights=",
}
MODES = ("default",)


def compile(  # noqa: A001  (the name users know from torch)
    model: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    placements: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    weights: Any = None,
    dynamic: bool | None = None,
    mode: str = "default",
    numerics: Numerics | None = None,
    release: bool = False,
    passes: PassPipeline | list[Callable[..., Any]] | None = None,
    strict: bool = False,
    dump: str | Path | None = None,
    check: bool = False,
    **unknown: Any,
) -> CompiledModule:
    """Compile a module for inference on a mesh of devices.

    The model is not changed: the result owns a snapshot of its weights (`release=True` takes the weights over
    instead and leaves the model on the meta device). Capture happens at the first call of each kind, that is for
    new shapes, dtypes or plain arguments; later calls replay the plan.

    Args:
        model: any `torch.nn.Module` in eval mode.
        mesh: where to run; axes named dp cut the batch, tp (and others) the weights.
        placements: by glob over parameter names, placements by mesh axis: `{"**.q_proj.weight": {"tp": Shard(0)}}`;
            `*` stands for (part of) one name between dots, `**` for any number of them.
            They come before what the model says of itself (`config.base_model_tp_plan`).
        inputs: the same for the arguments of forward, by name: `{"input_ids": {"dp": Shard(0)}}`.
        weights: a state dict, or paths of safetensors files or a folder of them; for models built on "meta".
        dynamic: None captures the first call with its sizes, and once more with `torch.export` when a later call
            differs in sizes alone, for all further ones; True does so at the first call; False captures each size.
        numerics: what passes may do: "bitwise", "reassociates" (default) or "approximate".
        release: free the model's own memory.
        passes: a pipeline, or callables on a GraphModule that run at the end of the global level.
        strict: refuse models whose Python code branches on values, instead of keeping a program for each value.
        dump: folder for the graphs after every stage (default: the option `dump`, DTORCH_DUMP).

    Raises:
        InputError, PlacementError, WeightsError, MeshError: arguments that do not fit. CaptureError and
        ShardingError come at the first call, with the user's line.
    """
    _check_arguments(model, mesh, mode, numerics, unknown)
    _check_model(model)
    if dynamic not in (None, True, False):
        raise InputError(f"dynamic={dynamic!r} is not known; there is: None, True, False.")
    if check:
        raise UnsupportedError("compile(check=True) is not there yet: compare with the model's own results for now.")
    if mesh.device_type != "cpu" and mesh.device_type != "cuda":
        raise MeshError(f"compile runs on cpu and cuda meshes, not on {mesh.device_type}.")
    adapter = adapter_for(model)
    host = make_host(model, mesh.device_type)
    runtime = SESSION.runtime(mesh.device_type, mesh.device_ids, mesh.shape)
    entries, order = snapshot(model, release)
    if weights is not None:
        adapter.fill_buffers(model, entries)
        assign(entries, read_sources(weights), copy=not release)
    without = [entry.names[0] for entry in entries if entry.host is None]
    if without:
        raise InputError(
            f"{len(without)} tensors of the model are on the meta device and have no values: {', '.join(without[:6])}"
            f"{' ...' if len(without) > 6 else ''}. Give them with weights=."
        )
    ranks = {name: len(entry.shape) for entry in entries for name in entry.names}
    asks = style_asks(adapter.styles(model), ranks, mesh)
    asks.update(user_asks(placements, ranks, mesh, "placements"))
    asks.update(_input_asks(host.module, inputs, mesh))
    if release:
        release_memory(model)
    folder = dump if dump is not None else current().dump
    build = Build(
        host=host,
        mesh=mesh,
        runtime=runtime,
        weights=WeightStore(runtime, entries, order),
        asks=asks,
        settings=Settings(
            PassPipeline.of(passes),
            numerics or "reassociates",
            dump_directory=Path(folder) if folder is not None else None,
            title=type(model).__name__,
        ),
        strict=strict,
        dump=Path(folder) if folder is not None else None,
        title=type(model).__name__,
        dynamic=dynamic,
    )
    compiled = CompiledModule(build)
    adapter.attach(compiled)
    return compiled


def _check_arguments(model: Any, mesh: Any, mode: str, numerics: Any, unknown: dict[str, Any]) -> None:
    for name in unknown:
        if name in _FOREIGN:
            raise InputError(f"compile has no argument {name!r}: use {_FOREIGN[name]}.")
        close = nearest(name, compile.__kwdefaults__ or ())
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise InputError(f"compile has no argument {name!r}.{hint}")
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"compile takes a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, CompiledModule):
        raise InputError("this module is compiled already: compile the model that it was made from.")
    if not isinstance(mesh, DeviceMesh):
        raise InputError(
            f"compile takes a dtorch.DeviceMesh, not {type(mesh).__name__}: dtorch.init_device_mesh('cpu', (2,), "
            "mesh_dim_names=['tp'])."
        )
    if mode not in MODES:
        raise InputError(f"mode={mode!r} is not known; there is: {', '.join(MODES)}.")
    if numerics is not None and numerics not in NUMERICS:
        raise InputError(f"numerics={numerics!r} is not known; there is: {', '.join(NUMERICS)}.")


def _check_model(model: torch.nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, Tensor):
            raise InputError(
                f"{name} is a dtorch.Tensor already: {tensor.summary}. compile places the weights itself: give it "
                "the model from before distribute_module, and the placements with placements=."
            )
    active = [name for name, module in model.named_modules() if module.training and _has_dropout(module)]
    if active:
        raise InputError(
            f"the model is in training mode and its module {(active[0] or type(model).__name__)!r} drops values at "
            "random: call model.eval() before compile."
        )


def _has_dropout(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)
    if isinstance(module, kinds):
        return module.p > 0
    return any(isinstance(getattr(module, name, None), float) and getattr(module, name) > 0 for name in ("dropout",))


def _input_asks(module: torch.nn.Module, inputs: Mapping[str, Any] | None, mesh: DeviceMesh) -> dict:
    """Asks for forward's arguments; their ranks are known at the call, where the placements are checked again."""
    if not inputs:
        return {}
    parameters = inspect.signature(module.forward).parameters
    free = inspect.Parameter.VAR_KEYWORD
    names: dict[str, int | None] = {name: None for name, p in parameters.items() if p.kind is not free}
    if any(p.kind is free for p in parameters.values()) and isinstance(inputs, Mapping):
        # **kwargs takes any name; one that is nearly an argument's is a slip.
        names.update({name: None for name in inputs if name.isidentifier() and not nearest(name, names)})
    return user_asks(inputs, names, mesh, "inputs")
