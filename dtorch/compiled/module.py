"""`CompiledModule`: what `dtorch.compile` returns, a module whose forward runs on a mesh.

In: calls like the model's own. Out: the same classes of results. Programs are captured and compiled at the first
call of each kind and kept; the model's attributes are there too (`.config`, `.generate` for transformers).
"""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dtorch.capture.host import Host, convert_host
from dtorch.capture.module import flatten_arguments
from dtorch.capture.structure import Flat
from dtorch.capture.traced import ReadRequest, Traced
from dtorch.compiled.calls import GuardTree, call_key, key_difference, kind_key
from dtorch.compiled.captures import Captures
from dtorch.compiled.inspection import ModuleInspection
from dtorch.compiled.program import Program, state_results
from dtorch.compiled.weights import WeightStore
from dtorch.compiler import Settings, compile_program
from dtorch.errors import InputError, UnsupportedError
from dtorch.mesh import DeviceMesh
from dtorch.options import current, logger
from dtorch.report.inspection import write_dump
from dtorch.runtime.base import Runtime
from dtorch.sharding.requests import Ask, Requests
from dtorch.torch_private import incompatible_keys, parse_to


@dataclass
class Build:
    """What a CompiledModule is made of; put together by `dtorch.api.compile`."""

    host: Host
    mesh: DeviceMesh
    runtime: Runtime
    weights: WeightStore
    asks: Mapping[tuple[str, int], Ask]  # by weight name or input path, and mesh axis
    settings: Settings
    strict: bool = False
    dump: Path | None = None
    title: str = "module"
    dynamic: bool | None = None
    counts: dict[str, int] = field(default_factory=lambda: {"captures": 0, "hits": 0})


