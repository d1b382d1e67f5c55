"""Every error and warning that DTorch raises on purpose, and the search for near misses their messages use.

In: nothing. Out: exception classes; each derives from `DTorchError` and from the built-in class that code
written for plain PyTorch would catch. docs/errors.md explains each with an example.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DTorchError(Exception):
    """The base of all errors that DTorch raises on purpose.

    Catch it to handle whatever DTorch refuses; the message names what to change.
    """

    def __str__(self) -> str:
        # WeightsError is also a KeyError, whose own __str__ would print repr(message): newlines as "\\n".
        return str(self.args[0]) if len(self.args) == 1 else Exception.__str__(self)


class OptionError(DTorchError, ValueError):
    """An option or a DTORCH_* environment variable is unknown or has a value that does not fit.

    Use one of the names or values that the message lists.
    """


class MeshError(DTorchError, ValueError):
    """A device mesh cannot be made or has no such axis: repeated ids, a name used twice, an absent device type.

    Correct the ids, shape or names given to `DeviceMesh` / `init_device_mesh`, or use an axis that is listed.
    """


class PlacementError(DTorchError, ValueError):
    """Placements do not fit the mesh or the tensor: too many, an unknown axis, Shard beyond the tensor's rank.

    Give one placement for each mesh axis, or a dict by axis name; axes that a dict leaves out are Replicate.
    """


class InputError(DTorchError, ValueError):
    """An argument does not fit what it is given to: wrong dtype, shape, device, count or name.

    Pass the argument that the message describes; for a compiled module, compile again with an example of it.
    """


class ShardingError(DTorchError, ValueError):
    """No legal placement exists for an op with the placements its inputs have, or a sharding rule is malformed.

    Redistribute an input to one of the placements that the message lists, or correct the rule.
    """


class UnsupportedError(DTorchError, NotImplementedError):
    """DTorch knows what is asked for and cannot do it yet.

    Take the way around that the message names.
    """


class DeviceError(DTorchError, RuntimeError):
    """A device failed, ran out of memory or is gone while a plan ran on it.

    Read the cause that follows; results of the failed step are lost, earlier ones are kept.
    """


class ValueLostError(DeviceError):
    """A value was on a worker that was lost, and nothing is left to make it again from.

    Compute it again from values that are there; weights given as files (`weights=`) are read again by themselves.
    """


class CaptureError(DTorchError, RuntimeError):
    """The model could not be turned into a graph: it does at capture what a graph cannot hold.

    The message names the line of the model; change that line, or capture a smaller module.
    """


class DataDependentError(CaptureError):
    """The model's Python code branched on, or sized a tensor by, a value that exists only when it runs.

    Replace the branch by `torch.where` or a mask, or keep this part of the model outside the compiled module.
    """


class PassError(DTorchError, RuntimeError):
    """A pass failed, is unknown, is registered twice or stands in an order that cannot work.

    If the pass is yours, mend it; if it is DTorch's, leave it out by name and report it with the dump.
    """


class VerifyError(PassError):
    """A graph broke a rule of its level; the pass that ran last is named, with the node and its neighbours.

    If the pass is yours, mend it; if it is DTorch's, this is a bug: report it with the dump.
    """


class PlanError(DTorchError, RuntimeError):
    """A plan cannot be made, read or run: a kernel it names is unknown, or it was written by another version.

    Compile again instead of reading the saved plan.
    """


class WeightsError(DTorchError, RuntimeError, KeyError):
    """A state dict or a weights file does not fit the model: missing, extra, misshapen or corrupt tensors.

    All of them are listed at once and nothing was loaded; correct the file, or load it with `strict=False`.
    """


class CaptureWarning(UserWarning):
    """A forward keeps Python state from call to call, which a compiled module forgets: every call runs as the first.

    Keep the state in a buffer that forward writes into, or call the model once before `compile`.
    """


class ShardingWarning(UserWarning):
    """An op is run whole on every device because no sharding rule covers it: correct, but slower.

    Register a rule with `dtorch.register_sharding_rule`, or pass `strict=True` to make this an error.
    """


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The up to `count` of `names` that are most like `name`, best first; for "did you mean" in messages."""
    choices = list(dict.fromkeys(str(choice) for choice in names))
    by_folded = {choice.casefold(): choice for choice in reversed(choices)}
    found = difflib.get_close_matches(str(name).casefold(), by_folded, n=count, cutoff=0.5)
    return [by_folded[match] for match in found]
