"""What stands between the model's Python code and the recorder: factories, reads, special functions.

In: every torch function called while a forward is captured (a TorchFunctionMode). Out: recorded calls, values
read, or the plain function run, when no captured tensor takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dtorch import torch_private
from dtorch.capture.expand import fill, name_of
from dtorch.capture.methods import no_gradients
from dtorch.capture.record import Recorder, Scan
from dtorch.capture.refuse import refuse_transforms
from dtorch.capture.symbol import GETTERS, Tensor, meta_of
from dtorch.errors import CaptureError, DTorchError, InputError, UnsupportedError
from dtorch.ir.layout import WHOLE, Pending
from dtorch.ir.spec import tensor_text

Special = Callable[[Recorder, Any, tuple, dict[str, Any]], Any]
_NOT_SPECIAL = object()  # a special form found that the call is an ordinary one


class Intercept(TorchFunctionMode):
    """Hands the torch functions of one capture to its recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return intercepted(self.recorder, func, args, kwargs or {})


def intercepted(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run one torch function during a capture."""
    if func in GETTERS and args and isinstance(args[0], Tensor):
        return GETTERS[func](*args, **kwargs)
    special = SPECIAL.get(func)
    if special is not None:
        result = special(recorder, func, args, kwargs)
        if result is not _NOT_SPECIAL:
            return result
    scan = Scan(args, kwargs)
    if not scan.symbolic and func not in FACTORIES:
        return func(*args, **kwargs)
    if recorder.eager and scan.symbolic:
        first = next(tensor for tensor in scan.tensors if isinstance(tensor, Tensor))
        refuse_transforms(recorder, name_of(func), scan.tensors, first)
    if any(torch_private.is_batched(tensor) for tensor in scan.tensors):
        with torch_private.without_torch_function():  # inside vmap: its rules unwrap, and call `dispatch`
            return func(*args, **kwargs)
    try:
        return recorder.call(func, args, kwargs, scan)
    except torch_private.data_dependent_exceptions():
        return _on_host(recorder, func, args, kwargs)
    except DTorchError:
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        if not recorder.eager or hasattr(error, "from_devices"):
            raise
        raise _refused(recorder, func, scan, error) from error


def _refused(recorder: Any, func: Any, scan: Scan, error: Exception) -> Exception:
    """Torch's error about the arguments of a call, with the operator, the placed arguments and the user's line."""
    metas = [meta_of(tensor, recorder.device) for tensor in scan.tensors]

    fakes = [meta.fake() for meta in metas]  # not while operators are listened to: to make one is one

    def run() -> None:
        func(*fill(scan.args, fakes), **fill(scan.kwargs, fakes))

    name = torch_private.last_op(run) or name_of(func)
    specs = [tensor.spec if isinstance(tensor, Tensor) else None for tensor in scan.tensors]
    given = ", ".join(tensor_text(meta.dtype, meta.shape, spec) for meta, spec in zip(metas, specs))
    kinds = (IndexError, TypeError, NotImplementedError, RuntimeError, ValueError)
    kind = next(kind for kind in kinds if isinstance(error, kind))
    text = str(error)
    if text.startswith("more than one element of the written-to tensor"):  # torch's kernels say it so
        text = f"unsupported operation: {text}"
    return kind(f"{name}({given}) on {recorder.home.mesh_text}: {text}\n  at {recorder.line()}")


def call(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A torch function on a symbol while no capture listens (the mode was left, or the symbol outlived its
    capture).
    """
    recorder = next((tensor.recorder for tensor in Scan(args, kwargs).tensors if isinstance(tensor, Tensor)), None)
    if recorder is None or recorder.finished:
        raise CaptureError(
            f"{getattr(func, '__name__', func)} on a tensor of a captured model outside its capture: it has no value. "
            "Use the original module's tensors, or the compiled module's results."
        )
    return intercepted(recorder, func, args, kwargs)


def _symbols_to_numbers(recorder: Recorder, item: Any, what: str) -> Any:
    """Nested arguments with every captured integer scalar replaced by its value."""
    if isinstance(item, Tensor) and item.dim() == 0 and not item.is_floating_point() and not item.is_complex():
        return recorder.host_value(item, what).item()
    if type(item) in (list, tuple):
        return type(item)(_symbols_to_numbers(recorder, child, what) for child in item)
    if type(item) is slice:
        return slice(*(_symbols_to_numbers(recorder, child, what) for child in (item.start, item.stop, item.step)))
    if type(item) is dict:
        return {key: _symbols_to_numbers(recorder, child, what) for key, child in item.items()}
    return item


def _on_host(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A call whose result's shape, or whose meaning, depends on data: first by its scalars, else whole."""
    what = getattr(func, "__name__", str(func))
    scalars, keywords = _symbols_to_numbers(recorder, args, what), _symbols_to_numbers(recorder, kwargs, what)
    if len(Scan(scalars, keywords).tensors) < len(Scan(args, kwargs).tensors):
        try:
            return recorder.call(func, scalars, keywords)
        except torch_private.data_dependent_exceptions():
            pass
    scan = Scan(args, kwargs)
    values = [recorder.host_value(each, what) if isinstance(each, Tensor) else each for each in scan.tensors]
    with torch.no_grad():
        result = func(*fill(scan.args, values), **fill(scan.kwargs, values))
    flat, spec = torch_private.tree_flatten(result)
    return torch_private.tree_unflatten([_constant(recorder, each) for each in flat], spec)


def _constant(recorder: Recorder, value: Any) -> Any:
    """A host result as part of the graph: tensors become constants whose value is known."""
    if not isinstance(value, torch.Tensor):
        return value
    symbol = recorder.lift(value)
    recorder.known_value(symbol, value)
    return symbol


# --- value reads ------------------------------------------------------------------------------------------------


def _reading(what: str, convert: Callable[..., Any]) -> Special:
    def read(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not isinstance(args[0], Tensor):
            return _NOT_SPECIAL
        return convert(recorder.host_value(args[0], what), *args[1:], **kwargs)

    return read


def _contains(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    found = recorder.call(torch.any, (intercepted(recorder, torch.eq, args, kwargs),), {})
    return bool(recorder.host_value(found, "in"))


def _iterate(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], Tensor):
        return _NOT_SPECIAL
    if args[0].dim() == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(recorder.call(torch.unbind, (args[0], 0), {}))


# --- positions of true elements: only the mask is read --------------------------------------------------------------


def _mask_value(recorder: Recorder, mask: torch.Tensor, what: str) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        mask = intercepted(recorder, torch.ne, (mask, 0), {})
    return recorder.host_value(mask, what) if isinstance(mask, Tensor) else mask


def _positions(recorder: Recorder, mask: torch.Tensor, what: str) -> tuple[Any, ...]:
    """What `mask.nonzero(as_tuple=True)` gives, for the mask's value now, as constants."""
    return tuple(_constant(recorder, each) for each in _mask_value(recorder, mask, what).nonzero(as_tuple=True))


def _nonzero(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], Tensor):
        return _NOT_SPECIAL
    if kwargs.get("as_tuple", args[1] if len(args) > 1 else False):
        return _positions(recorder, args[0], "nonzero")
    return _constant(recorder, _mask_value(recorder, args[0], "nonzero").nonzero())


def _where(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return _positions(recorder, args[0], "where")
    return _NOT_SPECIAL


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)


def _is_scalar_index(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dim() == 0 and not _is_mask(item) and not item.is_floating_point()


def _getitem(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensor, index = args
    items = index if type(index) is tuple else (index,)
    scalar = _split_scalar_index(tensor, items)
    if scalar is not None:
        rest, dim, position = scalar
        rows = intercepted(recorder, func, (intercepted(recorder, func, (tensor, rest), {}), position), {})
        return intercepted(recorder, torch.select, (rows, dim, 0), {})
    if not any(map(_is_mask, items)) or not any(isinstance(item, Tensor) for item in (tensor, *items)):
        return _NOT_SPECIAL
    found: list[Any] = []
    for item in items:
        if _is_mask(item) and item.dim() > 0:
            found.extend(_positions(recorder, item, "indexing by a mask"))
        elif isinstance(item, Tensor) and item.dtype is torch.bool:
            found.append(bool(recorder.host_value(item, "indexing by a mask")))
        else:
            found.append(item)
    return intercepted(recorder, func, (tensor, tuple(found)), kwargs)


def _setitem(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensor, index, value = args
    scalar = _split_scalar_index(tensor, index if type(index) is tuple else (index,))
    if scalar is None or not isinstance(tensor, Tensor):
        return _NOT_SPECIAL
    rest, dim, position = scalar
    rows = intercepted(recorder, torch.Tensor.__getitem__, (tensor, rest), {})
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        shape = [size for i, size in enumerate(rows.shape) if i != dim]
        value = intercepted(recorder, torch.Tensor.expand, (value, shape), {})
        value = intercepted(recorder, torch.unsqueeze, (value, dim), {})
    return intercepted(recorder, func, (rows, position, value), {})


def _split_scalar_index(tensor: torch.Tensor, items: tuple) -> tuple[tuple, int, tuple] | None:
    """`x[..., i, ...]` with one captured integer i among numbers and slices, without reading i.

    Returns the other indices with a full slice for i, the dim of i in what they select, and the index by i
    there, which keeps that dim with size 1. torch would make a number of i; an index tensor of one element
    selects the same.
    """
    if sum(map(_is_scalar_index, items)) != 1:
        return None
    if not all(_is_scalar_index(item) or item is None or type(item) in (int, slice, type(...)) for item in items):
        return None
    if any(isinstance(part, torch.Tensor) for item in items if type(item) is slice for part in (item.start, item.stop)):
        return None
    used = sum(item is not None and item is not ... for item in items)
    dim = 0
    for item in items:
        if _is_scalar_index(item):
            scalar = item
            break
        dim += 0 if type(item) is int else tensor.dim() - used if item is ... else 1
    rest = tuple(slice(None) if item is scalar else item for item in items)
    return rest, dim, (*(slice(None),) * dim, scalar.reshape(1))


# --- tensors from Python data -----------------------------------------------------------------------------------


def _tensor(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch.tensor and as_tensor: numbers become `full`, symbols stay symbols, other data becomes a constant."""
    data, *rest = args
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if rest:
        return _NOT_SPECIAL
    if isinstance(data, Tensor):
        copied = data if func is torch.as_tensor else recorder.call(torch.clone, (data,), {})
        return recorder.call(torch.Tensor.to, (copied, device or data.device, dtype or data.dtype), {})
    if type(data) in (list, tuple) and data and all(isinstance(item, Tensor) and item.dim() == 0 for item in data):
        stacked = recorder.call(torch.stack, (list(data),), {})
        return recorder.call(torch.Tensor.to, (stacked, device or stacked.device, dtype or stacked.dtype), {})
    if Scan(args, kwargs).symbolic:
        data = _symbols_to_numbers(recorder, data, "torch.tensor")
    plain = func(data, **{key: value for key, value in kwargs.items() if key != "requires_grad"})
    if isinstance(data, torch.Tensor):
        return plain
    if plain.dim() == 0 and type(data) in (bool, int, float):
        return recorder.call(torch.full, ((), data), {"dtype": plain.dtype, "device": plain.device})
    if plain.numel() == 0:
        return recorder.call(torch.zeros, (tuple(plain.shape),), {"dtype": plain.dtype, "device": plain.device})
    return _constant(recorder, plain)


def _set_data(recorder: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    target, value = args
    if not isinstance(target, Tensor):
        return _NOT_SPECIAL
    value = value if isinstance(value, Tensor) else recorder.lift(value)
    if recorder.eager:
        recorder.rebind(target, value)
        return None
    if value.meta is not target.meta:
        raise CaptureError(
            f"{recorder.line()}: `.data = ` gives {target.summary} another shape or dtype ({value.meta}). Use a new "
            f"tensor instead."
        )
    intercepted(recorder, torch.Tensor.copy_, (target, value), {})
    return None


def _cat(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Leave out the empty 1-d tensors that `cat` ignores: caches start as one."""
    tensors = args[0] if args else kwargs.get("tensors", ())
    if "out" in kwargs or not any(isinstance(each, Tensor) for each in tensors):
        return _NOT_SPECIAL
    kept = [each for each in tensors if each.dim() != 1 or each.shape[0] != 0]
    if len(kept) == len(tensors) or not kept or any(each.dtype != kept[0].dtype for each in tensors):
        return _NOT_SPECIAL
    if len(kept) == 1:
        return intercepted(recorder, torch.clone, (kept[0],), {"memory_format": torch.contiguous_format})
    rest = {key: value for key, value in kwargs.items() if key != "tensors"}
    return intercepted(recorder, func, (kept, *args[1:]), rest)


def _cond(recorder: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A branch on a value, as if it were written with `if`."""
    given = dict(zip(("pred", "true_fn", "false_fn", "operands"), args), **kwargs)
    branch = given["true_fn"] if bool(given["pred"]) else given["false_fn"]
    with nullcontext() if recorder.eager else Intercept(recorder):
        return branch(*given.get("operands", ()))


def _as_strided(recorder: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Refused where it reaches memory that only the tensor's base has: on the devices a view is apart from its base."""
    given = dict(zip(("input", "size", "stride", "storage_offset"), args), **kwargs)
    source = given.get("input", given.get("self"))
    if not isinstance(source, Tensor) or source.base is None:
        return _NOT_SPECIAL
    reach = sum((count - 1) * step for count, step in zip(given["size"], given["stride"]))
    own = sum((count - 1) * step for count, step in zip(source.meta.shape, source.meta.stride))
    if given.get("storage_offset") or reach > own:
        raise UnsupportedError(
            f"{recorder.line()}: as_strided on {source.summary}, a view of another tensor, reaches memory outside of "
            "the view, which the devices hold apart. Take it from the base, or from view.clone()."
        )
    return _NOT_SPECIAL


_LISTS = torch_private.foreach_writes()


def _write_list(recorder: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Functions that write a list of tensors in place, tensor by tensor."""
    tensors, *rest = args
    if not any(isinstance(tensor, Tensor) for tensor in tensors):
        return _NOT_SPECIAL
    if func.__name__ == "_foreach_copy_":
        news = rest[0]
    elif func.__name__ == "_foreach_zero_":
        news = [torch.zeros_like(tensor) for tensor in tensors]
    else:
        news = _LISTS[func](*args, **kwargs)  # type: ignore[misc]  # None only for the two above
        for tensor, new in zip(tensors, news, strict=True):
            if new.dtype != tensor.dtype:
                raise RuntimeError(f"result type {new.dtype} can't be cast to the desired output type {tensor.dtype}")
    for tensor, new in zip(tensors, news, strict=True):
        tensor.copy_(new)


def _dropout(recorder: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Inactive dropout gives back the very tensor, writes into which are seen; torch's decomposition copies it."""
    train = "train" if func is torch.dropout else "training"
    given = dict(zip(("input", "p", train), args), **kwargs)
    x, p = given.get("input"), given.get("p", 0.5)
    active = given.get(train, True) and p != 0 and isinstance(x, Tensor) and x.meta.numel > 0
    return x if isinstance(x, Tensor) and not active and 0 <= p <= 1 else _NOT_SPECIAL


def _instance_norm(recorder: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """With running statistics, which torch's operator writes although its schema says that it writes nothing.

    As torch computes it: the norm of a batch of one, with the channels of all samples side by side.
    """
    given = dict(zip(_INSTANCE_NORM[func is torch.instance_norm], args), **kwargs)
    x, mean, variance = given["input"], given.get("running_mean"), given.get("running_var")
    if mean is None or variance is None or not given.get("use_input_stats", True) or x.dim() < 3:
        return _NOT_SPECIAL
    batch, channels, *sizes = x.shape
    if batch * channels == 0 or prod(sizes) <= 1:
        return _NOT_SPECIAL
    many = [each if each is None else each.repeat(batch) for each in (given.get("weight"), given.get("bias"))]
    running = [mean.repeat(batch), variance.repeat(batch)]
    flat = x.contiguous().view(1, batch * channels, *sizes)
    settings = {"momentum": given.get("momentum", 0.1), "eps": given.get("eps", 1e-5)}
    result = torch.nn.functional.batch_norm(flat, *running, *many, training=True, **settings)
    for statistic, found in zip((mean, variance), running):
        statistic.copy_(found.view(batch, channels).mean(0))
    return result.view(x.shape)


_INSTANCE_NORM = (
    "input running_mean running_var weight bias use_input_stats momentum eps".split(),
    "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled".split(),
)
"""The arguments of `F.instance_norm` and of `torch.instance_norm`."""


# --- of eager tensors only ----------------------------------------------------------------------------------------


def _to(recorder: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Another dtype is recorded; another kind of device is a redistribute, which the user has to name."""
    tensor, *rest = args
    if not recorder.eager or not isinstance(tensor, Tensor):
        return _NOT_SPECIAL
    options = {key: kwargs[key] for key in ("copy", "memory_format") if kwargs.get(key)}
    kwargs = {key: value for key, value in kwargs.items() if key not in ("copy", "memory_format")}
    dtype: torch.dtype | None = None
    if func is torch.Tensor.cpu or func is torch.Tensor.cuda:
        device: torch.device | None = torch.device(func.__name__)
    elif rest and isinstance(rest[0], torch.Tensor):
        device, dtype = rest[0].device, rest[0].dtype
    elif rest or kwargs:
        device, dtype = torch_private.parse_to(*rest, **kwargs)
    else:
        return tensor
    if device is not None and device.type != recorder.device.type:
        mesh = recorder.home.mesh
        ids = mesh.mesh.tolist()
        raise InputError(
            f"{recorder.line()}: {name_of(func)} to {str(device)!r} of {tensor.summary}, a mesh of {mesh.device_type} "
            f"devices. x.redistribute(device_mesh=dtorch.DeviceMesh({device.type!r}, {ids})) moves it there; "
            "x.to_torch() gives a plain torch tensor."
        )
    if (dtype is None or dtype is tensor.dtype) and not options:
        return tensor
    return recorder.call(torch.Tensor.to, (tensor, dtype or tensor.dtype), options)


def _type(recorder: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The name of a tensor's type, which C++ would say of the meta tensor that it sees; with a type, a cast."""
    if len(args) > 1 or kwargs or not isinstance(args[0], Tensor):
        return _NOT_SPECIAL
    meta = args[0].meta
    with torch_private.without_function_modes():
        name = torch.empty(0, dtype=meta.dtype, device="cpu").type()
    return name if meta.device.type == "cpu" else name.replace("torch.", f"torch.{meta.device.type}.")


def _random_like(recorder: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Drawn on the host like all random numbers; the tensor's values are not needed, so nothing is read."""
    if not recorder.eager or not isinstance(args[0], Tensor):
        return _NOT_SPECIAL
    meta, device = args[0].meta, recorder.device
    stand_in = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
    options = {key: value for key, value in kwargs.items() if key not in ("device", "requires_grad")}
    value = func(stand_in, *args[1:], **options)
    spec = tuple(WHOLE if type(placed) is Pending else placed for placed in args[0].spec)
    remote = recorder.home.put(value, spec)
    return recorder.symbol(meta_of(value, device), spec, remote, bool(kwargs.get("requires_grad")))


def _no_gradients(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    raise no_gradients(f"{recorder.line()}: {torch_private.derivative_in_progress() or name_of(func)}")


def _needs_memory(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if not recorder.eager or not isinstance(args[0], Tensor):
        return _NOT_SPECIAL
    raise UnsupportedError(
        f"{recorder.line()}: {name_of(func)} on {args[0].summary} works on a tensor's own memory, which is on the "
        "devices. Use a function that returns a new tensor, or copy_; x.to_torch() gives a plain torch tensor."
    )


def _itself(recorder: Recorder, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0] if recorder.eager else _NOT_SPECIAL


SPECIAL: dict[Any, Special] = {
    torch.Tensor.item: _reading("item()", lambda value: value.item()),
    torch.Tensor.tolist: _reading("tolist()", lambda value: value.tolist()),
    torch.Tensor.__bool__: _reading("bool()", bool),
    torch.is_nonzero: _reading("is_nonzero()", bool),
    torch.Tensor.is_nonzero: _reading("is_nonzero()", bool),
    torch.Tensor.__int__: _reading("int()", int),
    torch.Tensor.__float__: _reading("float()", float),
    torch.Tensor.__complex__: _reading("complex()", complex),
    torch.Tensor.__index__: _reading("use as an index", int),
    torch.Tensor.numpy: _reading("numpy()", lambda value, **kwargs: value.detach().numpy(**kwargs)),
    torch.Tensor.__array__: _reading(
        "numpy()", lambda value, *args, **kwargs: value.detach().__array__(*args, **kwargs)
    ),
    torch.Tensor.__contains__: _contains,
    torch.Tensor.__iter__: _iterate,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem,
    torch.Tensor.nonzero: _nonzero,
    torch.nonzero: _nonzero,
    torch.argwhere: _nonzero,
    torch.Tensor.argwhere: _nonzero,
    torch.where: _where,
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.Tensor.data.__set__: _set_data,
    torch.ops.higher_order.cond: _cond,
    torch.as_strided: _as_strided,
    torch.Tensor.as_strided: _as_strided,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    **dict.fromkeys(_LISTS, _write_list),
    torch.nn.functional.dropout: _dropout,
    torch.dropout: _dropout,
    torch.nn.functional.instance_norm: _instance_norm,
    torch.instance_norm: _instance_norm,
    torch.Tensor.pin_memory: _itself,
    **dict.fromkeys(
        [getattr(torch.Tensor, name) for name in "apply_ map_ map2_ share_memory_ resize_ resize_as_".split()],
        _needs_memory,
    ),
    torch.Tensor.type: _type,
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _to,
    torch.Tensor.cuda: _to,
    torch.rand_like: _random_like,
    torch.randn_like: _random_like,
    torch.randint_like: _random_like,
    torch.autograd.grad: _no_gradients,
    torch.autograd.backward: _no_gradients,
    **dict.fromkeys(torch_private.forward_derivative_functions(), _no_gradients),
    torch.Tensor.register_hook: _no_gradients,
    torch.Tensor.register_post_accumulate_grad_hook: _no_gradients,
}

_FACTORY_NAMES = (
    "arange range linspace logspace zeros ones full empty empty_strided eye tril_indices triu_indices "
    "hann_window hamming_window "
    "blackman_window bartlett_window kaiser_window scalar_tensor zeros_like ones_like full_like empty_like "
    "rand randn randint "
    "randperm normal rand_like randn_like randint_like bernoulli multinomial"
)
_FACTORY_METHODS = "new_zeros new_ones new_full new_empty new_empty_strided"

FACTORIES = frozenset(
    [getattr(torch, name) for name in _FACTORY_NAMES.split() if hasattr(torch, name)]
    + [getattr(torch.Tensor, name) for name in _FACTORY_METHODS.split()]
)
"""Functions that make tensors: recorded even when no captured tensor takes part."""
