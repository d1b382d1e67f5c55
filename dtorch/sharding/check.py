"""Prove a sharding rule on examples: run an op whole and in parts, under every strategy of its rule, and compare.

In: an op with real arguments. Out: nothing, or an AssertionError that names the strategy, the mesh and the
difference. No runtime is needed: devices are coordinates of a loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from dtorch.ir.layout import Pending, Spec, Split, Whole, dim_cuts, local_bounds, local_dim, local_shape, put_local
from dtorch.ir.layout import take_local as _take_local
from dtorch.sharding.factors import Alternatives, Mapping, Strategy, carry, cut, whole
from dtorch.sharding.localize import OpCall, localize
from dtorch.sharding.rules.registry import mappings_of, tensors_in
