"""One compiled program of a module, ready to be called: binds arguments and weights, runs, hands results back.

In: a `Compiled` plan, the runtime, the module's weights. Out: the user's results for a call's flattened arguments;
new values of arguments, buffers and states are written back where they belong.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch import watch
from dtorch.capture.structure import Container, Flat, Leaf, Structure
from dtorch.capture.symbol import make, tensor_meta
from dtorch.compiled.weights import WeightStore
from dtorch.compiler import Compiled
from dtorch.errors import InputError
from dtorch.ir.layout import Whole
from dtorch.ir.plan import PlanOutput
from dtorch.options import progress
from dtorch.runtime.base import RemoteValue, Runtime


class Program:
    """A plan on a runtime, with everything that does not change from call to call looked up."""

    def __init__(self, compiled: Compiled, runtime: Runtime, weights: WeightStore, flat: Flat) -> None:
        self.compiled, self.runtime, self.weights = compiled, runtime, weights
        self.loaded = runtime.load(compiled.plan)
        self.structure: Structure | None = compiled.traced.structure
        leaf_of = {path: index for index, path in enumerate(flat.paths)}
        plan = compiled.plan
        self._fixed: list[Any] = [None] * len(plan.inputs)
        self._weights: list[tuple[int, str, Any]] = []
        self._given: list[tuple[int, int, Any]] = []
        self._states: list[tuple[int, int]] = []
        self._leaf_of_input: dict[str, int] = {}
        for position, item in enumerate(plan.inputs):
            if item.kind == "constant":
                self._fixed[position] = runtime.place(compiled.traced.constants[item.target], item.spec)
            elif item.kind in ("weight", "buffer"):
                self._weights.append((position, item.target, item.spec))
            else:
                self._leaf_of_input[item.name] = leaf_of[item.target]
                if flat.leaves and getattr(flat.leaves[leaf_of[item.target]], "remote", None) is not None:
                    self._states.append((position, leaf_of[item.target]))
                else:
                    whole = all(type(placed) is Whole for placed in item.spec)
                    self._given.append((position, leaf_of[item.target], None if whole else item.spec))
        self._weights_version = -1
        self._targets = {item.name: item for item in plan.inputs}
        self._results = [(index, item) for index, item in enumerate(plan.outputs) if item.mutates is None]
        self._mutations = [(index, item) for index, item in enumerate(plan.outputs) if item.mutates is not None]
        self._changes_weights = any(
            self._targets[item.mutates or ""].kind in ("weight", "buffer") for _, item in self._mutations
        )
        self._written = [
            self._leaf_of_input[item.mutates or ""]
            for _, item in self._mutations
            if self._targets[item.mutates or ""].kind == "user"
        ]
        self._stays = state_results(self.structure)
        self._copied = [item.aliases is not None and self._is_owned(item) for _, item in self._results]

    def _is_owned(self, item: PlanOutput) -> bool:
        source = self._targets.get(item.aliases or "")
        return source is not None and source.kind != "user"

    def __call__(self, flat: Flat) -> Any:
        """Run for one call's arguments; the user's result object."""
        outputs = self.run(flat)
        results = []
        for number, ((index, item), copied) in enumerate(zip(self._results, self._copied)):
            data = outputs[index]
            if number in self._stays:
                results.append(device_tensor(RemoteValue(self.runtime, item.shape, item.dtype, item.spec, data)))
            else:
                value = self.runtime.gather(data, item.shape, item.dtype, item.spec)
                results.append(value.clone() if copied else value)
        assert self.structure is not None
        return self.structure.rebuild(results, flat)

    def value(self, flat: Flat) -> torch.Tensor:
        """Run a program that computes one value for the host, and change nothing."""
        outputs = self._launch(flat)
        item = self.compiled.plan.outputs[0]
        return self.runtime.gather(outputs[0], item.shape, item.dtype, item.spec)

    def run(self, flat: Flat) -> Any:
        """Run and write new values back; the plan's outputs. Threads whose calls change buffers take turns."""
        if not self._changes_weights:
            return self._run(flat)
        with self.weights.lock:
            return self._run(flat)

    def _refuse_overlaps(self, flat: Flat) -> None:
        """A write into one argument would have to show in the other, and devices hold them apart."""
        for index in self._written:
            for other in set(self._leaf_of_input.values()) - {index}:
                if share_elements(flat.leaves[index], flat.leaves[other]):
                    raise InputError(
                        f"forward writes into the argument {flat.paths[index]}, which shares memory with "
                        f"{flat.paths[other]}: the write would not reach it. Pass {flat.paths[other]}.clone()."
                    )

    def _run(self, flat: Flat) -> Any:
        if self._written:
            self._refuse_overlaps(flat)
        outputs = self._launch(flat)
        for index, item in self._mutations:
            target = self._targets[item.mutates or ""]
            if target.kind in ("weight", "buffer"):
                self.weights.set_data(target.target, outputs[index])
                continue
            leaf = flat.leaves[self._leaf_of_input[target.name]]
            remote = getattr(leaf, "remote", None)
            if remote is not None:
                remote.data = outputs[index]
            else:
                with torch.no_grad():
                    leaf.detach().copy_(self.runtime.gather(outputs[index], item.shape, item.dtype, item.spec))
        return outputs

    def _launch(self, flat: Flat) -> Any:
        if watch.WATCHES:
            watch.ran(self.compiled.plan.instructions)
        return self.loaded.run(self._inputs(flat))

    def _inputs(self, flat: Flat) -> list[Any]:
        if self._weights_version != self.weights.version:
            unplaced = any(self.weights.spec(target) is None for _, target, _ in self._weights)
            found = progress(self._weights, desc="placing weights") if unplaced else self._weights
            for position, target, spec in found:
                self._fixed[position] = self.weights.data(target, spec)
            self._weights_version = self.weights.version
        inputs = list(self._fixed)
        leaves, lend = flat.leaves, self.runtime.lend
        for position, index, spec in self._given:
            leaf = leaves[index]
            inputs[position] = leaf.detach() if spec is None else lend(leaf.detach(), spec)
        for position, index in self._states:
            inputs[position] = leaves[index].remote.data
        return inputs


def share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors have an element in common; of two dtypes on one memory it is taken for granted."""
    if getattr(one, "remote", None) is not None or getattr(other, "remote", None) is not None:
        return False
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or not (one.numel() and other.numel()):
        return False
    if one.dtype is not other.dtype:
        return True
    marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def state_results(structure: Structure | None) -> frozenset[int]:
    """Numbers of the results that stay on the devices: those that go into a state's place."""
    if structure is None:
        return frozenset()
    found: set[int] = set()
    stack = [structure.tree, *structure.effects]
    while stack:
        tree = stack.pop()
        if type(tree) is Leaf and tree.state:
            found.add(tree.index)
        elif type(tree) is Container:
            stack.extend(tree.children)
    return frozenset(found)


def device_tensor(remote: RemoteValue) -> Any:
    """A `dtorch.Tensor` whose value is on the devices: metadata here, `full_tensor()` fetches."""
    strides, step = [0] * len(remote.shape), 1
    for dim in reversed(range(len(remote.shape))):
        strides[dim] = step
        step *= max(1, remote.shape[dim])
    tensor = make(tensor_meta(remote.shape, strides, remote.dtype, torch.device("cpu")), None)
    tensor.remote = remote
    return tensor
