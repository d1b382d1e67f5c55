"""Weights of a compiled module: where they come from, how they change, that the model and the module are apart.

In: state dicts, safetensors files, models on the meta device. Out: eager's results, errors that name everything,
and counts of the bytes that were read and placed.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from model_zoo import ZOO, decoder_config, llama, mlp, noise
from null.agreement import assert_near, assert_same_bits, mesh_of
from safetensors.torch import save_file
from torch import nn

import dtorch
from dtorch import Shard
from dtorch.errors import InputError, UnsupportedError, WeightsError
from dtorch.runtime.simulate import SimulatedRuntime


class Small(nn.Module):
    """A tie, a persistent buffer and one that is not, a bias, a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(12, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.arange(8.0))
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids → scores over the vocabulary."""
        return self.head(torch.tanh(self.inner(self.embed(ids)) + self.shift) * self.mask * self.scale)


IDS = torch.tensor([[1, 5, 11, 0]])
MESHES = [(1,), (2,), (3,), (2, 2)]


def eager(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


def small(*shape: int, **options: Any) -> tuple[Small, Any]:
    model = Small().eval()
    return model, dtorch.compile(model, mesh_of(*(shape or (2,))), **options)


def llama_on_meta(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**decoder_config(**changes))).eval()


def saved(model: nn.Module, folder: Path, shards: int = 1) -> Path:
    """The model's state dict as safetensors: one file, or a folder of shards with an index."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if all(tensor.data_ptr() != other.data_ptr() or tensor.numel() == 0 for other in tensors.values()):
            tensors[name] = tensor.contiguous()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors"
    names = list(tensors)
    files = {f"model-{part:05d}.safetensors": names[part::shards] for part in range(shards)}
    for file, keys in files.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in files.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# --- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("source", ["file", "folder", "files", "text", "state dict"])
def test_a_model_on_meta_takes_its_weights_from(source: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    model, _, kwargs = llama()
    weights: Any = model.state_dict()
    if source in ("file", "text"):
        weights = saved(model, tmp_path)
        weights = str(weights) if source == "text" else weights
    if source in ("folder", "files"):
        weights = saved(model, tmp_path, 3)
        weights = sorted(tmp_path.glob("*.safetensors")) if source == "files" else weights
    compiled = dtorch.compile(llama_on_meta(), mesh_of(*shape), weights=weights)
    result = compiled(**kwargs)
    assert_near(result, eager(model, **kwargs))
    if shape == (1,):
        assert_same_bits(result, eager(model, **kwargs))


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mixtral", "t5_encoder", "clip_text", "llama_tied"])
def test_other_models_on_meta_compute_what_no_file_holds(name: str, tmp_path: Path) -> None:
    model, args, kwargs = ZOO[name]()
    with torch.device("meta"):
        bare = type(model)(model.config).eval()
    compiled = dtorch.compile(bare, mesh_of(2), weights=saved(model, tmp_path))
    assert_near(compiled(*args, **kwargs), eager(model, *args, **kwargs))


def test_weights_given_beside_a_model_with_values_win(tmp_path: Path) -> None:
    model, other = Small().eval(), Small().eval()
    with torch.no_grad():
        other.inner.weight.mul_(2)
    compiled = dtorch.compile(model, mesh_of(2), weights=saved(other, tmp_path))
    assert_near(compiled(IDS), eager(other, IDS))


def test_files_in_another_dtype_are_converted(tmp_path: Path) -> None:
    model, _, kwargs = llama()
    file = saved(copy.deepcopy(model).to(torch.bfloat16), tmp_path)
    compiled = dtorch.compile(llama_on_meta(), mesh_of(2), weights=file)
    result = compiled(**kwargs)
    assert result.logits.dtype == torch.float32
    assert_near(result, eager(copy.deepcopy(model).to(torch.bfloat16).float(), **kwargs), 2e-3)


class Reader:
    """A safetensors file that counts the elements read from it."""

    def __init__(self, file: Any, count: list[int]) -> None:
        self.file, self.count = file, count

    def __enter__(self) -> Reader:
        self.file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.__exit__(*args)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._counted(self.file[index])

    def get_tensor(self, key: str) -> torch.Tensor:
        return self._counted(self.file.get_tensor(key))

    def get_slice(self, key: str) -> Reader:
        return Reader(self.file.get_slice(key), self.count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count[0] += tensor.numel()
        return tensor


def test_each_device_reads_only_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, kwargs = llama(num_key_value_heads=4)
    file, read = saved(model, tmp_path), [0]
    real = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *args, **named: Reader(real(*args, **named), read))
    compiled = dtorch.compile(llama_on_meta(num_key_value_heads=4), mesh_of(4), weights=file)
    assert read == [0], "compile reads headers only"
    compiled(**kwargs)
    assert read == [sum(each.numel() for each in model.parameters())], "each element is read once"


def test_no_step_holds_two_full_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, kwargs = llama(hidden_size=128, intermediate_size=512)
    total = sum(each.numel() * each.element_size() for each in model.parameters())
    alive, most = [0], [0]

    def count(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        alive[0] += size
        most[0] = max(most[0], alive[0])
        weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - size))
        return tensor

    place_parts = SimulatedRuntime.place_parts
    monkeypatch.setattr(
        SimulatedRuntime,
        "place_parts",
        lambda self, spec, read: place_parts(self, spec, lambda coordinate: count(read(coordinate))),
    )
    compiled = dtorch.compile(
        llama_on_meta(hidden_size=128, intermediate_size=512), mesh_of(2), weights=saved(model, tmp_path)
    )
    compiled(**kwargs)
    assert total <= most[0] <= 1.1 * total


