"""What a finished forward returned, and what it did to the caller's containers, as trees over a flat list of results.

In: the returned object and the arguments as the forward left them. Out: a `Structure` and the tensors it is
rebuilt from.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.capture.structure import Container, Flat, Given, Leaf, Same, Structure, flatten


def result_structure(
    result: Any, arguments: Any, given: Flat, inputs: list[Any], containers: list[Any]
) -> tuple[Structure, list[torch.Tensor]]:
    """The structure of a result, and its tensors.

    arguments: what the forward was called with, afterwards. given: the same as the caller's objects, before. inputs,
    containers: the tensors and containers that stood for the caller's, in the order of `given`.
    """
    reader = _Reader(given, inputs, containers, flatten((result, arguments)))
    tree = reader.translate(reader.after.tree.children[0], inside=False)
    effects = [reader.translate(changed, inside=True) for changed in reader.changed(reader.after.tree.children[1])]
    return Structure(tree, tuple(effects)), reader.results


class _Reader:
    def __init__(self, given: Flat, inputs: list[Any], containers: list[Any], after: Flat) -> None:
        self.after = after
        self.results: list[torch.Tensor] = []
        self._result_of: dict[int, int] = {}
        self._input_of = {id(tensor): index for index, tensor in enumerate(inputs)}
        given_of = {id(obj): number for number, obj in enumerate(containers) if obj is not None}
        self._given_number = [given_of.get(id(obj)) for obj in after.containers]
        self._before: dict[int, Container] = {}
        _collect(given.tree, self._before)

    def translate(self, tree: Any, inside: bool) -> Any:
        """A tree over the leaves after the forward → one over results; `inside` a container of the caller's."""
        if type(tree) is Leaf:
            tensor = self.after.leaves[tree.index]
            if inside and id(tensor) in self._input_of:
                return Given(self._input_of[id(tensor)])
            index = self._result_of.get(id(tensor))
            if index is None:
                index = self._result_of[id(tensor)] = len(self.results)
                self.results.append(tensor)
            return Leaf(index, tree.state)
        if type(tree) is Container:
            number = self._given_number[tree.number]
            within = inside or number is not None
            children = tuple(self.translate(child, within) for child in tree.children)
            return Container(tree.number, tree.kind, tree.context, children, number)
        return tree

    def changed(self, tree: Any) -> list[Container]:
        """The outermost of the caller's containers that hold other things than they were given with."""
        if type(tree) is not Container:
            return []
        if self._differs(tree):
            return [tree]
        return [found for child in tree.children for found in self.changed(child)]

    def _differs(self, container: Container) -> bool:
        number = self._given_number[container.number]
        before = None if number is None else self._before.get(number)
        if before is None or issubclass(container.kind, tuple):
            return False
        if before.context != container.context or len(before.children) != len(container.children):
            return True
        pairs = zip(container.children, before.children, strict=True)
        return any(self._identity(new) != _identity_before(old) for new, old in pairs)

    def _identity(self, tree: Any) -> Any:
        if type(tree) is Leaf:
            return "tensor", self._input_of.get(id(self.after.leaves[tree.index]))
        if type(tree) in (Container, Same):
            return "container", self._given_number[tree.number]
        return tree


def _identity_before(tree: Any) -> Any:
    if type(tree) is Leaf:
        return "tensor", tree.index
    if type(tree) in (Container, Same):
        return "container", tree.number
    return tree


def _collect(tree: Any, into: dict[int, Container]) -> None:
    if type(tree) is Container:
        into[tree.number] = tree
        for child in tree.children:
            _collect(child, into)
