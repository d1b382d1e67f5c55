"""The messages between the controller and the workers: what they are made of, and the check that each must pass.

In: kinds, integers, plain data and bytes. Out: frames for ZeroMQ, and back. Every message carries a magic, a version,
the token of its cluster, a kind and a number that only grows on one connection: what is foreign, damaged, too large or
repeated raises `BadMessage` and is never acted on. Nothing is unpickled: integers are packed, the rest is JSON.
"""

from __future__ import annotations

import ctypes
import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

VERSION = 1
MAGIC = b"DTRC"
TOKEN_BYTES = 16
MOST_FRAMES = 4096
MOST_BYTES = 1 << 30  # of one frame
_HEADER = struct.Struct(f"!4sHH{TOKEN_BYTES}sIQ")  # magic, version, kind, token, sender, number


class Kind(IntEnum):
    """What a message asks for or tells."""

    # controller → worker
    LOAD = 1  # ints: plan number; data: group generation; blob: the plan as JSON
    RUN = 2  # ints: see `pack_run`; data: metadata of inline tensors; blobs: their bytes
    PUT = 3  # ints: value id; data: metadata; blob: bytes
    PUT_PIECE = 4  # ints: value id, offset in the value; then arena offset and length, or a blob
    GET = 5  # ints: value id, request, offset in the value, length, arena offset or -1
    FREE = 6  # ints: value ids
    COPY = 7  # ints: value id of source, value id of copy (same bytes)
    STOP = 8
    BEAT = 9
    ABORT = 10  # give up communication that is under way; data: why
    MODULES = 11  # data: modules to import, since plans use what they register
    UNLOAD = 12  # ints: plan numbers
    PROFILE = 13  # ints: request; and 0 to end and tell
    # controller → hub, besides all of the above for the workers of a lane
    LANE = 20  # ints: number of a lane, the devices that messages to it are for
    START = 21  # data: settings of a worker to start
    KILL = 22  # ints: devices whose workers are to be ended
    WELCOME = 23  # data: what a host needs to know that was let in
    REFUSED = 24  # data: why a host was not let in
    # worker → controller
    HELLO = 32  # data: pid, host, device, torch version
    DONE = 33  # the message numbered ints[0] and all before it are done
    FAILED = 34  # ints: message number, then value ids that will never be there; data: the error
    DATA = 35  # ints: request; data: metadata; blob: bytes unless in the arena
    PULSE = 36  # data: what the worker does now
    LOG = 37  # data: lines, by device
    # hub → controller; what its workers answer goes through it unchanged, but for DONE and PULSE
    JOIN = 38  # data: the host and the devices that it offers
    ACKS = 39  # ints: a lane and the number up to which all of its devices are done, again and again
    LOST = 40  # data: what became of workers, by device
    BYE = 41  # the hub's workers have ended, and so does it


HUB = 1 << 31  # bit of a sender that is a hub, or of an address that is a lane of one: 0 for the hub itself


class BadMessage(ValueError):
    """A message that is not one of ours."""


@dataclass(frozen=True)
class Message:
    """One message, checked. `sender` is the device of the worker it is from or for, or HUB and a number."""

    kind: Kind
    sender: int
    number: int
    ints: array[int]
    data: Any
    blobs: tuple[Any, ...]


def encode(
    token: bytes,
    kind: Kind,
    sender: int,
    number: int,
    ints: Sequence[int] = (),
    data: Any = None,
    blobs: Sequence[Any] = (),
) -> list[Any]:
    """The frames of a message."""
    header = write_header(token, kind, sender, number)
    body = b"" if data is None else json.dumps(data, separators=(",", ":")).encode()
    return [header, array("q", ints).tobytes(), body, *blobs]


def write_header(token: bytes, kind: Kind, sender: int, number: int) -> bytes:
    """The first frame of a message: another one addresses the same frames to somebody else."""
    return _HEADER.pack(MAGIC, VERSION, kind, token, sender, number)


def read_header(token: bytes, frames: Sequence[Any], least_number: int = 0) -> tuple[Kind, int, int]:
    """Check frames without reading their data: kind, sender, number. Raises BadMessage."""
    if not 3 <= len(frames) <= MOST_FRAMES:
        raise BadMessage(f"it has {len(frames)} frames")
    header = frames[0]
    if len(header) != _HEADER.size:
        raise BadMessage(f"its header has {len(header)} bytes, not {_HEADER.size}")
    magic, version, kind, theirs, sender, number = _HEADER.unpack(header)
    if magic != MAGIC:
        raise BadMessage("it is not DTorch's")
    if version != VERSION:
        raise BadMessage(f"it has version {version} and this process speaks {VERSION}: install the same DTorch on both")
    if theirs != token:
        raise BadMessage("it is from another cluster")
    if number < least_number:
        raise BadMessage(f"its number {number} was used before")
    if any(len(frame) > MOST_BYTES for frame in frames):
        raise BadMessage("a frame is too large")
    if len(frames[1]) % 8:
        raise BadMessage("its integers are cut off")
    try:
        return Kind(kind), sender, number
    except ValueError as error:
        raise BadMessage(f"it cannot be read: {error}") from error


