"""The one file that touches torch's private modules and attributes, so that a new torch breaks here and only here.

In: torch objects. Out: small functions with plain results, in a section for each stage that needs them.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache, lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

# --- for ir and passes: operator schemas, collectives, graph hooks ------------------------------------------------


@dataclass(frozen=True)
class SchemaFacts:
    """What an operator's schema promises about memory and randomness.

    `aliases`: position of the argument that the results may share memory with, or None. `mutates`: positions of
    arguments that it writes. `seeded`: results depend on the random state. `returns`: how many results.
    """

    aliases: int | None
    mutates: tuple[int, ...]
    seeded: bool
    returns: int


@cache
def schema_facts(op: OpOverload) -> SchemaFacts:
    """Read `SchemaFacts` off an ATen overload; once for each overload."""
    schema = op._schema
    mutates = tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    read_sets = {
        name: i for i, a in enumerate(schema.arguments) if a.alias_info is not None for name in a.alias_info.before_set
    }
    aliases = next(
        (
            read_sets[name]
            for result in schema.returns
            if result.alias_info is not None
            for name in sorted(result.alias_info.before_set)
            if name in read_sets
        ),
        None,
    )
    return SchemaFacts(aliases, mutates, torch.Tag.nondeterministic_seeded in op.tags, len(schema.returns))


@lru_cache(maxsize=1)
def functional_collectives() -> dict[str, OpOverload]:
    """The functional collectives by name, and `wait_tensor`; their ops exist without torch.distributed's start."""
    importlib.import_module("torch.distributed._functional_collectives")
    names = (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "broadcast",
        "wait_tensor",
    )
    return {name: getattr(torch.ops._c10d_functional, name).default for name in names}


@contextmanager
def watch_replacements(graph_module: torch.fx.GraphModule, seen: Callable[[str, str, Any], object]) -> Iterator[None]:
    """Call `seen(old node's name, new node's name, user node)` whenever a use of a node is replaced by another."""

    def hook(old: Any, new: str, user: Any) -> None:
        seen(old.name, new, user)

    graph_module._register_replace_node_hook(hook)
    try:
        yield
    finally:
        graph_module._unregister_replace_node_hook(hook)


def let_fx_print(constant_class: Any) -> None:
    """Let code that torch.fx generates hold instances of a frozen dataclass: `Split(dim=0, outer=1, unit=4)`.

    torch.fx writes constants by `repr`, which for placements is short and for people, and no Python.
    """
    opaque = importlib.import_module("torch._library.opaque_object")
    if opaque.is_opaque_value_type(constant_class):
        return

    def fx_repr(self: Any) -> tuple[str, dict[str, type]]:
        named = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{constant_class.__name__}({named})", {constant_class.__name__: constant_class}

    constant_class.__fx_repr__ = fx_repr
    opaque.register_opaque_type(constant_class, typ="value")


def size_hint(size: Any) -> int:
    """A plain int for a size that may be symbolic, without a guard: the traced example's size, else 1."""
    if type(size) is int:
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else 1


# --- for capture: symbols, fake tensors, tracing one op, the frames and modules of torch itself -------------------


MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__
"""The code object that runs every module's forward: its frame's `self` is the module that is running."""


def without_torch_function() -> Any:
    """A context in which tensor subclasses' `__torch_function__` is not asked."""
    return torch._C.DisableTorchFunctionSubclass()


def without_function_modes() -> Any:
    """A context in which neither subclasses nor TorchFunctionModes are asked."""
    return torch._C.DisableTorchFunction()


def make_symbol(cls: type[torch.Tensor], base: torch.Tensor, requires_grad: bool) -> Any:
    """An instance of a Tensor subclass over `base` (a meta tensor), sharing it."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor._make_subclass(cls, base, requires_grad)


@lru_cache(maxsize=1)
def fake_mode() -> Any:
    """The one static FakeTensorMode of the process, so that fakes of different captures may meet in one graph."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    teach_fake_tensors()
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not getattr(_PROBING, "now", False))
    # Fakes say that they are on "meta" while a kernel runs on them: for that kernel's thread, not for all. The class is
    # patched and not derived from, because higher-order operators look their rules up by the very class of a mode.
    FakeTensorMode.in_kernel_invocation = property(
        lambda mode: getattr(_IN_KERNEL, str(id(mode)), False),
        lambda mode, value: setattr(_IN_KERNEL, str(id(mode)), value),
    )
    return FakeTensorMode(allow_non_fake_inputs=False)


