"""An exception of a worker, raised again here as itself.

In: what the worker told of it. Out: an exception of the same built-in class, with kernel, device and the user's line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.errors import DeviceError

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (IndexError, ValueError, RuntimeError, TypeError, NotImplementedError, ZeroDivisionError, OverflowError)
}
_KINDS["OutOfMemoryError"] = torch.OutOfMemoryError


def rebuilt(
    told: Any, device: int, device_type: str, line_of: Callable[[int], str | None] = lambda value: None
) -> Exception:
    """The exception. What is no built-in one is a DeviceError that names it.

    line_of: the line that made a value, by its id; for what was in memory when none was left.
    """
    told = told if isinstance(told, dict) else {}
    name, message = str(told.get("type")), str(told.get("message"))
    where = f"\n  on device {device_type}:{device}" if device_type else f"\n  on device {device}"
    if told.get("kernel"):
        line = told.get("where") or "a line that is not known"
        where = f"\n  in {told['kernel']} on device {device_type}:{device}, from {line}"
    for size, value in told.get("largest") or ():
        where += f"\n  there was {size / 2**20:.1f} MiB from {line_of(value) or 'the host'}"
    kind = _KINDS.get(name)
    if kind is not None:
        return kind(message + where)
    return DeviceError((message if name == "DeviceError" else f"{name}: {message}") + where)
