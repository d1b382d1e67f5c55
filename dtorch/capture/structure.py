"""Arguments and results as flat lists of tensors, and the exact objects back from such lists.

In: any object that holds tensors: containers, dataclasses, ModelOutputs, registered classes. Out: its tensors,
a hashable tree that describes the rest, and a way to rebuild the object (new, or by updating the original)
from other tensors.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch import torch_private

Flatten = Callable[[Any], tuple[list[Any], Any]]
Unflatten = Callable[[list[Any], Any, Any], Any]


@dataclass(frozen=True)
class StateLeaf:
    """Returned among a container's children: this tensor lives on the devices from step to step (kind "state")."""

    value: torch.Tensor


@dataclass(frozen=True)
class Leaf:
    """Tensor number `index` of the flat list. `state`: it was given as a `StateLeaf`."""

    index: int
    state: bool = False


@dataclass(frozen=True)
class Given:
    """The tensor `index` of the arguments itself: it stands, unchanged, in a container that the caller gave."""

    index: int


class Static:
    """A value that is no tensor; part of the key. Compared with its type; -0.0 is not 0.0; NaN equals itself."""

    __slots__ = ("value", "_key")

    def __init__(self, value: Any) -> None:
        self.value = value
        kind = type(value)
        if kind is float:
            self._key: Any = (float, repr(value))
        else:
            try:
                hash(value)
                self._key = (kind, value)
            except TypeError:
                self._key = (kind, id(value))  # `value` is held, so its id stays its own

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


@dataclass(frozen=True)
class Container:
    """An object with children. `number` counts containers in order, so that shared ones stay shared.

    `given`: the number, among the arguments' containers, of the object that this is: it is updated, not made anew.
    """

    number: int
    kind: type
    context: Any
    children: tuple[Any, ...]
    given: int | None = None


@dataclass(frozen=True)
class Same:
    """The container `number` once more."""

    number: int


@dataclass(frozen=True)
class Form:
    """How objects of a type are taken apart and put together. `unflatten(children, context, original or None)`."""

    flatten: Flatten
    unflatten: Unflatten


_REGISTERED: dict[type, Form] = {}


def register_container(kind: type, flatten: Flatten, unflatten: Unflatten) -> None:
    """Teach capture a class that holds tensors, for arguments and results; subclasses are covered too.

    flatten(obj) -> (children, context): `children` may be tensors, `StateLeaf`s, other containers or plain values;
    `context` is hashable. unflatten(children, context, original) -> obj: `original` is the caller's object to
    update and return when there is one, else None.
    """
    _REGISTERED[kind] = Form(flatten, unflatten)


@dataclass
class Flat:
    """An object taken apart: `leaves` (each tensor once), their `paths`, the `tree`, and the `containers` by
    number.
    """

    leaves: list[torch.Tensor]
    paths: list[str]
    tree: Any
    containers: list[Any]
    states: set[int] = field(default_factory=set)

    def rebuild(self, leaves: list[Any]) -> tuple[Any, list[Any]]:
        """A new object with other tensors in it, and its containers by number."""
        return rebuild(self.tree, leaves)


def flatten(obj: Any, names: Callable[[str], str] | None = None) -> Flat:
    """Take an object apart. `names` may rename the paths of leaves."""
    flattener = _Flattener()
    tree = flattener.visit(obj, "")
    paths = flattener.paths if names is None else [names(path) for path in flattener.paths]
    return Flat(flattener.leaves, paths, tree, flattener.containers, flattener.states)


class _Flattener:
    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self.paths: list[str] = []
        self.containers: list[Any] = []
        self.states: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._leaf_of: dict[int, int] = {}
        self._holds: dict[int, bool] = {}
        self._kept: list[Any] = []  # keeps visited temporaries alive, so that ids stay unique

    def visit(self, obj: Any, path: str) -> Any:
        if isinstance(obj, torch.Tensor):
            return Leaf(self._leaf(obj, path))
        if isinstance(obj, StateLeaf):
            index = self._leaf(obj.value, path)
            self.states.add(index)
            return Leaf(index, state=True)
        form = self._form(obj)
        if form is None:
            return Static(obj)
        if id(obj) in self._numbers:
            return Same(self._numbers[id(obj)])
        number = self._numbers[id(obj)] = len(self.containers)
        self.containers.append(obj)
        children, context = form.flatten(obj)
        self._kept.append(children)
        keys = _keys(obj, context, len(children))
        visited = tuple(
            self.visit(child, f"{path}.{key}" if path else str(key)) for key, child in zip(keys, children, strict=True)
        )
        return Container(number, type(obj), context, visited)

    def _leaf(self, tensor: torch.Tensor, path: str) -> int:
        index = self._leaf_of.get(id(tensor))
        if index is None:
            index = self._leaf_of[id(tensor)] = len(self.leaves)
            self.leaves.append(tensor)
            self.paths.append(path)
        return index

    def _form(self, obj: Any) -> Form | None:
        kind = type(obj)
        if kind in ATOMS:
            return None
        form = form_of(kind)
        if form is OBJECT and not self._holds_tensors(obj):
            return None
        return form

    def _holds_tensors(self, obj: Any) -> bool:
        """Whether an object of an unknown class holds a tensor somewhere; others stay as they are."""
        known = self._holds.get(id(obj))
        if known is not None:
            return known
        self._holds[id(obj)] = False  # ends cycles
        self._kept.append(obj)
        found = any(
            isinstance(child, (torch.Tensor, StateLeaf))
            or (type(child) not in ATOMS and _may_hold(child) and self._holds_tensors(child))
            for child in _children(obj)
        )
        self._holds[id(obj)] = found
        return found