def test_a_placed_weights_host_copy_is_gone() -> None:
    model, compiled = small(3)
    hosts = [weakref.ref(entry.host) for entry in compiled._build.weights.entries]
    compiled(IDS)
    gc.collect()
    cut = [entry for entry in compiled._build.weights.entries if isinstance(entry.remote.data, list)]
    assert cut and all(entry.host is None for entry in cut)
    gone = [ref() is None for ref, entry in zip(hosts, compiled._build.weights.entries) if entry in cut]
    assert all(gone)


# --- weights that do not fit -----------------------------------------------------------------------------------------


def broken(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict with one tensor missing, one extra, one of another shape."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del tensors["inner.bias"]
    tensors["inner.weights"] = torch.zeros(2)
    tensors["shift"] = torch.zeros(3)
    return tensors


def assert_names_all(text: str) -> None:
    assert "missing: inner.bias" in text
    assert "inner.weights (nearest: inner.weight" in text
    assert "shift: (3,) instead of (8,)" in text


@pytest.mark.parametrize("as_file", [False, True])
def test_all_that_does_not_fit_is_in_one_error(as_file: bool, tmp_path: Path) -> None:
    model = Small().eval()
    weights: Any = broken(model)
    if as_file:
        del weights["head.weight"]
        save_file(weights, tmp_path / "model.safetensors")
        weights = tmp_path
    with pytest.raises(WeightsError) as caught:
        dtorch.compile(model, mesh_of(2), weights=weights)
    assert_names_all(str(caught.value))
    assert_near(dtorch.compile(model, mesh_of(2))(IDS), eager(model, IDS))


def test_release_takes_nothing_when_weights_do_not_fit() -> None:
    model = Small().eval()
    before = eager(model, IDS)
    with pytest.raises(WeightsError):
        dtorch.compile(model, mesh_of(2), weights=broken(model), release=True)
    assert torch.equal(eager(model, IDS), before)


def test_corrupt_files_are_all_named(tmp_path: Path) -> None:
    folder = saved(Small(), tmp_path, 3)
    (folder / "model-00000.safetensors").write_bytes(b"\xff" * 64)
    data = (folder / "model-00002.safetensors").read_bytes()
    (folder / "model-00002.safetensors").write_bytes(data[:-7])
    with pytest.raises(WeightsError) as caught:
        dtorch.compile(Small().eval(), mesh_of(2), weights=folder)
    assert "model-00000" in str(caught.value) and "model-00002" in str(caught.value)
    assert "model-00001" not in str(caught.value)


def test_corrupt_files_and_what_does_not_fit_are_in_one_error(tmp_path: Path) -> None:
    model = Small().eval()
    weights = broken(model)
    del weights["head.weight"]
    save_file(weights, tmp_path / "model-00000.safetensors")
    (tmp_path / "model-00001.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(WeightsError) as caught:
        dtorch.compile(model, mesh_of(2), weights=tmp_path)
    text = str(caught.value)
    assert "model-00001" in text and "model-00000" not in text
    assert_names_all(text.replace(" (if not in a file that cannot be read)", ""))


def test_a_shard_that_the_index_names_and_nobody_has_is_named(tmp_path: Path) -> None:
    folder = saved(Small(), tmp_path, 3)
    (folder / "model-00001.safetensors").unlink()
    with pytest.raises(WeightsError, match="model-00001"):
        dtorch.compile(Small().eval(), mesh_of(2), weights=folder)


def test_an_index_that_is_no_json_is_a_weights_error(tmp_path: Path) -> None:
    folder = saved(Small(), tmp_path, 2)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightsError, match="index"):
        dtorch.compile(Small().eval(), mesh_of(2), weights=folder)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ("nowhere.safetensors", "does not exist"),
        (7, "state dict or paths"),
        ({"inner.bias": 1.0}, "no tensors"),
        ([1, 2], "paths"),
    ],
    ids=str,
)
def test_what_is_no_source_of_weights_is_refused(weights: Any, text: str) -> None:
    with pytest.raises(WeightsError, match=text):
        dtorch.compile(Small().eval(), mesh_of(2), weights=weights)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no .safetensors"):
        dtorch.compile(Small().eval(), mesh_of(2), weights=tmp_path)


