"""Every option of DTorch: its environment variable, default, unit and meaning; and what logs and progress obey.

In: DTORCH_* variables, read once, and `override(...)` blocks. Out: `current()`, a frozen `Options`;
`logger(name)`, a standard logger that DTORCH_LOGS switches; `progress(...)`, one bar when somebody watches.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import Field, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, TypeVar

from dtorch.errors import OptionError, nearest

T = TypeVar("T")

LOG_NAMES = ("graph", "passes", "placements", "comm", "recompiles", "workers")
WORKERS = ("auto", "simulated", "process")
_LOG_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}


def _flag(text: str) -> bool:
    folded = text.strip().casefold()
    if folded in ("1", "true", "on", "yes"):
        return True
    if folded in ("", "0", "false", "off", "no"):
        return False
    raise ValueError("use 1 or 0")


def _workers(text: str) -> str:
    """The reference's 1 and 0, or a word."""
    folded = text.strip().casefold()
    return folded if folded in WORKERS else "process" if _flag(text) else "auto"


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _option(default: Any, variable: str, parse: Callable[[str], Any], doc: str) -> Any:
    return field(default=default, metadata={"variable": variable, "parse": parse, "doc": doc})


@dataclass(frozen=True)
class Options:
    """All options. Set one for the process by its environment variable, for a block by `override(name=value)`."""

    dump: str | None = _option(
        None, "DTORCH_DUMP", lambda text: text or None, "Folder that gets the graph after every stage and pass."
    )
    logs: tuple[str, ...] = _option(
        (), "DTORCH_LOGS", _names, f"Logs, by comma: {', '.join(LOG_NAMES)} or all; +name for more, -name for less."
    )
    verify: bool = _option(True, "DTORCH_VERIFY", _flag, "Check the rules of a graph's level after every pass.")
    plan_cache_entries: int = _option(256, "DTORCH_PLAN_CACHE_ENTRIES", int, "Plans kept for each compiled module.")
    eager_cache_steps: int = _option(
        100_000,
        "DTORCH_EAGER_CACHE_STEPS",
        int,
        "Steps of eager code kept for each mesh of a graph, with their plans (about 6 kB a step); the oldest go.",
    )
    explicit_redistribution: bool = _option(
        False,
        "DTORCH_EXPLICIT_REDISTRIBUTION",
        _flag,
        "Raise where an eager operation's inputs are not placed as it needs, instead of moving them.",
    )
    progress: str = _option(
        "auto", "DTORCH_PROGRESS", str.strip, "A bar on stderr for long work: auto (when it is a terminal), on or off."
    )
    same_device: bool = _option(
        False,
        "DTORCH_DTENSOR_IN_SAME_DEVICE",
        _flag,
        "Let all devices of a cuda mesh be virtual ones on the first GPU.",
    )
    virtual_devices: int = _option(
        8,
        "DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE",
        int,
        "How many virtual devices there are when same_device is on.",
    )
    workers: str = _option(
        "auto",
        "DTORCH_PER_DEVICE_PER_PROCESS",
        _workers,
        "1: a process for each device; simulated: none; auto: processes for meshes of several GPUs.",
    )
    worker_threads: int = _option(1, "DTORCH_WORKER_THREADS", int, "torch's threads in a CPU worker; 0: its default.")
    heartbeat_s: float = _option(0.2, "DTORCH_HEARTBEAT_S", float, "Seconds between signs of life of workers.")
    silence_s: float = _option(
        10.0, "DTORCH_SILENCE_S", float, "Seconds without a sign of life after which a worker or controller is lost."
    )
    step_limit_s: float = _option(
        600.0, "DTORCH_STEP_LIMIT_S", float, "Seconds that one step may take before its worker counts as stuck."
    )
    arena_bytes: int = _option(
        1 << 28, "DTORCH_ARENA_BYTES", int, "Shared memory for large host tensors on their way to workers and back."
    )

    def __post_init__(self) -> None:
        """Reject values that do not fit, naming the option and its variable."""
        if self.workers not in WORKERS:
            raise _misfit("workers", self.workers, f"use one of {', '.join(WORKERS)}")
        for name in ("heartbeat_s", "silence_s", "step_limit_s"):
            if not getattr(self, name) > 0:
                raise _misfit(name, getattr(self, name), "use a number of seconds above 0")
        if self.progress not in ("auto", "on", "off"):
            raise _misfit("progress", self.progress, 'use "auto", "on" or "off"')
        for name, least in (
            ("plan_cache_entries", 1),
            ("eager_cache_steps", 1),
            ("virtual_devices", 1),
            ("worker_threads", 0),
            ("arena_bytes", 1 << 26),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _misfit(name, value, f"use an integer of at least {least}")
        if isinstance(self.logs, str) or not all(isinstance(entry, str) for entry in self.logs):
            raise _misfit("logs", self.logs, 'use a tuple such as ("passes", "+comm")')
        for entry in self.logs:
            bare = entry.lstrip("+-")
            if bare not in (*LOG_NAMES, "all"):
                raise _misfit("logs", entry, _suggest(bare, (*LOG_NAMES, "all")))


def _suggest(name: str, names: Iterable[str]) -> str:
    names = tuple(names)
    close = nearest(name, names)
    return (f"did you mean {' or '.join(map(repr, close))}? " if close else "") + f"There are: {', '.join(names)}"


def _misfit(name: str, value: object, what_next: str) -> OptionError:
    variable = Options.__dataclass_fields__[name].metadata["variable"]
    return OptionError(f"option {name!r} (environment variable {variable}) cannot be {value!r}: {what_next}")


def from_environment(environment: dict[str, str] | os._Environ[str]) -> Options:
    """The options that the DTORCH_* variables of `environment` ask for; OptionError for a value that does not fit."""
    known: dict[str, Field[Any]] = {entry.metadata["variable"]: entry for entry in fields(Options)}
    given: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith("DTORCH_") or variable == "DTORCH_SECRET":  # which is shown nowhere
            continue
        if variable not in known:
            message = f"environment variable {variable} is not one of DTorch's: {_suggest(variable, known)}"
            warnings.warn(message, stacklevel=2)
            continue
        entry = known[variable]
        try:
            given[entry.name] = entry.metadata["parse"](text)
        except ValueError as reason:
            raise _misfit(entry.name, text, str(reason)) from None
    return Options(**given)


@lru_cache(maxsize=1)
def _process_options() -> Options:
    options = from_environment(os.environ)
    _wire_logs(options.logs)
    return options


_override: ContextVar[Options | None] = ContextVar("dtorch_options", default=None)
_bar_is_open: ContextVar[bool] = ContextVar("dtorch_progress", default=False)


def current() -> Options:
    """The options in force here: those of the innermost `override` block, else the process's.

    A new thread starts with the process's options: code that hands work to a thread hands the options over too.
    """
    return _override.get() or _process_options()


@contextmanager
def override(**changes: Any) -> Iterator[Options]:
    """Use other values for some options within a `with` block; OptionError for an unknown name or a misfit."""
    names = tuple(entry.name for entry in fields(Options))
    for name in changes:
        if name not in names:
            raise OptionError(f"there is no option {name!r}: {_suggest(name, names)}")
    before = current()
    options = replace(before, **changes)
    token = _override.set(options)
    _wire_logs(options.logs)
    try:
        yield options
    finally:
        _override.reset(token)
        _wire_logs(before.logs)


def describe() -> str:
    """One line an option: variable, value in force, default and meaning."""
    options = current()
    lines = []
    for entry in fields(Options):
        value, meta = getattr(options, entry.name), entry.metadata
        lines.append(f"{meta['variable']}={value!r} (default {entry.default!r}): {meta['doc']}")
    return "\n".join(lines)


class _QuietStderr(logging.StreamHandler):
    """Writes to whatever sys.stderr is now, and leaves records to the application once it has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.setStream(sys.stderr)
            super().emit(record)


def _wire_logs(logs: tuple[str, ...]) -> None:
    """Set the level of each of DTorch's loggers; without any request they are left to the application."""
    levels: dict[str, int] = {}
    for entry in logs:
        bare, level = entry.lstrip("+-"), _LOG_LEVELS.get(entry[0], logging.INFO)
        levels.update(dict.fromkeys(LOG_NAMES, level) if bare == "all" else {bare: level})
    for name in LOG_NAMES:
        logging.getLogger(f"dtorch.{name}").setLevel(levels.get(name, logging.NOTSET))
    root = logging.getLogger("dtorch")
    if logs and not any(isinstance(handler, _QuietStderr) for handler in root.handlers):
        handler = _QuietStderr()
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        root.addHandler(handler)


def logger(name: str) -> logging.Logger:
    """The standard logger `dtorch.<name>`, for one of LOG_NAMES, at the level that DTORCH_LOGS asks for."""
    if name not in LOG_NAMES:
        raise OptionError(f"there is no log {name!r}: {_suggest(name, LOG_NAMES)}")
    current()  # the first call in a process sets the levels
    return logging.getLogger(f"dtorch.{name}")


def progress(iterable: Iterable[T], total: int | None = None, desc: str = "") -> Generator[T, None, None]:
    """Go through `iterable` under one bar on stderr; a bar within a bar is not shown, nor one that nobody watches."""
    wanted = current().progress
    if _bar_is_open.get() or wanted == "off" or (wanted == "auto" and not sys.stderr.isatty()):
        yield from iterable
        return
    from tqdm import tqdm

    _bar_is_open.set(True)
    try:
        yield from tqdm(iterable, total=total, desc=desc or None, file=sys.stderr, leave=False, dynamic_ncols=True)
    finally:
        _bar_is_open.set(False)
