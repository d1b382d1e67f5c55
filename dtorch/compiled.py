"""`CompiledModule`: what `dtorch.compile` returns, a module whose forward runs on a mesh.

In: calls like the model's own. Out: the same classes of results. Programs are captured and compiled at the first
call of each kind and kept; the model's attributes are there too (`.config`, `.generate` for transformers).
"""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dtorch.calls import GuardTree, call_key, key_difference
from dtorch.capture.host import Host, convert_host
from dtorch.capture.module import capture_module, flatten_arguments
from dtorch.capture.structure import Flat
from dtorch.capture.traced import ReadRequest, Traced
from dtorch.compiler import Settings, compile_program
from dtorch.errors import InputError, UnsupportedError
from dtorch.ir.snapshot import Snapshot
from dtorch.mesh import DeviceMesh
from dtorch.options import current, logger
from dtorch.program import Program, state_results
from dtorch.report.diff import diff_snapshots, find_snapshot
from dtorch.report.dump import fresh_directory, write_dumps
from dtorch.report.table import PassTable
from dtorch.runtime.base import Runtime
from dtorch.sharding.requests import Ask, Requests
from dtorch.torch_private import incompatible_keys, parse_to
from dtorch.weights import WeightStore

CaptureFunction = Callable[[Host, tuple, dict[str, Any], Callable[[ReadRequest], torch.Tensor] | None], Traced]


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
    capture: CaptureFunction | None = None
    counts: dict[str, int] = field(default_factory=lambda: {"captures": 0, "hits": 0})


class CompiledModule(torch.nn.Module):
    """A module compiled for a mesh. Call it as the model; `passes`, `graph` and `diff` show what the compiler did."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.__dict__["_build"] = build
        self.__dict__["_trees"] = OrderedDict()
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
        else:
            build.counts["hits"] += 1
            self.__dict__["_last"] = program
        return program(flat)

    def _compile(self, key: tuple, flat: Flat, args: tuple, kwargs: dict[str, Any]) -> Program:
        build = self._build
        logger("recompiles").info("%s: %s", build.title, key_difference(key, [k for k in self._trees], flat.paths))
        read = None if build.strict else (lambda request: self._answer(request, flat))
        capture = build.capture or capture_statically
        traced = capture(build.host, args, kwargs, read)
        build.counts["captures"] += 1
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
            self._asks(traced, flat), axis_names(build.mesh), build.mesh.shape, state_results(traced.structure)
        )
        compiled = compile_program(traced, requests, build.settings)
        if build.dump is not None:
            self._write_dump(build.dump, compiled)
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
        logger("recompiles").info(
            "%s: capture reads a value at %s (%s); one program is kept for each value", self._build.title, request.where,
            request.what,
        )
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
        return CompiledModule(replace(build, host=host, title=f"{build.title}.{path}", counts={"captures": 0, "hits": 0}))

    # --- weights --------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Full tensors under the model's own keys."""
        if args or kwargs.get("prefix"):
            raise UnsupportedError("state_dict of a compiled module takes no destination and no prefix.")
        return OrderedDict(self._build.weights.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Replace the weights by full tensors. Raises WeightsError (a RuntimeError) that names all that does not fit."""
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

    # --- what the compiler did ------------------------------------------------------------------------------------

    def passes(self) -> PassTable:
        """The table of stages and passes of the program last used."""
        compiled = self._program().compiled
        return PassTable(tuple(compiled.records), tuple(snapshot.stage for snapshot in compiled.snapshots))

    def graph(self, at: str = "lower") -> torch.fx.GraphModule:
        """The graph of the program last used, as it was after a stage or pass (`.passes()` lists them)."""
        return self._snapshot(at).graph_module()

    def graph_text(self, at: str = "lower") -> str:
        """That graph as text, one line a node."""
        return self._snapshot(at).text()

    def diff(self, before: str, after: str) -> str:
        """A unified diff of two stages of the program last used."""
        return diff_snapshots(self._snapshot(before), self._snapshot(after))

    def plan(self) -> Any:
        """The plan of the program last used: pure data."""
        return self._program().compiled.plan

    def placements(self) -> dict[str, tuple]:
        """Public placements of the weights of the program last used, by name."""
        from dtorch.ir.spec import from_spec

        return {item.target: from_spec(item.spec) for item in self.plan().inputs if item.kind in ("weight", "buffer")}

    def cache_info(self) -> dict[str, int]:
        """How many captures there were, how many calls hit a compiled program, how many programs are kept."""
        kept = sum(1 for tree in self._trees.values() for _ in tree.programs())
        return {**self._build.counts, "programs": kept}

    def _program(self) -> Program:
        if self._last is None:
            raise InputError("Nothing is compiled yet: call the module once, then look at its passes and graphs.")
        return self._last

    def _snapshot(self, stage: str) -> Snapshot:
        return find_snapshot(self._program().compiled.snapshots, stage)

    def _write_dump(self, folder: Path, compiled: Any) -> None:
        table = PassTable(tuple(compiled.records))
        summary = {
            "title": self._build.title,
            "mesh": self._build.mesh.summary,
            "plan": compiled.plan.digest,
            "seconds": compiled.seconds,
            "passes": table.as_dicts(),
        }
        try:
            where = fresh_directory(folder, self._build.title)
        except OSError:
            where = folder
        write_dumps(where, compiled.snapshots, summary)
        self._build.counts["dumps"] = self._build.counts.get("dumps", 0) + 1

    # --- like the model -------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> CompiledModule:
        """Change the dtype of floating point weights; programs are compiled again. A device is the mesh's business."""
        device, dtype = parse_to(*args, **kwargs)
        if device is not None and device.type != self._build.mesh.device_type:
            raise UnsupportedError(
                f".to({device}) of a compiled module: its tensors live on {self._build.mesh!r}. Compile the model for a mesh "
                f"of {device.type} devices instead."
            )
        if dtype is not None:
            self._convert(dtype)
        return self

    def _convert(self, dtype: torch.dtype) -> None:
        with self._lock:
            self._build.weights.convert(dtype)
            convert_host(self._build.host, dtype)
            self._trees.clear()
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
            raise UnsupportedError("A compiled module runs inference only: train() is not there. Train the model itself.")
        return self

    def requires_grad_(self, requires_grad: bool = True) -> CompiledModule:
        """Refused when True: gradients are out of scope."""
        if requires_grad:
            raise UnsupportedError("A compiled module computes no gradients. Train the model itself.")
        return self

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


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes; axes without one are called by their position."""
    return mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: graphs are many live objects, and looking at them all takes longer than
    making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture_statically(host: Host, args: tuple, kwargs: dict[str, Any], read: Any) -> Traced:
    """Capture by recording the forward."""
    return capture_module(host, args, kwargs, read=read)