ATOMS: frozenset[type] = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device, torch.layout, torch.Size}
    | {types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.Generator, slice, range}
)


def _may_hold(obj: Any) -> bool:
    return not isinstance(obj, (torch.nn.Module, type, types.ModuleType))


def _children(obj: Any) -> Iterator[Any]:
    form = form_of(type(obj))
    if form is not None and _may_hold(obj):
        yield from form.flatten(obj)[0]


def form_of(kind: type) -> Form | None:
    """How objects of a type are handled; `OBJECT` when by their attributes."""
    if kind in BASIC:
        return BASIC[kind]
    for base in kind.__mro__:
        if base in _REGISTERED:
            return _REGISTERED[base]
    if issubclass(kind, tuple):
        return _NAMED if hasattr(kind, "_fields") else _TUPLE_LIKE
    if issubclass(kind, collections.defaultdict):
        return _DEFAULT_DICT
    if issubclass(kind, dict):
        return _DICT_LIKE
    if issubclass(kind, list):
        return _LIST_LIKE
    registered = torch_private.pytree_nodes().get(kind)
    if registered is not None:
        return Form(
            lambda obj: registered.flatten_fn(obj),
            lambda children, context, original: registered.unflatten_fn(children, context),
        )
    if issubclass(kind, torch.nn.Module):
        return None
    return OBJECT


def _keys(obj: Any, context: Any, count: int) -> list[Any]:
    """Names of the children, for paths."""
    kind = type(obj)
    if kind is dict:
        return list(context)
    if isinstance(context, _Attributes):
        return [*context.items, *context.names]
    if hasattr(kind, "_fields") and issubclass(kind, tuple):
        return list(kind._fields)  # type: ignore[attr-defined]
    return list(range(count))


# --- the forms --------------------------------------------------------------------------------------------------


def _update_list(children: list[Any], context: Any, original: Any) -> Any:
    if original is None:
        return list(children)
    original[:] = children
    return original


def _update_dict(children: list[Any], context: Any, original: Any) -> Any:
    items = dict(zip(context, children, strict=True))
    if original is None:
        return items
    original.clear()
    original.update(items)
    return original


BASIC: dict[type, Form] = {
    list: Form(lambda obj: (list(obj), None), _update_list),
    tuple: Form(lambda obj: (list(obj), None), lambda children, context, original: tuple(children)),
    dict: Form(lambda obj: (list(obj.values()), tuple(obj)), _update_dict),
    collections.OrderedDict: Form(
        lambda obj: (list(obj.values()), tuple(obj)),
        lambda children, context, original: (
            collections.OrderedDict(zip(context, children, strict=True))
            if original is None
            else _update_dict(children, context, original)
        ),
    ),
}


@dataclass(frozen=True)
class _Attributes:
    """Context of an object by its attributes: keys of a dict's `items` (or positions of a list's), attribute
    `names`.
    """

    kind: type
    items: tuple[Any, ...]
    names: tuple[str, ...]
    extra: Any = None


def _attributes(obj: Any) -> dict[str, Any]:
    found = dict(getattr(obj, "__dict__", {}))
    for base in type(obj).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                found[name] = getattr(obj, name)
    return found


def _set_attributes(obj: Any, names: tuple[str, ...], values: list[Any]) -> Any:
    for name in set(_attributes(obj)) - set(names):
        object.__delattr__(obj, name)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(obj, name, value)
    return obj


def _flatten_object(obj: Any) -> tuple[list[Any], Any]:
    attributes = _attributes(obj)
    return list(attributes.values()), _Attributes(type(obj), (), tuple(attributes))


