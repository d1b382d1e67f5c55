"""Values that the model's Python code asks for while it is captured: `bool(x)`, `x.item()`, `x[mask]` and the like.

In: a symbol. Out: a host tensor: computed here when it depends on constants alone, otherwise asked of the
caller by a small program (`ReadRequest`), after which the graph holds for that answer only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dtorch.capture.symbol import Tensor
from dtorch.capture.traced import Read, ReadRequest, Traced
from dtorch.errors import DataDependentError
from dtorch.ir.signature import InputSpec, OutputSpec, Signature

if TYPE_CHECKING:
    from dtorch.capture.record import Recorder

MAX_READ_ELEMENTS = 65536


def host_value(recorder: Recorder, symbol: Tensor, what: str) -> torch.Tensor:
    """The symbol's value as a host tensor; `what` names the Python operation in messages."""
    node = recorder.value(symbol)
    if node in recorder.known:
        return recorder.known[node]
    ancestors = _ancestors(recorder, node)
    inputs = [each for each in ancestors if each.op == "placeholder"]
    depends = [each for each in inputs if recorder.inputs[each].origin.kind != "constant"]
    if not depends:
        return _evaluate(recorder, ancestors, node)
    if recorder.read is None:
        raise DataDependentError(_message(recorder, symbol, what, depends))
    if symbol.meta.numel > MAX_READ_ELEMENTS:
        raise DataDependentError(
            f"{recorder.line()}: {what} needs all {symbol.meta.numel} elements of {symbol.summary} on the host, and "
            f"a graph would "
            f"hold for these values only; the limit is {MAX_READ_ELEMENTS}. Use torch.where or a mask instead."
        )
    request = ReadRequest(
        index=len(recorder.reads),
        where=recorder.line(),
        what=what,
        program=_program(recorder, ancestors, node),
        only_user_inputs=all(recorder.inputs[each].origin.kind == "user" for each in depends),
    )
    value = recorder.read(request)
    recorder.reads.append(Read(request, value))
    recorder.known[node] = value
    return value


def _ancestors(recorder: Recorder, node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that `node` needs, itself included, in an order to run them; values that are known end the search."""
    order: list[torch.fx.Node] = []
    seen: set[torch.fx.Node] = set()
    stack = [(node, False)]
    while stack:
        each, done = stack.pop()
        if done:
            order.append(each)
        elif each not in seen:
            seen.add(each)
            stack.append((each, True))
            if each not in recorder.known:
                stack.extend((other, False) for other in each.all_input_nodes)
    return order


def _evaluate(recorder: Recorder, nodes: list[torch.fx.Node], result: torch.fx.Node) -> torch.Tensor:
    """Run nodes that depend on constants and known values alone."""
    values: dict[torch.fx.Node, torch.Tensor] = {}
    with torch.no_grad():
        for node in nodes:
            if node in recorder.known:
                values[node] = recorder.known[node]
            elif node.op == "placeholder":
                values[node] = recorder.constants[recorder.inputs[node].origin.target]
            else:
                args = torch.fx.node.map_arg(node.args, values.__getitem__)
                kwargs = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    recorder.known[result] = values[result]
    return values[result]


def _program(recorder: Recorder, nodes: list[torch.fx.Node], result: torch.fx.Node) -> Traced:
    """The nodes as a program of their own, with known values as constants."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs: list[InputSpec] = []
    constants: dict[str, torch.Tensor] = {}
    leaves = [node for node in nodes if node.op == "placeholder" or node in recorder.known]
    for node in leaves:
        if node in recorder.known:
            value = recorder.known[node]
            target = f"known_{node.name}"
            constants[target] = value
            spec = InputSpec(target, "constant", target, tuple(value.shape), value.dtype, value.stride())
        else:
            spec = input_spec(recorder, node)
            if spec.kind == "constant":
                constants[spec.target] = recorder.constants[spec.target]
        inputs.append(spec)
        copies[node] = graph.placeholder(spec.name)
        copies[node].meta.update(node.meta)
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output((copies[result],))
    signature = Signature(tuple(inputs), (OutputSpec(result.name),))
    return Traced(torch.fx.GraphModule(torch.nn.Module(), graph), signature, constants)


def input_spec(recorder: Recorder, node: torch.fx.Node) -> InputSpec:
    """The signature's entry for a placeholder of the recorder's graph."""
    symbol = recorder.inputs[node]
    origin, meta = symbol.origin, symbol.meta
    return InputSpec(
        name=node.name,
        kind=origin.kind,
        target=origin.target,
        shape=tuple(meta.shape),
        dtype=meta.dtype,
        stride=meta.stride,
        requires_grad=origin.requires_grad,
        tied=origin.tied,
    )


def _message(recorder: Recorder, symbol: Tensor, what: str, depends: list[torch.fx.Node]) -> str:
    names = ", ".join(node.name for node in depends[:4]) + (", ..." if len(depends) > 4 else "")
    return (
        f"{recorder.line()}: {what} needs the value of {symbol!r}, which depends on {names} and is known only "
        f"when the model "
        "runs. Replace the branch by torch.where or a mask, give the value as a Python argument, or keep this "
        "part of the "
        "model outside the captured module."
    )
