"""Weights in safetensors files and state dicts, read piece by piece so that no device holds more than its part.

In: `weights=` of `dtorch.compile`: a state dict, a file, a folder, or several files. Out: a source for every tensor
of the model, or one WeightsError that names everything missing, unexpected, misshapen or corrupt.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtorch.errors import WeightsError, nearest
from dtorch.ir.layout import Spec, dim_cuts, local_bounds, take_local
from dtorch.runtime.base import Runtime


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, not read yet."""

    path: Path
    key: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """The whole tensor."""
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            return file.get_tensor(self.key)

    def place(self, runtime: Runtime, spec: Spec, dtype: torch.dtype, requires_grad: bool) -> Any:
        """Data for `spec`, each part read by itself where the file's layout allows it."""

        def read(coordinate: tuple[int, ...]) -> torch.Tensor:
            part = self._part(spec, runtime.mesh_shape, coordinate).to(dtype)
            return part.requires_grad_() if requires_grad else part

        return runtime.place_parts(spec, read)

    def _part(self, spec: Spec, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            spans = []
            for dim, size in enumerate(self.shape):
                bounds = local_bounds(size, dim_cuts(spec, dim, mesh_shape, coordinate))
                if len(bounds) > 1 or (bounds and bounds[0][0] != 1):
                    part = take_local(file.get_tensor(self.key), spec, mesh_shape, coordinate)
                    return part.clone(memory_format=torch.contiguous_format)
                unit, begin, end = (1, 0, size) if not bounds else bounds[0][1:]
                spans.append(slice(begin * unit, end * unit))
            if not spans:
                return file.get_tensor(self.key)
            return file.get_slice(self.key)[tuple(spans)].contiguous()


@dataclass(frozen=True)
class Sources:
    """What `weights=` offers: tensors by key, and what is wrong with the files that cannot be read."""

    tensors: Mapping[str, torch.Tensor | StoredTensor]
    unreadable: tuple[str, ...] = ()


def read_sources(weights: Any) -> Sources:
    """All tensors that `weights=` offers. Raises WeightsError for what is neither a state dict nor paths that exist."""
    if isinstance(weights, Mapping):
        wrong = [str(key) for key, value in weights.items() if not isinstance(value, torch.Tensor)]
        if wrong:
            raise WeightsError(f"weights= is a state dict, but these entries are no tensors: {', '.join(wrong[:8])}.")
        return Sources(dict(weights))
    paths = [weights] if isinstance(weights, (str, Path)) else weights
    if not isinstance(paths, Sequence) or not all(isinstance(path, (str, Path)) for path in paths):
        raise WeightsError(f"weights= takes a state dict or paths of safetensors files, not {weights!r:.80}.")
    files = list(itertools.chain.from_iterable(_files(Path(path)) for path in paths))
    found: dict[str, torch.Tensor | StoredTensor] = {}
    problems = []
    for path in files:
        try:
            found.update(_header(path))
        except Exception as error:  # safetensors raises its own error type, OSError and ValueError
            problems.append(f"{path}: {error}")
    return Sources(found, tuple(problems))


def _header(path: Path) -> dict[str, StoredTensor]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {key: StoredTensor(path, key, tuple(file.get_slice(key).get_shape())) for key in file.keys()}


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.exists():
            return _indexed(index)
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise WeightsError(f"{path} holds no .safetensors files.")
        return found
    if not path.exists():
        raise WeightsError(f"{path} does not exist.")
    return [path]


def _indexed(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is no index of safetensors files: {type(error).__name__}: {error}.") from error
    return [index.parent / name for name in sorted(names)]


def assign(entries: Sequence[Any], given: Sources, copy: bool = True) -> None:
    """Give every entry its source, tensors copied or, without `copy`, taken over.

    Raises one WeightsError that names all files that cannot be read and all keys that do not fit.
    """
    sources = given.tensors
    by_name = {name: entry for entry in entries for name in entry.names}
    unexpected = [key for key in sources if key not in by_name]
    missing, misshapen = [], []
    for entry in entries:
        key = next((name for name in entry.names if name in sources), None)
        if key is None:
            if entry.persistent or entry.host is None:
                missing.append(entry.names[0])
            continue
        source = sources[key]
        if tuple(source.shape) != entry.shape:
            misshapen.append(f"{key}: {tuple(source.shape)} instead of {entry.shape}")
        entry.host = source.detach().to(entry.dtype, copy=copy) if isinstance(source, torch.Tensor) else source
    problems = [f"not readable as safetensors: {each}" for each in given.unreadable]
    if missing:
        where = " (if not in a file that cannot be read)" if given.unreadable else ""
        problems.append(f"missing{where}: {', '.join(missing)}")
    if unexpected:
        shown = [
            f"{key} (nearest: {', '.join(close)})" if (close := nearest(key, list(by_name), 2)) else key
            for key in unexpected
        ]
        problems.append(f"unexpected: {', '.join(shown)}")
    if misshapen:
        problems.append(f"of another shape: {'; '.join(misshapen)}")
    if problems:
        raise WeightsError("These weights do not fit the model.\n  " + "\n  ".join(problems))