def decode(token: bytes, frames: Sequence[Any], least_number: int = 0) -> Message:
    """Check frames and read them. Raises BadMessage saying what is wrong with them."""
    kind, sender, number = read_header(token, frames, least_number)
    packed = array("q")
    packed.frombytes(frames[1])
    body = frames[2]
    try:
        return Message(kind, sender, number, packed, json.loads(bytes(body)) if len(body) else None, tuple(frames[3:]))
    except ValueError as error:
        raise BadMessage(f"it cannot be read: {error}") from error
    except RecursionError as error:
        raise BadMessage("its data is nested too deep") from error


# --- runs -----------------------------------------------------------------------------------------------------------


def pack_run(plan: int, arguments: Sequence[int], results: Sequence[int], frees: Sequence[int]) -> array[int]:
    """A step: plan number, argument ids (-1-i: inline tensor i), result ids, ids to free before it runs."""
    packed = array("q", (plan, len(arguments), len(results)))
    packed.extend(arguments)
    packed.extend(results)
    packed.extend(frees)
    return packed


def unpack_run(ints: array[int]) -> tuple[int, array[int], array[int], array[int]]:
    """Plan number, argument ids, result ids, ids to free. Raises BadMessage where the counts do not fit."""
    if len(ints) < 3 or min(ints[1], ints[2]) < 0 or 3 + ints[1] + ints[2] > len(ints):
        raise BadMessage("a run whose counts do not fit")
    split, end = 3 + ints[1], 3 + ints[1] + ints[2]
    return ints[0], ints[3:split], ints[split:end], ints[end:]


# --- tensors as bytes -----------------------------------------------------------------------------------------------


def describe(tensor: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    """(dtype, shape, order of dims in memory, requires_grad) and the dense tensor whose bytes are to be sent."""
    order = list(range(tensor.dim()))
    dense = tensor.detach()
    if not dense.is_contiguous():
        order.sort(key=lambda dim: (-dense.stride(dim), dim))
        dense = dense.permute(order).contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    return [name, list(tensor.shape), order, bool(tensor.requires_grad)], dense


def blank(meta: Any, device: torch.device | str = "cpu") -> torch.Tensor:
    """An uninitialised dense tensor for bytes described by `meta`; `shaped` gives it its dims."""
    dtype, shape, order, _ = read_meta(meta)
    return torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)


def shaped(dense: torch.Tensor, meta: Any) -> torch.Tensor:
    """The tensor that was described, from its dense bytes in memory order."""
    _, _, order, grad = read_meta(meta)
    if order != list(range(len(order))):
        inverse = [0] * len(order)
        for position, dim in enumerate(order):
            inverse[dim] = position
        dense = dense.permute(inverse)
    return dense.requires_grad_() if grad else dense


def read_meta(meta: Any) -> tuple[torch.dtype, list[int], list[int], bool]:
    """Check the metadata of a tensor. Raises BadMessage where it describes none."""
    try:
        name, shape, order, grad = meta
        dtype = getattr(torch, name)
        good = isinstance(dtype, torch.dtype) and all(type(size) is int and size >= 0 for size in shape)
        if not good or sorted(order) != list(range(len(shape))):
            raise BadMessage(f"no tensor is {meta!r}")
    except (TypeError, ValueError, AttributeError) as error:
        raise BadMessage(f"no tensor is {meta!r}") from error
    return dtype, list(shape), list(order), bool(grad)


def as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat uint8 tensor that shares them."""
    if not dense.numel():
        return torch.empty(0, dtype=torch.uint8, device=dense.device)
    # not `view`: a tensor of one element counts as contiguous whatever its strides
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def as_buffer(data: torch.Tensor) -> Any:
    """Flat uint8 bytes as a frame to send; `data` must live until then."""
    return (ctypes.c_char * data.numel()).from_address(data.data_ptr()) if data.numel() else b""


def from_blob(blob: Any, meta: Any, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor of its own from a frame's bytes. Raises BadMessage where they are too few or too many."""
    dense = blank(meta, "cpu")
    data = as_bytes(dense)
    if len(blob) != data.numel():
        raise BadMessage(f"{len(blob)} bytes for a tensor of {data.numel()}")
    if len(blob):
        data.copy_(torch.frombuffer(blob if not isinstance(blob, bytes) else bytearray(blob), dtype=torch.uint8))
    return shaped(dense.to(device), meta)
