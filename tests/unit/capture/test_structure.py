"""Arguments and results as flat tensors: keys tell calls apart, registered classes and states come through."""

import torch
from interpreting import assert_same, captured, run_traced
from torch import nn

from dtorch.capture import structure
from dtorch.capture.structure import StateLeaf, flatten, register_container

x = torch.ones(2, 3)


def test_trees_tell_apart_what_python_calls_equal():
    trees = [flatten((value, x)).tree for value in (1, 1.0, True, 0.0, -0.0, None, "1")]
    assert len(set(trees)) == len(trees)
    assert flatten((float("nan"), x)).tree == flatten((float("nan"), x)).tree
    assert flatten(([x], 1)).tree != flatten(((x,), 1)).tree
    assert flatten({"a": x, "b": 1}).tree == flatten({"a": x * 2, "b": 1}).tree


def test_a_tensor_given_twice_is_one_leaf():
    twice, apart = flatten((x, x)), flatten((x, x.clone()))
    assert len(twice.leaves) == 1 and len(apart.leaves) == 2 and twice.tree != apart.tree


def test_paths_name_the_leaves():
    assert flatten({"a": [x, {"b": x + 1}]}).paths == ["a.0", "a.1.b"]


class Cache:
    def __init__(self, keys):
        self.keys = keys
        self.length = 0


def test_a_registered_class_gives_states_that_are_updated():
    def unflatten(children, context, original):
        cache = Cache(children[0]) if original is None else original
        cache.keys, cache.length = children[0], context
        return cache

    register_container(Cache, lambda cache: ([StateLeaf(cache.keys)], cache.length), unflatten)
    try:

        class Step(nn.Module):
            def forward(self, x, cache):
                cache.keys[:, cache.length] = x
                cache.length += 1
                return cache.keys.sum(1), cache

        model, cache = Step().eval(), Cache(torch.zeros(2, 3))
        traced = captured(model, (x[:, 0], cache))
        assert [spec.kind for spec in traced.signature.inputs] == ["user", "state"]
        total, returned = run_traced(traced, model, (x[:, 0], cache))
        assert returned is cache and cache.length == 1
        assert_same(cache.keys, torch.tensor([[1.0, 0, 0], [1, 0, 0]]))
        assert_same(total, torch.ones(2))
    finally:
        structure._REGISTERED.pop(Cache)
