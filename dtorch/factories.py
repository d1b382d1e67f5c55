"""Making distributed tensors: `zeros`, `rand`, `arange` and their like, `tensor`, `from_torch`, `distribute_tensor`.

In: what torch's functions of the same names take, and `device_mesh=`, `placements=`. Out: tensors on the current graph.
Constant ones are recorded and made in parts; random ones are drawn here by torch's own generator, on the whole
shape, and then cut, so that a seed gives the same numbers on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch import torch_private
from dtorch.capture.symbol import CONSTRUCT, Tensor
from dtorch.defaults import default_dtype, target
from dtorch.errors import InputError, UnsupportedError
from dtorch.graph import current_graph
from dtorch.ir.spec import to_spec
from dtorch.mesh import DeviceMesh
from dtorch.placements import normalize

_UNUSED = {"pin_memory": False, "layout": torch.strided, "memory_format": torch.preserve_format, "names": None}
"""Options of torch's factories that mean nothing here, with the only value that they may have."""


def _options(name: str, options: dict[str, Any]) -> tuple[DeviceMesh, Any, bool, dict[str, Any]]:
    """Take the options of dtorch out of a factory's; what is left goes to torch's function."""
    for unused, only in _UNUSED.items():
        given = options.get(unused)
        if given is not None and given not in (only, torch.contiguous_format):
            raise UnsupportedError(f"dtorch.{name}({unused}={given!r}) is not there: leave {unused} out.")
    rest = {key: value for key, value in options.items() if key not in _UNUSED}
    if rest.pop("out", None) is not None:
        raise UnsupportedError(f"dtorch.{name}(out=...) is not there: use the result, or copy_ into the tensor.")
    mesh, placements = target(rest.pop("device", None), rest.pop("device_mesh", None), rest.pop("placements", None))
    grad = bool(rest.pop("requires_grad", False))
    return mesh, placements, grad, rest


def _with_dtype(function: Callable[..., Any], args: tuple, options: dict[str, Any]) -> dict[str, Any]:
    """The options with the dtype of `dtype_guard`, where torch would take its own default."""
    wanted = default_dtype()
    if wanted is None or options.get("dtype") is not None:
        return options
    plain = {key: value for key, value in options.items() if key != "generator"}
    found = function(*args, **plain, device="meta").dtype
    return {**options, "dtype": wanted} if found is torch.get_default_dtype() else options


def _place(value: torch.Tensor, mesh: DeviceMesh, placements: Any, requires_grad: bool) -> Tensor:
    spec = to_spec(normalize(placements, mesh, value.dim()))
    with torch.no_grad():
        return current_graph().place(value.detach(), mesh, spec).requires_grad_(requires_grad)


def _recorded(function: Callable[..., torch.Tensor]) -> Callable[..., Tensor]:
    """A factory whose values follow from its arguments: recorded, and made where it is wanted."""
    name = function.__name__

    def factory(*args: Any, **options: Any) -> Tensor:
        mesh, placements, grad, rest = _options(name, options)
        rest = _with_dtype(function, args, rest)
        recorder = current_graph().recorder(mesh)
        made = recorder.create(function, args, {**rest, "device": recorder.device}, _spec_of(placements, mesh))
        return made.requires_grad_(grad)

    return _documented(factory, name, "Recorded: the devices make their parts.")


def _spec_of(placements: Any, mesh: DeviceMesh) -> Callable[[int], Any]:
    return lambda ndim: to_spec(normalize(placements, mesh, ndim))


def _drawn(function: Callable[..., torch.Tensor]) -> Callable[..., Tensor]:
    """A factory of random values: torch draws them here, whole."""
    name = function.__name__

    def factory(*args: Any, **options: Any) -> Tensor:
        mesh, placements, grad, rest = _options(name, options)
        rest = _with_dtype(function, args, rest)
        generator = rest.get("generator")
        with torch.no_grad():
            value = function(*args, **rest, device=generator.device if generator is not None else mesh.device_type)
        return _place(value, mesh, placements, grad)

    return _documented(factory, name, "The values are those of torch for the same seed or generator, on every mesh.")


def _like(name: str) -> Callable[..., Tensor]:
    """A factory that takes its shape, dtype, mesh and placements from another tensor."""
    function = getattr(torch, name)
    random = name in ("rand_like", "randn_like", "randint_like")

    def factory(input: torch.Tensor, *args: Any, **options: Any) -> Tensor:  # noqa: A002  (torch's name)
        if isinstance(input, Tensor) and options.get("device") is None:
            mesh = options.get("device_mesh") or input.device_mesh
            same = mesh.ndim == input.device_mesh.ndim
            options = {**options, "device_mesh": mesh}
            if options.get("placements") is None and same:
                options["placements"] = [_kept(placed) for placed in input.placements]
        mesh, placements, grad, rest = _options(name, options)
        dtype = rest.get("dtype") or input.dtype
        if random:
            stand_in = torch.empty_strided(input.shape, input.stride(), dtype=dtype, device=mesh.device_type)
            with torch.no_grad():
                return _place(function(stand_in, *args, **rest), mesh, placements, grad)
        dense = function(torch.empty_strided(input.shape, input.stride(), dtype=dtype, device="meta"), *args, **rest)
        if not dense.is_contiguous():
            value = function(torch.empty_strided(input.shape, input.stride(), dtype=dtype), *args, **rest)
            return _place(value, mesh, placements, grad)
        fill = ((args[0] if args else rest["fill_value"]),) if name == "full_like" else ()
        recorder = current_graph().recorder(mesh)
        options = {"dtype": dense.dtype, "device": recorder.device}
        made = recorder.create(_CONSTANT[name], (tuple(dense.shape), *fill), options, _spec_of(placements, mesh))
        return made.requires_grad_(grad)

    return _documented(factory, name, "Mesh and placements are those of `input`, unless they are given.")


