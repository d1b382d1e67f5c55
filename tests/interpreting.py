"""Run a captured program on real tensors with torch.fx.Interpreter, as the compiled module will on its devices.

In: a Traced, the model it came from and arguments. Out: the user's result, with mutations written back to
model and arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dtorch.capture.module import capture_module, flatten_arguments
from dtorch.capture.structure import Flat, flatten
from dtorch.capture.traced import ReadRequest, Traced


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by every name they have."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def run_graph(traced: Traced, model: nn.Module, given: Flat) -> list[torch.Tensor]:
    """The graph's flat outputs."""
    stored, users = stored_tensors(model), dict(zip(given.paths, given.leaves, strict=True))
    inputs = []
    for spec in traced.signature.inputs:
        source = {"user": users, "state": users, "constant": traced.constants}.get(spec.kind, stored)
        inputs.append(source[spec.target])
        assert tuple(inputs[-1].shape) == spec.shape and inputs[-1].dtype == spec.dtype
    with torch.no_grad():
        return list(torch.fx.Interpreter(traced.graph).run(*inputs))


def run_traced(traced: Traced, model: nn.Module, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Call the captured program like the model, mutations included."""
    given = flatten_arguments(model, args, kwargs or {})
    outputs = run_graph(traced, model, given)
    stored, users = stored_tensors(model), dict(zip(given.paths, given.leaves, strict=True))
    results = [out for out, spec in zip(outputs, traced.signature.outputs, strict=True) if spec.mutates is None]
    with torch.no_grad():
        for output, spec in zip(outputs, traced.signature.outputs, strict=True):
            if spec.mutates is not None:
                source = traced.signature.by_name[spec.mutates]
                (users if source.kind in ("user", "state") else stored)[source.target].copy_(output)
    return traced.structure.rebuild(results, given)


def answering(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Callable[[ReadRequest], torch.Tensor]:
    """A read callback that runs the request's program on the host."""

    def read(request: ReadRequest) -> torch.Tensor:
        return run_graph(request.program, model, flatten_arguments(model, args, kwargs))[0]

    return read


def captured(model: nn.Module, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Traced:
    """Capture statically, with values read on the host; and check what every global graph promises."""
    traced = capture_module(model, args, kwargs, read=answering(model, args, kwargs or {}))
    check_graph(traced)
    return traced


def check_graph(traced: Traced) -> None:
    """Placeholders match the signature, the body is ATen, every node has a value, nothing is dead."""
    nodes = list(traced.graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    assert nodes[: len(placeholders)] == placeholders
    assert [node.name for node in placeholders] == [spec.name for spec in traced.signature.inputs]
    (output,) = [node for node in nodes if node.op == "output"]
    assert [node.name for node in output.args[0]] == [spec.name for spec in traced.signature.outputs]
    for node in nodes[len(placeholders) : -1]:
        assert node.op == "call_function"
        assert isinstance(node.target, torch._ops.OpOverload) or node.target.__name__ == "getitem"
        assert node.users
        assert "val" in node.meta
    for spec in traced.signature.outputs:
        assert spec.mutates is None or spec.mutates in traced.signature.by_name
    traced.graph.graph.lint()


def assert_same(actual: Any, expected: Any, strides: bool = True) -> None:
    """Equal bit for bit, in objects of the same structure and types."""
    left, right = flatten(actual), flatten(expected)
    assert left.tree == right.tree
    for one, other in zip(left.leaves, right.leaves, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (
            torch.equal(one, other)
            or (one != one).equal(other != other)
            and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
        assert not strides or significant_strides(one) == significant_strides(other)


def significant_strides(tensor: torch.Tensor) -> list[int]:
    """Strides of the dims that are stepped over."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1] if tensor.numel() else []
