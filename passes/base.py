"""What a pass is: a frozen dataclass whose fields are its options, with a name, a level and what it does to numbers.

In: a `torch.fx.GraphModule` of the pass's level and a `PassContext`. Out: the graph rewritten in place and the
count of rewrites. Registering a pass only names it; `dtorch.passes.pipeline` decides what runs and when.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from torch.fx import GraphModule

from dtorch.errors import PassError, nearest
from dtorch.ir.signature import Signature
from dtorch.options import logger

Level = Literal["global", "local", "scheduled"]
Numerics = Literal["bitwise", "reassociates", "approximate"]
LEVELS: tuple[Level, ...] = get_args(Level)
NUMERICS: tuple[Numerics, ...] = get_args(Numerics)

Registrable = TypeVar("Registrable", bound=Callable[..., Any])


@dataclass
class PassContext:
    """What passes may know besides the graph, and where they report to; one for each compilation.

    `signature` describes the graph's inputs and outputs. `numerics` is the budget: optional passes that change
    numbers more than it allows are skipped. `options` are `dtorch.options.Options` (None: the defaults).
    `cost_model` is a `dtorch.ir.cost.CostModel` (None: its defaults). `dump_directory`: where the graph goes when a
    pass fails (None: what the options say). `messages` collects `log` calls.
    """

    mesh_shape: tuple[int, ...] = (1,)
    axis_names: tuple[str, ...] = ("axis0",)
    options: Any = None
    signature: Signature | None = None
    numerics: Numerics = "reassociates"
    cost_model: Any = None
    dump_directory: Path | None = None
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check_choice("numerics", self.numerics, NUMERICS, "the context of a compilation")
        if self.dump_directory is None and getattr(self.options, "dump", None):
            self.dump_directory = Path(self.options.dump)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The size of each mesh axis, by name."""
        return dict(zip(self.axis_names, self.mesh_shape, strict=True))

    def log(self, message: str) -> None:
        """Say what a pass decided and why; shown by `DTORCH_LOGS=passes` and kept with the pass's record."""
        self.messages.append(message)
        logger("passes").debug(message)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One rewrite of a graph. Subclasses add options as dataclass fields and define `run`.

    `level`: the graphs it reads. `numerics`: "bitwise" (results equal to the last bit), "reassociates" (sums are
    ordered differently) or "approximate". `required`: later stages rely on it, so it is never skipped.
    """

    name: str = field(init=False, default="", repr=False)
    level: Level = field(init=False, default="global", repr=False)
    numerics: Numerics = field(init=False, default="bitwise", repr=False)
    required: bool = field(init=False, default=False, repr=False)

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Rewrite the graph in place and return how many rewrites were made (0: nothing changed)."""
        raise NotImplementedError(f"{type(self).__name__} has no run method")

    def __call__(self, graph_module: GraphModule, context: PassContext) -> int:
        """The same as `run`, so that a pass serves where a plain function does."""
        return self.run(graph_module, context)


@dataclass(frozen=True, kw_only=True)
class FunctionPass(Pass):
    """A plain function `f(graph_module, context) -> int` as a pass; equal to another that wraps the same function."""

    name: str
    function: Callable[..., Any] = field(repr=False)
    level: Level = "global"
    numerics: Numerics = field(default="bitwise", repr=False)
    required: bool = field(default=False, repr=False)

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Call the function."""
        return self.function(graph_module, context)


@dataclass(frozen=True, kw_only=True)
class CallablePass(FunctionPass):
    """A user's unregistered callable: it may leave out the context and its count, and no budget skips it."""

    def run(self, graph_module: GraphModule, context: PassContext) -> int:
        """Call it with as many arguments as it takes."""
        try:
            wants = len(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):
            wants = 1
        return self.function(graph_module, context) if wants > 1 else self.function(graph_module)


@dataclass(frozen=True)
class Registered:
    """An entry of the registry: how to build the pass, the code it came from, and that code's place."""

    build: Callable[..., Pass]
    source: tuple[str, str]
    place: str


_REGISTRY: dict[str, Registered] = {}


def register_pass(
    *, level: Level, numerics: Numerics, required: bool = False, name: str | None = None
) -> Callable[[Registrable], Registrable]:
    """Name a pass, so that pipelines can insert it by name; it runs only in pipelines that list it.

    Decorates a function `f(graph_module, context) -> int`, which stays a plain function (default name: its own),
    or a frozen dataclass derived from `Pass` (default name: the class's in snake_case). Raises PassError for a
    name that other code has taken.
    """

    def decorate(target: Registrable) -> Registrable:
        title = name or _default_name(target)
        place = place_of(target)
        _check_choice("level", level, LEVELS, f'pass "{title}" ({place})')
        _check_choice("numerics", numerics, NUMERICS, f'pass "{title}" ({place})')
        source = (getattr(target, "__module__", ""), getattr(target, "__qualname__", title))
        taken = _REGISTRY.get(title)
        if taken is not None and (taken.source != source or taken.place != place and source[0] != "__main__"):
            raise PassError(
                f'A pass named "{title}" is registered twice: in {taken.place} and in {place}. '
                "Give one of them another name= in register_pass."
            )
        if isinstance(target, type):
            for attribute, value in (("name", title), ("level", level), ("numerics", numerics), ("required", required)):
                setattr(target, attribute, value)
            _REGISTRY[title] = Registered(target, source, place)
        else:
            entry = FunctionPass(name=title, function=target, level=level, numerics=numerics, required=required)
            _REGISTRY[title] = Registered(lambda: entry, source, place)
        return target

    return decorate


def registered_passes() -> tuple[str, ...]:
    """The names of all registered passes, sorted."""
    return tuple(sorted(_REGISTRY))


def find_pass(name: str, **options: Any) -> Pass:
    """Build the pass registered as `name` with these options; PassError with the nearest names if there is none."""
    entry = _REGISTRY.get(name)
    if entry is None:
        raise PassError(unknown_name("pass", name, _REGISTRY))
    try:
        return entry.build(**options)
    except TypeError as error:
        raise PassError(f'Pass "{name}" ({entry.place}) cannot take the options {options}: {error}') from error


def as_pass(given: Any, level: Level = "global") -> Pass:
    """What a user may write in a pipeline as a `Pass`: a Pass, a registered name, a Pass class or any callable."""
    if isinstance(given, Pass):
        return given
    if isinstance(given, str):
        return find_pass(given)
    if isinstance(given, type) and issubclass(given, Pass):
        return given()
    for entry in _REGISTRY.values():
        if callable(given) and entry.source == (getattr(given, "__module__", ""), getattr(given, "__qualname__", "")):
            return entry.build()
    if callable(given):
        title = getattr(given, "__name__", type(given).__name__)
        return CallablePass(name=title, function=given, level=level, numerics="approximate")
    raise PassError(f"A pass is a Pass, the name of one or a callable on a GraphModule, not {type(given).__name__}.")


def place_of(target: Any) -> str:
    """`file:line` where a function or class was written, or its module where the source is not known."""
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return str(getattr(target, "__module__", "unknown place"))


def unknown_name(kind: str, name: str, known: Any) -> str:
    """The message for a name that is not known: the nearest matches, else all."""
    close = nearest(name, known)
    hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"Known: {', '.join(sorted(known))}."
    return f'There is no {kind} named "{name}". {hint}'


def _default_name(target: Any) -> str:
    name = target.__name__
    if not isinstance(target, type):
        return name
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")


def _check_choice(what: str, value: Any, choices: tuple[str, ...], where: str) -> None:
    if value not in choices:
        raise PassError(f"{where}: {what} must be one of {', '.join(choices)}, not {value!r}.")
