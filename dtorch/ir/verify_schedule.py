"""What the verifier asks of scheduled graphs alone: streams, events, storage classes, no write before a read.

In: the nodes of a scheduled graph. Out: nothing, or the failure of the first node that breaks a rule. Whether one
node runs before another is decided by streams and events (a clock for each pair of streams), not by list order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, NoReturn

from torch import Tensor
from torch.fx import Node

from dtorch.ir import schema
from dtorch.ir.ops import keep_first
from dtorch.ir.text import value_text

Fail = Callable[[Node, str], NoReturn]
Clock = dict[str, int]  # stream → position of its last node that is known to have finished


def check_schedule(
    nodes: list[Node], axis_sizes: Mapping[str, int] | None, fail: Fail, donated: Set[str] | None = None
) -> None:
    """Check every node's stream, the events of its cross-stream operands, its storage and what it overwrites.

    `donated`: names of the inputs whose bytes may be overwritten, if they are known.
    """
    positions = {node.name: index for index, node in enumerate(nodes)}
    clocks: dict[str, Clock] = {}
    at: list[Clock] = []
    sharers: dict[Node, list[Node]] = {}
    for position, node in enumerate(nodes):
        at.append({})
        if node.op != "call_function":
            _check_storage(node, fail)
            sharers[node] = [node]
            continue
        if isinstance(schema.value(node), (Tensor, tuple, list)):
            own = _check_stream(node, axis_sizes, fail)
        else:
            continue  # integers of the mesh coordinate are known before the plan runs
        clock = clocks.setdefault(own, {})
        for name in schema.after(node):
            if positions.get(name, position) >= position:
                fail(node, f"waits for %{name}, which is not an earlier node")
            event = nodes[positions[name]]
            clock = _joined(clock, at[positions[name]], {schema.stream(event): positions[name]})
        for operand in node.all_input_nodes:
            if operand.op == "placeholder" or not isinstance(schema.value(operand), (Tensor, tuple, list)):
                continue
            if schema.stream(operand) != own and clock.get(schema.stream(operand), -1) < positions[operand.name]:
                fail(
                    node,
                    f"runs on {own} and reads %{operand.name} of {schema.stream(operand)} without an event between: "
                    f'add "{operand.name}" to meta["after"]',
                )
        _check_storage(node, fail)
        source = node.args[0] if node.target is keep_first else schema.alias_source(node)
        sharers[node] = sharers[source] if source is not None else [node]
        if source is not None:
            sharers[node].append(node)
        for written in schema.written_operands(node):
            _check_written(node, written, sharers, donated, fail)
            _check_overwrite(node, written, sharers, clock, positions, fail)
        clock = _joined(clock, {own: position})
        clocks[own] = at[position] = clock


def _check_stream(node: Node, axis_sizes: Mapping[str, int] | None, fail: Fail) -> str:
    stream = node.meta.get("stream")
    kind, _, axis = str(stream).partition(":")
    if stream is None:
        fail(node, 'has no meta["stream"]')
    if stream != schema.STREAM_COMPUTE and (kind != "comm" or not axis):
        fail(node, f'runs on stream {stream!r}; streams are "compute" and "comm:<axis>"')
    if axis and axis_sizes is not None and axis not in axis_sizes:
        fail(node, f'runs on stream "{stream}"; the mesh axes are {", ".join(axis_sizes)}')
    return stream


def _check_storage(node: Node, fail: Fail) -> None:
    if node.op == "output" or not isinstance(schema.value(node), Tensor):
        return
    storage = schema.storage(node)
    if storage not in schema.STORAGES:
        fail(node, f"has storage {storage!r}; storage classes are {', '.join(schema.STORAGES)}")
    if (node.op == "placeholder") != (storage == "argument"):
        fail(node, f'has storage "{storage}"; inputs of the graph, and only they, are "argument"')
    if storage == "view" and schema.alias_source(node) is None:
        fail(node, f'has storage "view", but {node.target} makes a value of its own')
    writes = bool(schema.written_operands(node))
    if (storage == "inplace") != writes:
        fail(node, f'has storage "{storage}", but {node.target} {"writes" if writes else "does not write"} in place')


def _check_written(
    node: Node, written: Node, sharers: dict[Node, list[Node]], donated: Set[str] | None, fail: Fail
) -> None:
    """The memory must be the plan's to write, hold exactly the result, and not be read in another layout meanwhile."""
    owner = sharers[written][0]
    if owner.op == "placeholder" and donated is not None and owner.name not in donated:
        fail(node, f"writes into the memory of input %{owner.name}, which is not donated")
    for operand in node.all_input_nodes:
        if operand is not written and operand in sharers[written]:
            fail(node, f"writes into %{written.name} while it reads the same memory as %{operand.name}")
    result, old = schema.value(node), schema.value(written)
    if not isinstance(result, Tensor) or not isinstance(old, Tensor):
        return
    same = result.dtype == old.dtype and schema.same_sizes(result.shape, old.shape)
    if not same or not schema.same_sizes(result.stride(), old.stride()):
        fail(node, f"is {value_text(result)} and cannot lie in the memory of %{written.name}, {value_text(old)}")


def _check_overwrite(
    node: Node, written: Node, sharers: dict[Node, list[Node]], clock: Clock, positions: dict[str, int], fail: Fail
) -> None:
    """Every other reader of the memory must have finished; later ones must read the new value."""
    for sharer in sharers[written]:
        if sharer is node:
            continue
        for reader in sharer.users:
            if reader is node:
                continue
            if positions[reader.name] > positions[node.name]:
                fail(node, f"overwrites %{sharer.name}, which %{reader.name} reads later")
            other = schema.stream(reader)
            if isinstance(schema.value(reader), (Tensor, tuple, list)) and other != schema.stream(node):
                if clock.get(other, -1) < positions[reader.name]:
                    fail(node, f"overwrites %{sharer.name} while %{reader.name} may still read it on {other}")


def _joined(*clocks: Mapping[str, Any]) -> Clock:
    joined: Clock = {}
    for clock in clocks:
        for stream, position in clock.items():
            joined[stream] = max(position, joined.get(stream, -1))
    return joined