def _unflatten_object(children: list[Any], context: _Attributes, original: Any) -> Any:
    made = object.__new__(context.kind) if original is None else original
    return _set_attributes(made, context.names, children)


def _flatten_dict_like(obj: Any) -> tuple[list[Any], Any]:
    attributes = _attributes(obj)
    keys = tuple(dict.keys(obj))
    children = [dict.__getitem__(obj, key) for key in keys] + list(attributes.values())
    return children, _Attributes(type(obj), keys, tuple(attributes), getattr(obj, "default_factory", None))


def _unflatten_dict_like(children: list[Any], context: _Attributes, original: Any) -> Any:
    kind: Any = context.kind
    made = kind.__new__(kind) if original is None else original
    store = collections.OrderedDict if isinstance(made, collections.OrderedDict) else dict
    count = len(context.items)
    store.clear(made)
    for key, value in zip(context.items, children[:count], strict=True):
        store.__setitem__(made, key, value)
    return _set_attributes(made, context.names, children[count:])


def _unflatten_default_dict(children: list[Any], context: _Attributes, original: Any) -> Any:
    made = _unflatten_dict_like(children, context, original)
    made.default_factory = context.extra
    return made


def _flatten_list_like(obj: Any) -> tuple[list[Any], Any]:
    attributes = _attributes(obj)
    return [*obj, *attributes.values()], _Attributes(type(obj), tuple(range(len(obj))), tuple(attributes))


def _unflatten_list_like(children: list[Any], context: _Attributes, original: Any) -> Any:
    kind: Any = context.kind
    made = kind.__new__(kind) if original is None else original
    count = len(context.items)
    made[:] = children[:count]
    return _set_attributes(made, context.names, children[count:])


def _unflatten_named(children: list[Any], kind: type, original: Any) -> Any:
    return kind._make(children)  # type: ignore[attr-defined]


OBJECT = Form(_flatten_object, _unflatten_object)
_DICT_LIKE = Form(_flatten_dict_like, _unflatten_dict_like)
_DEFAULT_DICT = Form(_flatten_dict_like, _unflatten_default_dict)
_LIST_LIKE = Form(_flatten_list_like, _unflatten_list_like)
_NAMED = Form(lambda obj: (list(obj), type(obj)), _unflatten_named)
_TUPLE_LIKE = Form(lambda obj: (list(obj), type(obj)), lambda children, kind, original: kind(children))


# --- rebuilding --------------------------------------------------------------------------------------------------


def rebuild(tree: Any, leaves: list[Any], given: Flat | None = None) -> tuple[Any, list[Any]]:
    """The object that a tree describes, with these tensors, and its containers by number.

    `given`: the call's arguments, where the tree refers to them (`Given`, `Container.given`).
    """
    rebuilder = _Rebuilder(leaves, given)
    return rebuilder.visit(tree), rebuilder.containers


class _Rebuilder:
    def __init__(self, leaves: list[Any], given: Flat | None) -> None:
        self.leaves, self.given = leaves, given
        self.made: dict[int, Any] = {}

    @property
    def containers(self) -> list[Any]:
        return [self.made.get(number) for number in range(max(self.made, default=-1) + 1)]

    def visit(self, tree: Any) -> Any:
        if type(tree) is Leaf:
            return self.leaves[tree.index]
        if type(tree) is Static:
            return tree.value
        if type(tree) is Same:
            return self.made[tree.number]
        if type(tree) is Given:
            return self._arguments().leaves[tree.index]
        form = form_of(tree.kind)
        original = None if tree.given is None else self._arguments().containers[tree.given]
        if form is OBJECT and original is None:
            # Attributes may refer back to the object, so it exists before they do.
            original = self.made[tree.number] = object.__new__(tree.kind)
        children = [self.visit(child) for child in tree.children]
        self.made[tree.number] = form.unflatten(children, tree.context, original)  # type: ignore[union-attr]
        return self.made[tree.number]

    def _arguments(self) -> Flat:
        if self.given is None:
            raise ValueError(
                "the result holds objects of the call's arguments: pass the flattened arguments to rebuild it"
            )
        return self.given


@dataclass
class Structure:
    """How the user's result is rebuilt from the flat user results, and which of the caller's objects are updated.

    `tree`: the result. `effects`: containers of the arguments that the forward changed.
    """

    tree: Any
    effects: tuple[Any, ...] = ()

    def rebuild(self, results: list[Any], given: Flat | None = None) -> Any:
        """The user's result; `given` is the call's flattened arguments (needed only where the result refers to
        them).
        """
        rebuilder = _Rebuilder(list(results), given)
        result = rebuilder.visit(self.tree)
        for effect in self.effects:
            rebuilder.visit(effect)
        return result
