"""Where redistribution is explicit: what would move an input raises, each time, and says all that is legal.

In: operations whose inputs do not fit. Out: errors, on the user's line, and nothing recorded.
"""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, options
from dtorch.errors import ShardingError
from dtorch.sharding import legal

PAIR = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
GRID = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])


def placed(*placements: Any, shape: tuple[int, ...] = (4, 4)) -> Any:
    return dtorch.distribute_tensor(torch.ones(shape), PAIR if len(placements) == 1 else GRID, placements)


def refusal(call: Callable[[], Any]) -> str:
    with dtorch.explicit_redistribution(), pytest.raises(ShardingError) as caught:
        call()
    return str(caught.value)


def test_the_error_names_op_inputs_axis_all_that_is_legal_and_the_cheapest_move() -> None:
    message = refusal(lambda: placed(Shard(0)) + placed(Shard(1)))
    assert "test_explicit_redistribution.py" in message
    assert "aten.add.Tensor(f32[4,4][S(0)], f32[4,4][S(1)]) on mesh(tp=2)" in message
    assert "the inputs are (S(0), S(1)) on 'tp'" in message
    assert "Legal on each axis: (R, R), (S(0), S(0)), (S(1), S(1)), (P, P)." in message
    assert "The cheapest move: [4, 4][S(1)] to [S(0)]." in message


def test_only_axes_in_trouble_are_named() -> None:
    message = refusal(lambda: torch.cat([placed(Shard(0), Shard(1)), placed(Shard(0), Shard(0))]))
    assert "the inputs are (S(1), S(0)) on 'tp'" in message and "on 'dp'" not in message


LEGAL = {
    "softmax": (lambda: torch.softmax(placed(Shard(0)), 0), "(R), (S(1))."),
    "matmul": (
        lambda: placed(Shard(0)) @ placed(Shard(0)),
        "(R, R), (S(0), R), (S(1), S(0)), (R, S(1)), (P, R), (R, P).",
    ),
    "sort": (lambda: placed(Shard(1)).sort(), "(R), (S(0))."),
    "attention": (
        lambda: torch.nn.functional.scaled_dot_product_attention(*[placed(Shard(2), shape=(2, 4, 6, 8))] * 3),
        "(R, R, R), (S(0), S(0), S(0)), (S(1), S(1), S(1)), (S(2), R, R), (R, R, P).",
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_is_legal_comes_from_the_rule_of_the_operation(name: str) -> None:
    call, expected = LEGAL[name]
    assert f"Legal on each axis: {expected}" in refusal(call)


def test_every_list_that_is_said_to_be_legal_is_taken_without_a_move() -> None:
    whole, rows, columns, partial = Replicate(), Shard(0), Shard(1), Partial()
    pairs = ((whole, whole), (rows, whole), (columns, rows), (whole, columns), (partial, whole), (whole, partial))
    for left, right in pairs:
        with dtorch.explicit_redistribution():
            assert torch.equal((placed(left) @ placed(right)).to_torch(), torch.full((4, 4), 4.0))


def test_long_lists_are_cut_short_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legal, "SHOWN", 2)
    assert "Legal on each axis: (R, R), (S(0), S(0)) and 2 more." in refusal(
        lambda: placed(Shard(0)) + placed(Shard(1))
    )


@pytest.mark.parametrize(
    "call",
    [operator.add, torch.add, lambda a, b: torch.cat([a, b]), lambda a, b: a.view(16) + b.reshape(16)],
    ids=["operator", "function", "list", "views"],
)
def test_an_operation_that_was_recorded_before_still_raises(call: Callable[..., Any]) -> None:
    a, b = placed(Shard(0)), placed(Shard(1))
    for _ in range(3):
        assert call(a, b).to_torch().numel() in (16, 32)
    for _ in range(3):
        refusal(lambda: call(a, b))
    assert call(a, b).to_torch().numel() in (16, 32)


def test_writing_into_a_tensor_that_is_placed_otherwise_raises_and_leaves_it_as_it_was() -> None:
    x, y = placed(Replicate()), placed(Shard(0))
    message = refusal(lambda: x.add_(y))
    assert "explicit" in message
    assert torch.equal(x.to_torch(), torch.ones(4, 4))
    x.add_(y)
    assert torch.equal(x.to_torch(), torch.full((4, 4), 2.0)) and x.placements == [Replicate()]


def test_redistribute_itself_and_what_fits_are_allowed() -> None:
    with dtorch.explicit_redistribution():
        total = placed(Shard(0)) + placed(Shard(1)).redistribute(placements=[Shard(0)])
        assert torch.equal(total.to_torch(), torch.full((4, 4), 2.0))


def test_it_is_an_option_for_blocks_and_for_the_process() -> None:
    with options.override(explicit_redistribution=True):
        with pytest.raises(ShardingError):
            placed(Shard(0)) + placed(Shard(1))
        with dtorch.explicit_redistribution(False):
            placed(Shard(0)) + placed(Shard(1))
    program = (
        "import torch, dtorch\n"
        "mesh = dtorch.init_device_mesh('cpu', (2,))\n"
        "a, b = (dtorch.ones(4, 4, device_mesh=mesh, placements=[dtorch.Shard(dim)]) for dim in (0, 1))\n"
        "try:\n    a + b\nexcept ValueError as error:\n    print(type(error).__name__)\n"
    )
    environment = {**os.environ, "DTORCH_EXPLICIT_REDISTRIBUTION": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment
    )
    assert ended.stdout == "ShardingError\n", ended.stderr