class CompiledModule(ModuleInspection, torch.nn.Module):
    """A module compiled for a mesh. Call it as the model; `passes`, `graph` and `diff` show what the compiler did."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.__dict__["_build"] = build
        self.__dict__["_trees"] = OrderedDict()
        self.__dict__["_captures"] = Captures(build.dynamic, build.title, build.counts)
        self.__dict__["_lock"] = threading.RLock()
        self.__dict__["_last"] = None
        self.training = False

    # --- calls ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. torch tensors in, torch tensors out."""
        build = self._build
        flat = flatten_arguments(build.host.module, args, kwargs)
        key = call_key(flat)
        tree = self._trees.get(key)
        program = None if tree is None else tree.find(lambda request: self._evaluate(request, flat))
        if program is None:
            with self._lock, collector_paused():
                program = self._compile(key, flat, args, kwargs)
            try:
                return program(flat)
            except BaseException:
                self._trees.pop(key, None)  # what never worked is not kept
                raise
        build.counts["hits"] += 1
        self.__dict__["_last"] = program
        return program(flat)

    def _compile(self, key: tuple, flat: Flat, args: tuple, kwargs: dict[str, Any]) -> Program:
        build = self._build
        for path, leaf in zip(flat.paths, flat.leaves):
            if leaf.device.type == "meta" and build.mesh.device_type != "meta":
                raise InputError(
                    f"{path} is on the meta device and has no values; {build.title} runs on {build.mesh.summary} of "
                    f"{build.mesh.device_type} devices. Give it a tensor with values."
                )
        logger("recompiles").info("%s: %s", build.title, key_difference(key, [k for k in self._trees], flat.paths))
        read = None if build.strict else (lambda request: self._answer(request, flat))
        kind = kind_key(flat)

        def captured() -> Traced:
            began = time.perf_counter()
            traced = self._captures.capture(build.host, kind, flat, args, kwargs, read)
            traced.time_ms = (time.perf_counter() - began) * 1e3
            return traced

        traced = captured()
        try:
            program = self._build_program(traced, flat)
        except Exception as error:
            if not self._captures.give_up(kind, error):
                raise
            traced = captured()
            program = self._build_program(traced, flat)
        tree = self._trees.setdefault(key, GuardTree())
        tree.add(traced.reads, program)
        while len(self._trees) > current().plan_cache_entries:
            self._trees.popitem(last=False)
        self.__dict__["_last"] = program
        return program

    def _build_program(self, traced: Traced, flat: Flat) -> Program:
        build = self._build
        requests = Requests(
            self._asks(traced, flat), build.mesh.axis_names, build.mesh.shape, state_results(traced.structure)
        )
        compiled = compile_program(traced, requests, build.settings)
        if build.dump is not None:
            write_dump(build.dump, build.title, build.mesh.summary, compiled)
        return Program(compiled, build.runtime, build.weights, flat)

    def _asks(self, traced: Traced, flat: Flat) -> dict[tuple[str, int], Ask]:
        """What is asked of this program's inputs: weights and states stay where they are already placed."""
        build = self._build
        asks: dict[tuple[str, int], Ask] = {}
        leaf_of = {path: index for index, path in enumerate(flat.paths)}
        for spec in traced.signature.inputs:
            placed = None
            if spec.kind in ("weight", "buffer"):
                placed = build.weights.spec(spec.target)
            elif spec.kind in ("state", "user"):
                remote = getattr(flat.leaves[leaf_of[spec.target]], "remote", None)
                placed = None if remote is None else remote.spec
            for axis in range(build.mesh.ndim):
                if placed is not None:
                    asks[spec.name, axis] = Ask(placed[axis], exact=True)
                    continue
                for name in (spec.target, *spec.tied):
                    if (name, axis) in build.asks:
                        asks[spec.name, axis] = build.asks[name, axis]
                        break
        return asks

    def _answer(self, request: ReadRequest, flat: Flat) -> torch.Tensor:
        text = "%s: capture reads a value at %s (%s); one program is kept for each value"
        logger("recompiles").info(text, self._build.title, request.where, request.what)
        return self._evaluate(request, flat)

    def _evaluate(self, request: ReadRequest, flat: Flat) -> torch.Tensor:
        """The value of a guard for this call: on the host where its inputs are, else on the devices."""
        traced = request.program
        if request.only_user_inputs:
            leaf_of = {path: index for index, path in enumerate(flat.paths)}
            inputs = [
                traced.constants[spec.target] if spec.kind == "constant" else flat.leaves[leaf_of[spec.target]].detach()
                for spec in traced.signature.inputs
            ]
            with torch.no_grad():
                return traced.graph(*inputs)[0].clone()
        program = traced.__dict__.get("program")
        if program is None:
            program = traced.__dict__["program"] = self._build_program(traced, flat)
        return program.value(flat).clone()

    @property
    def host_module(self) -> torch.nn.Module:
        """The copy of the model that captures run: symbols in place of weights."""
        return self._build.host.module

    def part(self, path: str) -> CompiledModule:
        """One submodule as a compiled module of its own, on the same weights; `path` is its qualified name."""
        build = self._build
        module = build.host.module.get_submodule(path)
        host = replace(build.host, module=module)
        counts = {"captures": 0, "hits": 0}
        return CompiledModule(replace(build, host=host, title=f"{build.title}.{path}", counts=counts))

    # --- weights --------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Full tensors under the model's own keys."""
        if args or kwargs.get("prefix"):
            raise UnsupportedError("state_dict of a compiled module takes no destination and no prefix.")
        return OrderedDict(self._build.weights.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Replace the weights by full tensors. Raises WeightsError (a RuntimeError) naming all that does not fit."""
        missing, unexpected = self._build.weights.load(state_dict, strict)
        return incompatible_keys(missing, unexpected)

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Replace one weight or buffer by a full tensor of the same shape; later calls use it."""
        self._build.weights.update(name, tensor)

    def parameters(self, recurse: bool = True) -> Any:
        """The parameters as symbols: shape, dtype and device; `state_dict()` has the values."""
        return self._build.host.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Names and symbols of the parameters."""
        return self._build.host.module.named_parameters(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Any:
        """The buffers as symbols."""
        return self._build.host.module.buffers(recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Names and symbols of the buffers."""
        return self._build.host.module.named_buffers(*args, **kwargs)

    # --- like the model -------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> CompiledModule:
        """Change the dtype of floating point weights; programs are compiled again. A device is the mesh's business."""
        device, dtype = parse_to(*args, **kwargs)
        if device is not None and device.type != self._build.mesh.device_type:
            raise UnsupportedError(
                f".to({device}) of a compiled module: its tensors live on {self._build.mesh!r}. "
                f"Compile the model for a mesh of {device.type} devices instead."
            )
        if dtype is not None:
            self._convert(dtype)
        return self

    def _convert(self, dtype: torch.dtype) -> None:
        with self._lock:
            self._build.weights.convert(dtype)
            convert_host(self._build.host, dtype)
            self._trees.clear()
            self._captures.clear()
            self.__dict__["_last"] = None

    def half(self) -> CompiledModule:
        """`.to(torch.float16)`."""
        return self.to(torch.float16)

    def bfloat16(self) -> CompiledModule:
        """`.to(torch.bfloat16)`."""
        return self.to(torch.bfloat16)

    def float(self) -> CompiledModule:
        """`.to(torch.float32)`."""
        return self.to(torch.float32)

    def double(self) -> CompiledModule:
        """`.to(torch.float64)`."""
        return self.to(torch.float64)

    def train(self, mode: bool = True) -> CompiledModule:
        """Compiled modules are for inference: `train(False)` is allowed, `train()` is not."""
        if mode:
            raise UnsupportedError("A compiled module is for inference: train() is not there. Train the model itself.")
        return self

    def requires_grad_(self, requires_grad: bool = True) -> CompiledModule:
        """Refused when True: gradients are out of scope."""
        if requires_grad:
            raise UnsupportedError("A compiled module computes no gradients. Train the model itself.")
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        raise UnsupportedError(
            "A compiled module cannot be copied: its weights are on the devices. Compile the model again; state_dict() "
            "carries the values."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "A compiled module cannot be pickled: its weights are on the devices. Save state_dict(), and compile the "
            "model where it is loaded."
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        build = self.__dict__.get("_build")
        if build is None:
            raise AttributeError(name)
        try:
            return getattr(build.host.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither the compiled module nor {type(build.host.module).__name__} has an attribute {name!r}"
            ) from None

    def __repr__(self) -> str:
        build = self._build
        return f"CompiledModule({build.title} on {build.mesh.summary}, {self.cache_info()['programs']} programs)"


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: looking at a graph's many live objects takes longer than making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