_CONSTANT = {"zeros_like": torch.zeros, "ones_like": torch.ones, "empty_like": torch.empty, "full_like": torch.full}


def _kept(placed: Any) -> Any:
    """A pending sum of something else says nothing about where a new tensor should lie."""
    from dtorch.placements import Replicate

    return Replicate() if placed.is_partial() else placed


def _documented(factory: Callable[..., Tensor], name: str, what: str) -> Callable[..., Tensor]:
    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = (
        f"torch.{name} on the devices of a mesh: takes what that takes, and `device_mesh=` and `placements=`.\n\n"
        f"{what} Without a mesh: that of `device=`, else of `device_mesh_guard`, else one CPU device."
    )
    return factory


empty, zeros, ones, full = map(_recorded, (torch.empty, torch.zeros, torch.ones, torch.full))
arange, linspace, logspace, eye = map(_recorded, (torch.arange, torch.linspace, torch.logspace, torch.eye))
rand, randn, randint, randperm = map(_drawn, (torch.rand, torch.randn, torch.randint, torch.randperm))
empty_like, zeros_like, ones_like, full_like = map(_like, ("empty_like", "zeros_like", "ones_like", "full_like"))
rand_like, randn_like, randint_like = map(_like, ("rand_like", "randn_like", "randint_like"))


def tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of numbers, nested lists or an array, like torch.tensor; the numbers are copied to the devices."""
    mesh, wanted = target(device, device_mesh, placements)
    options = {} if dtype is None else {"dtype": dtype}
    value = torch.tensor(_on_host(data), **_with_dtype(lambda *a, device, **k: torch.tensor(*a, **k), (data,), options))
    return _place(value, mesh, wanted, requires_grad)


def _on_host(data: Any) -> Any:
    """Nested data with dtorch tensors in it read."""
    if isinstance(data, Tensor):
        return data.to_torch().detach()
    if isinstance(data, (list, tuple)):
        return type(data)(_on_host(each) for each in data)
    return data


def construct(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    requires_grad: bool | None = None,
) -> Tensor:
    """A tensor with the values of a torch or dtorch tensor, an array or nested numbers, copied.

    Partial placements keep the values at coordinate 0 of the axis. `requires_grad` is that of `data` when left out.
    Without `device=` and `device_mesh=`, the device of a torch tensor that is on a GPU, else as all factories.
    """
    if isinstance(data, Tensor):
        keeps = device is None and device_mesh is None
        mesh, wanted = (data.device_mesh, placements) if keeps else target(device, device_mesh, placements)
        moved = data.redistribute(mesh, wanted)
        moved = moved if dtype is None else moved.to(dtype)
        return moved.requires_grad_(data.requires_grad if requires_grad is None else requires_grad)
    if not isinstance(data, torch.Tensor):
        return tensor(data, dtype=dtype, device=device, device_mesh=device_mesh, placements=placements,
                      requires_grad=bool(requires_grad))  # fmt: skip
    if data.layout is not torch.strided or data.is_quantized:
        raise UnsupportedError(f"a {data.layout} tensor cannot be distributed; use a dense one.")
    if device is None and device_mesh is None and data.device.type not in ("cpu", "meta"):
        device = data.device
    mesh, wanted = target(device, device_mesh, placements)
    if data.is_meta:
        raise InputError("a tensor on the meta device has no values to distribute: use dtorch.empty_like(x).")
    grad = data.requires_grad if requires_grad is None else requires_grad
    value = data.detach()
    return _place(value if dtype is None else value.to(dtype), mesh, wanted, grad)


CONSTRUCT["tensor"] = construct


def from_torch(
    tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Any = None, *, device: Any = None
) -> Tensor:
    """The values of a torch tensor, copied to a mesh; `x.to_torch()` is the way back."""
    return construct(tensor, device=device, device_mesh=device_mesh, placements=placements)


def distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Any = None
) -> Tensor:
    """The values of a torch tensor on a mesh, placed so: torch.distributed.tensor's function of that name."""
    made = construct(tensor, device_mesh=device_mesh, placements=placements)
    if torch_private.is_parameter(tensor) or isinstance(tensor, torch.nn.Parameter):
        torch_private.mark_parameter(made)  # nn.Parameter(made) would record a view of it
        made.requires_grad_(tensor.requires_grad)
    return made