@lru_cache(maxsize=1)
def _fake_class() -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def dispatch_is_changed() -> bool:
    """Whether a dispatch mode or a functorch transform (vmap) stands in this thread: an op is not what it says then."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def fake_tensor(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """A tensor with metadata and no data, of the process' fake mode."""
    if dispatcher_is_bypassed() and not getattr(_PROBING, "now", False):
        return in_fresh_thread(lambda: fake_tensor(shape, stride, dtype, device))
    if not dispatch_is_changed():  # a fake made by hand takes a tenth of the time
        mode = fake_mode()
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
            return _fake_class()(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
    with _FAKES, torch.inference_mode(False), torch._C.DisableTorchFunction(), fake_mode():
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


_PROBING = threading.local()
_IN_KERNEL = threading.local()  # by the id of a FakeTensorMode: whether a kernel runs on its fakes in this thread
_FAKES = threading.RLock()  # a FakeTensorMode keeps state while a call runs, so threads take turns


def fakes_in_turn() -> Any:
    """A context in which no other thread of dtorch works with fake tensors; may be entered again inside."""
    return _FAKES


@contextmanager
def fake_execution() -> Iterator[None]:
    """Run torch functions on fakes: no autograd, versions counted, subclasses not asked.

    What torch would log about a call that fails is left out: the error itself is raised on the user's line.
    """
    before = getattr(_PROBING, "now", False)
    _PROBING.now = True
    try:
        with (
            _FAKES,
            torch.inference_mode(False),
            torch.no_grad(),
            torch._C.DisableTorchFunctionSubclass(),
            fake_mode(),
        ):
            yield
    finally:
        _PROBING.now = before


@contextmanager
def kernels_that_read_data() -> Iterator[None]:
    """Turn what C++ says when it reads a fake's memory (packing sequences by lengths) into a data-dependent error."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    try:
        yield
    except RuntimeError as error:
        if "its data is not allocated yet" not in str(error):
            raise
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default) from error


def last_op(function: Callable[[], Any]) -> str | None:
    """The ATen operator that a call on fakes reaches last, such as `aten.mm`: of one that fails, the one that fails."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[Any] = []

    class Last(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            if func.namespace != "prim":  # questions, such as `prim.device`
                seen.append(func)
            return func(*args, **(kwargs or {}))

    try:
        with fake_execution(), Last():
            function()
    except Exception:  # noqa: BLE001  (that it fails is known: the name is wanted)
        pass
    return str(seen[-1].overloadpacket) if seen else None


@lru_cache(maxsize=1)
def data_dependent_exceptions() -> tuple[type[Exception], ...]:
    """What a fake tensor raises when a shape or a Python value depends on its data."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else tensor._version


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor; equal for views of one tensor."""
    return tensor.untyped_storage()._cdata


def trace_functional(function: Callable[..., Any], tensors: list[torch.Tensor]) -> torch.fx.GraphModule:
    """Trace `function` on fakes to a functional graph of ATen overloads, composites kept, before autocast acts."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = dispatch_functionalize(function, FunctionalTensorMode(pre_dispatch=True, export=True))
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cache of casts would leak fakes from one trace into the next
    try:
        with fake_execution():
            return make_fx(functional, pre_dispatch=True, tracing_mode="real", _error_on_data_dependent_ops=True)(
                *tensors
            )
    finally:
        torch.set_autocast_cache_enabled(cached)


def pytree_nodes() -> dict[type, Any]:
    """Container types registered with torch's pytree: type → object with `flatten_fn` and `unflatten_fn`."""
    from torch.utils._pytree import SUPPORTED_NODES

    return SUPPORTED_NODES


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether the tensor is inside `torch.vmap`."""
    return torch._C._functorch.is_batchedtensor(tensor)


def bookkeeping_functions() -> list[Callable[..., Any]]:
    """Functions by which Python asks a tensor about autograd, versions and layouts: they neither compute nor alias."""
    names = (
        "requires_grad grad grad_fn is_leaf is_sparse is_quantized is_nested names _version is_mkldnn is_xla is_mps "
        "is_xpu output_nr is_sparse_csr _backward_hooks _base is_inference is_ipu is_hpu is_vulkan is_mtia is_maia "
        "is_conj is_neg is_shared retains_grad requires_grad_ has_names _is_view"
    )
    found: list[Callable[..., Any]] = []
    for name in names.split():
        attribute = getattr(torch.Tensor, name, None)
        if callable(attribute):
            found.append(attribute)
        elif attribute is not None:
            found.extend(getattr(attribute, way) for way in ("__get__", "__set__") if hasattr(attribute, way))
    return found


@cache
def draws_random_numbers(op: OpOverload) -> bool:
    """Whether an overload may draw from a random generator."""
    return torch.Tag.nondeterministic_seeded in op.tags


# --- for sharding: argument names, and torch's own strategy tables as data -----------------------------------------


OpOverloadPacket = torch._ops.OpOverloadPacket


@cache
def schema_arguments(op: OpOverload) -> tuple[str, ...]:
    """Names of an operator's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


@cache
def _tensor_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if "Tensor" in str(argument.type)
    )


def schema_tensors(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The values of an operator's tensor-typed arguments in order: a tensor, a list of them, or None when absent."""
    return [args[position] if position < len(args) else kwargs.get(name) for position, name in _tensor_arguments(op)]


def single_dim_strategies(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> list[tuple[Any, ...]] | None:
    """Torch DTensor's legal placements of `(*results, *inputs)` on one mesh axis; None where its tables lack the op.

    Tensors in `args` / `kwargs` may be any metadata with shape, stride and dtype. Placements are torch's public
    classes; strategies with private ones (masked partials, strided shards) are left out. Pure data: no mesh, no
    process group. torch.distributed.tensor is imported on the first call.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import TensorMeta
    from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
    from torch.utils._pytree import tree_map

    table = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    if op not in table:
        return None

    def meta(value: Any) -> Any:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return TensorMeta(torch.Size(value.shape), tuple(value.stride()), value.dtype)
        return value

    found = []
    entry = table[op]
    strategies = getattr(entry, "func", entry)(op, tree_map(meta, tuple(args)), tree_map(meta, dict(kwargs)))
    for strategy in strategies:
        placements = [Shard(p.dim) if isinstance(p, _ShardingPlaceholder) else p for p in strategy]
        if all(type(p) in (Shard, Replicate, Partial) for p in placements):
            found.append(tuple(placements))
    return found


@cache
def argument_names(op: OpOverload) -> tuple[str, ...]:
    """Names of an overload's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of nested containers, by torch's pytree."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """Rebuild what `tree_flatten` took apart."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, spec)


def local_tensors(op: OpOverload, args: tuple[Any, ...], placements: list[Any], count: int) -> list[tuple[Any, list]]:
    """Run an op on DTensors over `count` devices in this process (LocalTensorMode): a second opinion for tests.

    `placements`: one for each tensor in `args`. Gives for each tensor result its placement and what each device holds.
    """
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._pytree import tree_leaves, tree_map

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        with LocalTensorMode(count):
            mesh = init_device_mesh("cpu", (count,))
            supply = iter(placements)

            def place(value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                everywhere = LocalTensor({rank: value.clone() for rank in range(count)})
                return distribute_tensor(everywhere, mesh, [next(supply)])

            results = [leaf for leaf in tree_leaves(op(*tree_map(place, args))) if isinstance(leaf, DTensor)]
            return [
                (result.placements[0], [result.to_local()._local_tensors[rank].clone() for rank in range(count)])
                for result in results
            ]
    finally:
        dist.destroy_process_group()


# --- for the runtime: the state a plan runs under, and the builtins behind ATen overloads -------------------------


@lru_cache(maxsize=1)
def _view_tracking() -> Any:
    return torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


@contextmanager
def plain_execution(track_views: bool = True) -> Iterator[None]:
    """Run kernels as they are: no autograd recorded, no function modes or subclasses asked, no autocast.

    Below autograd a call skips its dispatch altogether, which is a tenth of a small operation's time. Without
    `track_views` views and in-place writes are not noted for autograd either, a quarter of a view's time: only where
    no operand requires grad, since `matmul` asks a view of one whether it does and chooses its kernel by that.
    """
    quiet = nullcontext() if track_views else torch._C._ExcludeDispatchKeyGuard(_view_tracking())
    with quiet, torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                yield
        else:
            yield


@lru_cache(maxsize=1)
def native_functions() -> dict[str, Callable[..., Any]]:
    """Builtins that parse to the very same overload as the kernel they are listed for, and skip `OpOverload`'s cost."""
    nn, tensor = torch._C._nn, torch.Tensor
    return {
        "aten.linear.default": nn.linear,
        "aten.add.Tensor": tensor.add,
        "aten.sub.Tensor": tensor.sub,
        "aten.mul.Tensor": tensor.mul,
        "aten.div.Tensor": tensor.div,
        "aten.neg.default": torch.neg,
        "aten.rsqrt.default": torch.rsqrt,
        "aten.relu.default": torch.relu,
        "aten.tanh.default": torch.tanh,
        "aten.sigmoid.default": torch.sigmoid,
        "aten.silu.default": nn.silu,
        "aten.gelu.default": nn.gelu,
        "aten.mm.default": torch.mm,
        "aten.bmm.default": torch.bmm,
        "aten.matmul.default": torch.matmul,
        "aten.reshape.default": torch.reshape,
        "aten.view.default": tensor.view,
        "aten.transpose.int": torch.transpose,
        "aten.permute.default": torch.permute,
        "aten.unsqueeze.default": torch.unsqueeze,
        "aten.expand.default": tensor.expand,
        "aten.cat.default": torch.cat,
        "aten.embedding.default": torch.embedding,
        "aten.scaled_dot_product_attention.default": nn.scaled_dot_product_attention,
        "aten.layer_norm.default": torch.layer_norm,
        "aten.rms_norm.default": torch.rms_norm,
        "aten.group_norm.default": torch.group_norm,
        "aten.softmax.int": torch.softmax,
        "aten.conv2d.default": torch.conv2d,
        "aten.addmm.default": torch.addmm,
        "aten.pow.Tensor_Scalar": torch.pow,
        "aten.mean.dim": torch.mean,
        "aten.sum.dim_IntList": torch.sum,
        "aten.cos.default": torch.cos,
        "aten.sin.default": torch.sin,
        "aten.exp.default": torch.exp,
        "aten.sqrt.default": torch.sqrt,
        "aten.abs.default": torch.abs,
        "aten.maximum.default": torch.maximum,
        "aten.where.self": torch.where,
        "aten.clone.default": torch.clone,
        "aten.stack.default": torch.stack,
        "aten.t.default": torch.t,
        "aten.select.int": torch.select,
        "aten.squeeze.dim": torch.squeeze,
        "aten.scalar_tensor.default": torch.scalar_tensor,
        "aten.add_.Tensor": tensor.add_,
        "aten.sub_.Tensor": tensor.sub_,
        "aten.mul_.Tensor": tensor.mul_,
        "aten.div_.Tensor": tensor.div_,
        "aten.neg_.default": torch.neg_,
        "aten.abs_.default": torch.abs_,
        "aten.exp_.default": torch.exp_,
        "aten.log_.default": torch.log_,
        "aten.sqrt_.default": torch.sqrt_,
        "aten.rsqrt_.default": torch.rsqrt_,
        "aten.cos_.default": torch.cos_,
        "aten.sin_.default": torch.sin_,
        "aten.tanh_.default": torch.tanh_,
        "aten.sigmoid_.default": torch.sigmoid_,
        "aten.relu_.default": torch.relu_,
        "aten.silu_.default": nn.silu_,
        "aten.gelu_.default": nn.gelu_,
    }


def lazy_graph_module(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A GraphModule whose Python code is generated at its first call, not now."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(torch.nn.Module(), graph)


def compiled_code_runs_eagerly() -> Any:
    """A context in which functions under torch.compile run as written, or None where torch.compile is not in use."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else None


def teach_fake_tensors() -> None:
    """Metadata where torch's own meta kernel is stricter than its CPU kernel: `_grouped_mm` of other than bfloat16."""
    from torch._subclasses.fake_impls import op_implementations_dict

    def grouped_mm(
        fake_mode: Any,
        func: Any,
        left: torch.Tensor,
        right: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Any:
        if left.device.type != "cpu":
            return NotImplemented
        groups = right.shape[0] if right.dim() == 3 else left.shape[0] if left.dim() == 3 else offs.shape[0]  # type: ignore[union-attr]
        size = (left.shape[-2], right.shape[-1])
        with fake_mode:
            return torch.empty(
                size if left.dim() != right.dim() else (groups, *size), dtype=out_dtype or left.dtype, device="cpu"
            )

    op_implementations_dict.setdefault(torch.ops.aten._grouped_mm.default, grouped_mm)


def autocast_is_on() -> bool:
    """Whether autocast is enabled for any device type."""
    return torch._C._is_any_autocast_enabled()


def autocast_casts(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, torch.dtype]]:
    """Which of a call's (fake) tensors autocast converts first, and to what.

    A pre-dispatch trace records an op before autocast sees it, and torch does not publish autocast's lists of ops.
    So the call is run twice on fakes; the conversions of arguments that happen only under autocast are the answer.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[tuple[torch.Tensor, torch.dtype]] = []

    class Conversions(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default:
                seen.append((args[0], result.dtype))
            return result

    def conversions() -> list[tuple[torch.Tensor, torch.dtype]]:
        seen.clear()
        with fake_execution(), Conversions():
            op(*args, **kwargs)
        return list(seen)

    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        under = conversions()
        try:
            with torch._C._DisableAutocast():
                without = conversions()
        except RuntimeError:  # without autocast the dtypes do not even fit together
            without = []
    finally:
        torch.set_autocast_cache_enabled(cached)
    for tensor, dtype in without:
        position = next((i for i, (other, to) in enumerate(under) if other is tensor and to == dtype), None)
        if position is not None:
            under.pop(position)
    given = {id(leaf) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)}
    return [(tensor, dtype) for tensor, dtype in under if id(tensor) in given]


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype of the arguments of `Tensor.to` / `Module.to`."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """What `Module.load_state_dict` returns."""
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def symbolic_expression(size: Any) -> Any:
    """The sympy expression behind a symbolic size; a plain number is itself."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymBool, torch.SymFloat)) else size


def shape_guards(exported: Any) -> list[Any]:
    """Conditions (sympy) on sizes under which an exported program is right."""
    for node in exported.graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, torch.SymInt):
                return [guard.expr for guard in size.node.shape_env.guards]
    return []


HigherOrderOperator = torch._ops.HigherOrderOperator


@cache
def returns_views(op: OpOverload) -> bool:
    """Whether an overload gives a list of views of its first argument, as split does."""
    return str(op._schema).endswith("-> Tensor(a)[]")


def hook_stores(module: torch.nn.Module) -> list[dict[Any, Any]]:
    """A module's own dicts of forward hooks: changing them adds and removes hooks."""
    return [store for name, store in module.__dict__.items() if name.startswith("_forward_") and "hooks" in name]


def tensor_stores(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts in which a module keeps its parameters and its buffers."""
    return module._parameters, module._buffers


def unshare_stores(module: torch.nn.Module) -> None:
    """Give a shallow copy of a module dicts of its own for parameters and buffers, and no forward hooks."""
    module._parameters, module._buffers = dict(module._parameters), dict(module._buffers)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        setattr(module, name, type(getattr(module, name))())


def transient_buffers(module: torch.nn.Module) -> frozenset[str]:
    """Names of a module's own buffers that its state dict leaves out; nn.Module has no public question for this."""
    return frozenset(module._non_persistent_buffers_set)


def mark_parameter(tensor: torch.Tensor) -> None:
    """Make `isinstance(tensor, nn.Parameter)` true for a tensor of a subclass."""
    tensor._is_param = True


def has_state_dict_hook(module: torch.nn.Module, hook: Callable[..., Any]) -> bool:
    """Whether `hook` was registered with `register_state_dict_post_hook`, on this module or the one it is a copy of."""
    return hook in module._state_dict_hooks.values()


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether `isinstance(tensor, nn.Parameter)` holds, for a tensor of a subclass."""
    return getattr(tensor, "_is_param", False)


# --- for eager recording ------------------------------------------------------------------------------------------

function_modes_active: Callable[[], int] = torch._C._len_torch_function_stack
"""How many TorchFunctionModes are entered (a capture, a default device, a user's own): dispatch asks them first."""
autocast_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any kind of device."""


def autocast_reaches(op: OpOverload) -> bool:
    """Whether autocast has a rule for an operator, on any kind of device."""
    keys = [key for key in dir(torch._C.DispatchKey) if key.startswith("Autocast")]
    name = op.name()
    return torch._C._dispatch_has_kernel(name) and any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys
    )


def set_data(symbol: torch.Tensor, other: torch.Tensor) -> None:
    """Give a symbol the metadata that C++ knows of another symbol, as `symbol.data = other` does."""
    with torch._C.DisableTorchFunctionSubclass():
        symbol.data = other


def active_function_modes() -> tuple[Any, ...]:
    """The TorchFunctionModes that are entered, outermost first; a capture's own is not among them while it listens."""
    from torch.overrides import _get_current_function_mode_stack

    return tuple(_get_current_function_mode_stack())


def dispatcher_is_bypassed() -> bool:
    """Whether this thread is inside a reader that switched torch's Python dispatch off, as `torch.tensor([x])` does.

    Fake tensors and traces cannot be made there: they would come out as real ones.
    """
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)


def in_fresh_thread(function: Callable[[], Any]) -> Any:
    """Run a function on a thread of its own, where no dispatch state is inherited, and give its result or error."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)
"""Reshapes that need strides which allow them, and fail otherwise."""


# --- for refusals: torch.compile, torch.func's derivatives, tracers -----------------------------------------------


DYNAMO = "torch.compile"


def tracer_that_looks() -> str | None:
    """Who asks a value now whether it wraps others, where that is a tracer of torch; for `__tensor_flatten__`."""
    if "torch._dynamo.output_graph" in sys.modules and torch._guards.TracingContext.try_get() is not None:
        return DYNAMO
    makes_fakes = "torch._subclasses.meta_utils" in sys.modules and _frame_of(_describing_codes(), 8)
    return "torch.export (or another tracer that works on fake tensors)" if makes_fakes else None


def _frame_of(codes: dict[Any, str], depth: int = 1000) -> str | None:
    """What `codes` says of the innermost frame that runs one of them, among the next `depth` frames."""
    frame: Any = sys._getframe(1)
    while frame is not None and depth:
        name = codes.get(frame.f_code)
        if name is not None:
            return name
        frame, depth = frame.f_back, depth - 1
    return None


@lru_cache(maxsize=1)
def _describing_codes() -> dict[Any, str]:
    from torch._subclasses.meta_utils import MetaTensorDescriber

    return {MetaTensorDescriber.describe_tensor.__code__: "fakes"}


def higher_order_call() -> str | None:
    """The function of torch that is given functions and compiles them, such as `torch.cond`, which runs now."""
    found = None
    frame: Any = sys._getframe(1)
    while frame is not None:
        folder, _, file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")
        if folder.endswith("torch/_higher_order_ops") or file == "flex_attention.py":
            found = frame.f_code.co_name
        frame = frame.f_back
    return found and f"torch.{found}" if found == "cond" else found


def tracer_that_records() -> str | None:
    """The tracer of torch that listens to the operations of this thread now; None without one."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._len_torch_dispatch_stack() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        return "make_fx (or another tracer of torch.fx)" if get_proxy_mode() is not None else None
    return None


@cache
def passes_dynamo(kind: type[Exception]) -> type[Exception]:
    """A subclass of an error class that torch.compile hands on as it is: others it swallows, or calls its own bug."""
    from torch._dynamo.exc import ShortenTraceback

    def __init__(self: Any, message: str) -> None:
        self.message = message
        ShortenTraceback.__init__(self, message, first_useful_frame=None)

    # Dynamo adds to the message where it was and how to debug it: the message has the user's line already.
    args = property(lambda self: (self.message,), lambda self, given: None)
    members = {"__init__": __init__, "args": args, "__module__": kind.__module__}
    return type(kind.__name__, (kind, ShortenTraceback), members)


def derivative_in_progress() -> str | None:
    """The transform of torch that differentiates the code that runs now, such as `torch.func.jvp`; None without one."""
    return _frame_of(_derivative_codes())


@lru_cache(maxsize=1)
def _derivative_codes() -> dict[Any, str]:
    from torch._functorch import eager_transforms
    from torch.autograd import functional

    names = {"grad_and_value_impl": "grad", "_vjp_with_argnums": "vjp", "_jvp_with_argnums": "jvp"}
    found = {inspect.unwrap(getattr(eager_transforms, each)).__code__: f"torch.func.{names[each]}" for each in names}
    for name in ("vjp", "jvp", "vhp", "hvp", "jacobian", "hessian"):
        found[inspect.unwrap(getattr(functional, name)).__code__] = f"torch.autograd.functional.{name}"
    return found


def forward_derivative_functions() -> list[Callable[..., Any]]:
    """Functions that make and take apart dual numbers."""
    return [torch._VF._make_dual, torch._VF._unpack_dual]


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether the tensor is inside `torch.func.grad`, `vjp` or `jvp`."""
    return torch._C._functorch.is_gradtrackingtensor(tensor)


# --- for capture: one call at the level of composite operators, on meta tensors -----------------------------------


class _Unlisted(Exception):
    """A call reached an operator that may not be run on meta tensors here."""


@cache
def _decomposes(op: OpOverload) -> bool:
    """Whether a functional trace takes an operator apart: its schema says that it aliases or writes, or may."""
    from torch._decomp import _should_decompose_because_unsafe_op

    annotated = any(argument.alias_info for argument in op._schema.arguments) or op._schema.is_mutable
    return bool(annotated or _should_decompose_because_unsafe_op(op)) and op._can_decompose()


@cache
def _listener() -> type[Any]:
    from torch._subclasses.schema_check_mode import SchemaCheckMode

    class Listener(SchemaCheckMode):
        """Notes every operator above autograd and autocast. (Torch lets three classes stand there; this is one.)"""

        def __init__(
            self,
            writable: Sequence[torch.Tensor],
            accepts: Callable[[OpOverload], bool],
            shape_rules: Mapping[OpOverload, Any],
        ) -> None:
            super().__init__()
            self._dispatch_key = torch._C.DispatchKey.PreDispatch
            self.accepts, self.shape_rules = accepts, shape_rules
            self.storages = {storage_id(tensor) for tensor in writable}
            self.calls: list[tuple[OpOverload, tuple, dict[str, Any], Any]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if _decomposes(func):
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            written = functional_twin(func)
            if written is not None:
                target = kwargs["out"] if "out" in kwargs else args[0]
                if storage_id(target) in self.storages:
                    rest = {name: item for name, item in kwargs.items() if name != "out"}
                    self.calls.append((func, args, kwargs, self.run(written, args, rest)))
                    return target
                raise _Unlisted
            result = self.run(func, args, kwargs)
            self.calls.append((func, args, kwargs, result))
            return result

        def run(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
            if not self.accepts(func):
                raise _Unlisted
            rule = self.shape_rules.get(func)
            result = rule(*args, **kwargs) if rule is not None else None
            if result is NotImplemented:
                raise _Unlisted
            if result is None:
                with torch._C._DisablePythonDispatcher():
                    result = func(*args, **kwargs)
            return result

    return Listener


@cache
def functional_twin(op: OpOverload) -> OpOverload | None:
    """`aten.add.Tensor` for `aten.add_.Tensor` and for `aten.add.out`: what returns what these write."""
    name, facts = op.overloadpacket.__name__, schema_facts(op)
    if op.namespace != "aten" or not facts.mutates:
        return None
    arguments = op._schema.arguments
    if facts.mutates == (len(arguments) - 1,) and arguments[-1].name == "out" and arguments[-1].kwarg_only:
        given = [(each.name, str(each.type)) for each in arguments[:-1]]
        others = [getattr(op.overloadpacket, overload) for overload in op.overloadpacket.overloads()]
        return next((o for o in others if [(a.name, str(a.type)) for a in o._schema.arguments] == given), None)
    if facts.mutates != (0,) or not name.endswith("_") or name.endswith("__"):
        return None
    return getattr(getattr(torch.ops.aten, name[:-1], None), op._overloadname, None)


def composite_calls(
    function: Callable[[], Any],
    writable: Sequence[torch.Tensor],
    accepts: Callable[[OpOverload], bool],
    shape_rules: Mapping[OpOverload, Any],
) -> tuple[Any, list[tuple[OpOverload, tuple, dict[str, Any], Any]]] | None:
    """Run a function of meta tensors: its result, and the ATen calls that a functional trace of it would hold.

    writable: tensors that may be written in place, they or views of them, and are not: of such a call the functional
    twin's result is noted.
    shape_rules: results of single operators, found without running them (None: run it). None where the function calls
    an operator that is not accepted, or fails, or where torch's state asks for a real trace.
    """
    from torch._dispatch.python import enable_python_dispatcher

    if dispatch_is_changed() or dispatcher_is_bypassed() or function_modes_active() or autocast_is_on():
        return None
    listener = _listener()(writable, accepts, shape_rules)
    try:
        with (
            _FAKES,  # what stands above autograd is one for all threads
            torch.inference_mode(False),
            torch.no_grad(),
            torch._C.DisableTorchFunctionSubclass(),
            enable_python_dispatcher(),
            listener,
        ):
            return function(), listener.calls
    except Exception:  # the real trace follows, and raises what there is to raise
        return None


def is_composite(op: OpOverload) -> bool:
    """Whether an operator is made of others, so that torch can take it apart."""
    return op._can_decompose()


def trace_without_composites(function: Callable[..., Any], tensors: list[torch.Tensor]) -> torch.fx.GraphModule:
    """As `trace_functional`, with composite operators taken apart, and without autocast."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = dispatch_functionalize(function, FunctionalTensorMode())
    with fake_execution(), torch._C._DisableAutocast():
        return make_fx(functional, tracing_mode="real", _error_on_data_dependent_ops=True)(*tensors)


# --- functions of lists of tensors ----------------------------------------------------------------------------------


def foreach_writes() -> dict[Callable[..., Any], Callable[..., Any] | None]:
    """Functions that write a list of tensors in place, which fakes do not count; with what returns a new list."""
    names = [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
    return {getattr(torch, name): getattr(torch, name[:-1], None) for name in names}


# --- for workers: process groups without a global state --------------------------------------------------------------


def make_group(backend: str, store: Any, index: int, size: int, timeout_s: float) -> Any:
    """A process group of its own ("gloo" or "nccl") between `size` members that meet in `store`.

    No default group is needed, groups can be made again after a failure, and each has its own communicator.
    """
    import torch.distributed as dist

    limit = timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, index, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, index, size, options)


def start_all_gather(group: Any, result: torch.Tensor, source: torch.Tensor) -> Any:
    """Start to gather equal parts along dim 0; the work, whose `wait()` ends it."""
    return group._allgather_base(result, source)


def start_reduce_scatter(group: Any, result: torch.Tensor, source: torch.Tensor, op: str) -> Any:
    """Start to reduce and hand out equal chunks of dim 0."""
    import torch.distributed as dist

    options = dist.ReduceScatterOptions()
    options.reduceOp = _reduce_op(op)
    return group._reduce_scatter_base(result, source, options)


def start_all_reduce(group: Any, tensor: torch.Tensor, op: str) -> Any:
    """Start to reduce in place."""
    import torch.distributed as dist

    options = dist.AllreduceOptions()
    options.reduceOp = _reduce_op(op)
    return group.allreduce([tensor], options)


def start_all_to_all(group: Any, result: torch.Tensor, source: torch.Tensor) -> Any:
    """Start to exchange equal chunks of dim 0."""
    return group.alltoall_base(result, source, [], [])


def _reduce_op(op: str) -> Any:
    import torch.distributed as dist

    return {
        "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT,
    }[op]  # fmt: skip


def registering_module(op: str) -> str | None:
    """The Python module whose import registers a custom op ("library::name"), where torch remembers it; else None."""
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton

    definition = OPDEFS.get(op)
    if definition is not None:
        return definition._init_fn.__module__
    for kernel in getattr(singleton.find(op).fake_impl, "kernels", ()):
        path = str(kernel.source).rpartition(":")[0]
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == path:
                return name
    return None


# --- what torch remembers of fakes (for dtorch.capture.forget) --------------------------------------------------------


def forget_fake_results(limit: int) -> None:
    """Empty torch's cache of what operators give for fakes, if it has more entries: torch never does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if len(FakeTensorMode.cache) > limit:
        FakeTensorMode.cache_clear()