def test_a_model_on_meta_without_weights_is_refused() -> None:
    with pytest.raises(InputError, match="weights="):
        dtorch.compile(llama_on_meta(), mesh_of(2))


# --- changes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_load_state_dict_is_used_by_compiled_programs(shape: tuple[int, ...]) -> None:
    model, compiled = small(*shape)
    compiled(IDS)
    other = Small().eval()
    with torch.no_grad():
        for tensor in [*other.parameters(), other.shift]:
            tensor.mul_(0.7)
    result = compiled.load_state_dict(other.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert_near(compiled(IDS), eager(other, IDS))
    assert compiled.cache_info()["captures"] == 1


def test_load_state_dict_before_the_first_call() -> None:
    _, compiled = small()
    other = Small().eval()
    with torch.no_grad():
        other.inner.bias.add_(1)
    compiled.load_state_dict(other.state_dict())
    assert_near(compiled(IDS), eager(other, IDS))


@pytest.mark.parametrize("called", [False, True])
def test_load_state_dict_names_all_and_changes_nothing(called: bool) -> None:
    model, compiled = small()
    if called:
        compiled(IDS)
    tensors = broken(model)
    tensors["inner.weight"] = torch.zeros(8, 8)
    with pytest.raises(WeightsError) as caught:
        compiled.load_state_dict(tensors)
    assert_names_all(str(caught.value))
    assert isinstance(caught.value, RuntimeError)
    assert_near(compiled(IDS), eager(model, IDS))


def test_load_state_dict_not_strict_takes_what_fits_and_tells_the_rest() -> None:
    model, compiled = small()
    result = compiled.load_state_dict({"inner.bias": torch.ones(8), "extra": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["extra"]
    assert set(result.missing_keys) == set(model.state_dict()) - {"inner.bias"}
    with torch.no_grad():
        model.inner.bias.fill_(1)
    assert_near(compiled(IDS), eager(model, IDS))


def test_load_state_dict_not_strict_with_one_unexpected_key_is_no_error() -> None:
    _, compiled = small()
    assert compiled.load_state_dict({"extra": torch.ones(1)}, strict=False).unexpected_keys == ["extra"]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_the_state_dict_round_trips_with_keys_order_and_ties(shape: tuple[int, ...]) -> None:
    model, compiled = small(*shape)
    compiled(IDS)
    found, wanted = compiled.state_dict(), model.state_dict()
    assert list(found) == list(wanted) and "mask" not in found
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype for name in wanted)
    assert found["head.weight"] is found["embed.weight"]
    assert not any(tensor.requires_grad for tensor in found.values())
    fresh = Small()
    fresh.load_state_dict(found)
    assert_near(compiled(IDS), eager(fresh.eval(), IDS))


def test_a_state_dict_is_a_copy() -> None:
    for shape in MESHES:
        model, compiled = small(*shape)
        compiled(IDS)
        for tensor in compiled.state_dict().values():
            tensor.zero_()
        assert_near(compiled(IDS), eager(model, IDS))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", ["inner.weight", "embed.weight", "head.weight", "scale", "shift", "mask"])
def test_update_is_used_by_later_calls_of_compiled_programs(name: str, shape: tuple[int, ...]) -> None:
    model, compiled = small(*shape)
    compiled(IDS)
    compiled(IDS[:, :2])
    owner, _, leaf = name.rpartition(".")
    target = getattr(model.get_submodule(owner), leaf)
    new = torch.full(target.shape, 0.3) + torch.arange(target.numel()).reshape(target.shape) * 0.1
    compiled.update(name, new)
    new_eager = new.clone()
    new.zero_()  # the module has a copy
    with torch.no_grad():
        target.copy_(new_eager)
    for ids in (IDS, IDS[:, :2]):
        assert_near(compiled(ids), eager(model, ids))
    assert compiled.cache_info()["captures"] == 2


def test_update_refuses_unknown_names_and_other_shapes() -> None:
    model, compiled = small()
    with pytest.raises(WeightsError, match="inner.weigth .nearest: inner.weight"):
        compiled.update("inner.weigth", torch.zeros(8, 8))
    with pytest.raises(WeightsError, match=r"inner.weight: \(8,\) instead of \(8, 8\)"):
        compiled.update("inner.weight", torch.zeros(8))
    assert_near(compiled(IDS), eager(model, IDS))


def test_update_keeps_the_dtype() -> None:
    model, compiled = small()
    compiled.update("inner.bias", torch.ones(8, dtype=torch.float64))
    assert compiled.state_dict()["inner.bias"].dtype == torch.float32
    assert compiled(IDS).dtype == torch.float32


# --- the model and the module are apart ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_changing_the_model_afterwards_changes_nothing(shape: tuple[int, ...]) -> None:
    model, compiled = small(*shape)
    before = eager(model, IDS)
    with torch.no_grad():
        model.inner.weight.zero_()
    assert_near(compiled(IDS), before)
    with torch.no_grad():
        model.embed.weight.zero_()
    assert_near(compiled(IDS), before)


def test_changing_the_module_leaves_the_model_alone() -> None:
    model, compiled = small()
    before = eager(model, IDS)
    compiled(IDS)
    compiled.update("inner.weight", torch.zeros(8, 8))
    compiled.to(torch.float64)
    assert torch.equal(eager(model, IDS), before) and model.inner.weight.dtype == torch.float32


def test_release_frees_the_models_memory() -> None:
    model = Small().eval()
    expected = eager(model, IDS)
    held = [weakref.ref(each.untyped_storage()) for each in (model.inner.weight, model.inner.bias)]
    compiled = dtorch.compile(model, mesh_of(2), release=True)
    assert all(each.device.type == "meta" for each in [*model.parameters(), *model.buffers()])
    assert model.head.weight is model.embed.weight
    assert_near(compiled(IDS), expected)
    gc.collect()
    del held
    store = compiled._build.weights
    assert all(entry.host is None for entry in store.entries)


def test_release_copies_nothing() -> None:
    model = Small().eval()
    pointer = model.inner.weight.data_ptr()
    compiled = dtorch.compile(model, mesh_of(1), release=True)
    compiled(IDS)
    assert compiled._build.weights.by_name["inner.weight"].remote.data.data_ptr() == pointer


def test_a_state_dict_given_as_weights_is_copied() -> None:
    model = Small().eval()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for shape in MESHES:
        compiled = dtorch.compile(model, mesh_of(*shape), weights=tensors)
        tensors["inner.bias"].add_(1)
        found = compiled(IDS)
        tensors["inner.weight"].add_(1)
        tensors["inner.weight"].sub_(1)
        tensors["inner.bias"].sub_(1)
        assert_near(found, eager(model, IDS))


def test_several_modules_of_one_model_live_side_by_side() -> None:
    model = Small().eval()
    one, other = dtorch.compile(model, mesh_of(2)), dtorch.compile(model, mesh_of(3))
    one.update("inner.bias", torch.zeros(8))
    assert_near(other(IDS), eager(model, IDS))
    assert not torch.equal(one(IDS), other(IDS))


# --- dtype, device, mode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("called", [False, True])
def test_to_a_dtype_is_eagers_to(called: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model, args, _ = mlp()
    compiled = dtorch.compile(model, mesh_of(*shape))
    if called:
        compiled(*args)
    assert compiled.to(dtype) is compiled
    model = copy.deepcopy(model).to(dtype)
    found, wanted = compiled(args[0].to(dtype)), eager(model, args[0].to(dtype))
    assert found.dtype == dtype
    assert_near(found, wanted, {torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype])
    assert all(tensor.dtype == dtype for tensor in compiled.state_dict().values())


def test_a_model_from_files_can_change_its_dtype(tmp_path: Path) -> None:
    model, _, kwargs = llama()
    compiled = dtorch.compile(llama_on_meta(), mesh_of(2), weights=saved(model, tmp_path)).double()
    found = compiled(**kwargs)
    assert found.logits.dtype == torch.float64
    assert_near(found, eager(copy.deepcopy(model).double(), **kwargs), 1e-6)
    assert compiled.dtype == torch.float64


def test_to_another_kind_of_device_is_refused() -> None:
    model, compiled = small()
    with pytest.raises(UnsupportedError, match="Compile the model for a mesh of cuda devices"):
        compiled.to("cuda")
    assert compiled.to("cpu") is compiled
    assert_near(compiled(IDS), eager(model, IDS))


def test_training_is_refused() -> None:
    model, compiled = small()
    with pytest.raises(UnsupportedError, match="inference"):
        compiled.train()
    with pytest.raises(UnsupportedError, match="gradients"):
        compiled.requires_grad_()
    assert compiled.eval() is compiled and compiled.train(False) is compiled
    assert_near(compiled(IDS), eager(model, IDS))


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(copy.deepcopy),
        copy.copy,
        pytest.param(pickled),
    ],
)
def test_copies_work_or_say_that_they_do_not(how: Any) -> None:
    model, compiled = small()
    expected = compiled(IDS)
    try:
        twin = how(compiled)
    except UnsupportedError as error:
        assert "compile" in str(error)
    else:
        assert_near(twin(IDS), expected)
        twin.update("inner.bias", torch.full((8,), 9.0))
        assert how is copy.copy or not torch.equal(twin(IDS), compiled(IDS))
    if how is not copy.copy:
        assert_near(compiled(IDS), expected)


# --- hooks and lifetime ----------------------------------------------------------------------------------------------


def test_the_models_own_hooks_are_in_the_graph() -> None:
    model = Small().eval()
    model.inner.register_forward_hook(lambda module, args, result: result * 2)
    compiled = dtorch.compile(model, mesh_of(2))
    assert_near(compiled(IDS), eager(model, IDS))


def test_hooks_on_the_compiled_module_run_at_each_call() -> None:
    model, compiled = small()
    seen: list[str] = []
    compiled.register_forward_pre_hook(lambda module, args: seen.append("before"))
    handle = compiled.register_forward_hook(lambda module, args, result: result + 1)
    for _ in range(2):
        assert_near(compiled(IDS), eager(model, IDS) + 1, 1e-6)
    handle.remove()
    assert_near(compiled(IDS), eager(model, IDS))
    assert seen == ["before"] * 3


def test_a_dropped_module_is_freed_with_its_weights() -> None:
    model, compiled = small(2, placements={"inner.weight": {"tp": Shard(0)}})
    compiled(IDS)
    part = weakref.ref(compiled._build.weights.by_name["inner.weight"].remote.data[0])
    module, program = weakref.ref(compiled), weakref.ref(compiled._last)
    del compiled
    gc.collect()
    assert module() is None and program() is None and part() is None


def test_a_dropped_transformers_module_is_freed_with_its_weights() -> None:
    compiled = dtorch.compile(llama()[0], mesh_of(2))
    compiled.generate(torch.tensor([[3, 4]]), max_new_tokens=2, pad_token_id=0)
    part = weakref.ref(compiled._build.weights.entries[0].remote)
    module = weakref.ref(compiled)
    del compiled
    gc.collect()
    assert module() is None and part() is None


def test_weights_without_a_use_are_kept() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Spare().eval()
    compiled = dtorch.compile(model, mesh_of(2))
    assert_near(compiled(noise(3, 4)), eager(model, noise(3, 4)))
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert torch.equal(compiled.state_dict()["spare.weight"], model.spare.weight)
    compiled.update("spare.weight", torch.zeros(4, 4))
    assert not compiled.state_dict()["spare.weight"].any()
