"""Unmodified modules with dtorch parameters run eagerly, call by call, and give what the plain module gives."""

import copy
import importlib.util

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtorch
from dtorch.placements import Shard


@pytest.fixture(autouse=True)
def _one_thread():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def mesh_of(*shape, names=("dp", "tp")):
    return dtorch.init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])


def cut_everything(module, mesh):
    """Placements that cut every weight of two or more dims over the last axis, by outputs and by inputs in turn."""
    cut = [name for name, value in module.named_parameters() if value.dim() >= 2]
    return {name: {mesh.mesh_dim_names[-1]: Shard(index % 2)} for index, name in enumerate(cut)}


def check(module, *args, mesh=None, get=lambda result: result, placements=None, atol=2e-5, **kwargs):
    """Compare the results of a module and of its distributed copy; gives what the copy returned."""
    module.eval()
    mesh = mesh or mesh_of(2)
    want = get(module(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    distributed = dtorch.distribute_module(copy.deepcopy(module), mesh, placements)
    result = distributed(*args, **kwargs)
    got = get(result)
    assert type(got) is dtorch.Tensor and got.device_mesh == mesh
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got.to_torch(), want, atol=atol, rtol=1e-4)
    return result


def both(module, *args, **options):
    """With whole weights on two devices, and with cut weights on two and on two by two."""
    check(module, *args, **options)
    for mesh in (mesh_of(2), mesh_of(2, 2)):
        check(module, *args, mesh=mesh, placements=cut_everything(module, mesh), **options)


# --- torch.nn -----------------------------------------------------------------------------------------------------


def test_a_transformer_with_encoder_decoder_and_masks():
    module = nn.Transformer(12, 2, 1, 1, 20, batch_first=True)
    source, target = torch.randn(2, 5, 12), torch.randn(2, 4, 12)
    both(module, source, target)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    # torch's fast path zeroes what is padding in the memory, so that memory is masked too
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    check(module, source, target, tgt_mask=mask, tgt_is_causal=True, **masks)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(need_weights):
    module = nn.MultiheadAttention(12, 3, batch_first=True)
    q, k = torch.randn(2, 5, 12), torch.randn(2, 6, 12)
    both(module, q, k, k, need_weights=need_weights, get=lambda result: result[0])
    if need_weights:
        check(module, q, k, k, get=lambda result: result[1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    module = kind(5, 6, num_layers=2, bidirectional=True)
    check(module, torch.randn(4, 2, 5), get=lambda result: result[0])


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += self.short(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 7, 2, 3), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Block(6, 6, 1), Block(6, 10, 2))
        self.head = nn.Linear(10, 7)

    def forward(self, x):
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1), 1))


def test_a_residual_convolutional_network():
    both(ResNet(), torch.randn(2, 3, 20, 20))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2)])
@pytest.mark.parametrize("affine", [False, True])
def test_running_statistics_of_instances_are_written_once_for_all_devices(affine, placement):
    module = nn.InstanceNorm1d(3, affine=affine, track_running_stats=True)
    distributed = dtorch.distribute_module(copy.deepcopy(module), mesh_of(2))
    for _ in range(3):
        x = torch.randn(4, 3, 5)
        got = distributed(dtorch.distribute_tensor(x, mesh_of(2), [placement]))
        torch.testing.assert_close(got.to_torch(), module(x))
    for name, value in module.state_dict().items():
        torch.testing.assert_close(distributed.state_dict()[name], value)


class MakesTensors(nn.Module):
    """What forwards make on the way: positions, masks, zeros, casts, constants."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.register_buffer("frequency", torch.rand(3))

    def forward(self, ids):
        x = self.embed(ids)
        length = ids.shape[1]
        position = torch.arange(length, device=x.device, dtype=torch.float32)
        angles = torch.outer(position, self.frequency.to(position.dtype))
        x = x * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)
        scores = x @ x.mT + mask
        keep = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1)
        out = x.new_zeros(x.shape[0], length, 6)
        out[:, 1:] = (scores @ x)[:, 1:]
        return out.to("cpu").float() + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=x.device)


def test_factories_casts_and_masks_inside_a_forward():
    both(MakesTensors(), torch.randint(0, 9, (2, 5)))
    given = dtorch.from_torch(torch.randint(0, 9, (2, 5)), mesh_of(2), [Shard(0)])
    module = MakesTensors()
    want = module(given.to_torch())
    got = dtorch.distribute_module(module, mesh_of(2))(given)
    torch.testing.assert_close(got.to_torch(), want)


def test_hooks_and_submodules_called_alone_work_as_ever():
    module = dtorch.distribute_module(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), mesh_of(2))
    seen = []
    module[0].register_forward_hook(lambda _, inputs, output: seen.append(output))
    out = module(torch.ones(2, 4))
    assert type(seen[0]) is dtorch.Tensor and torch.equal(out.to_torch(), seen[0].relu().to_torch())
    assert torch.equal(module[0](torch.ones(2, 4)).to_torch(), seen[0].to_torch())


def test_a_second_forward_records_nothing_new():
    module = dtorch.distribute_module(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), mesh_of(2))
    x = torch.randn(2, 3, 8)
    first = module(x).to_torch()
    recorder = module.linear1.weight.recorder
    for _ in range(2):  # the first calls enter parameters in another order
        before = recorder.states
        assert torch.equal(module(x).to_torch(), first)
    assert recorder.states == before


# --- Hugging Face -------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_hugging_face_bert(attention):
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**SMALL, attn_implementation=attention))
    ids = torch.randint(0, 64, (2, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    both(model, ids, attention_mask=mask, get=lambda result: result.logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_hugging_face_llama(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, attn_implementation=attention))
    ids = torch.randint(0, 64, (2, 7))
    both(model, ids, get=lambda result: result.logits)
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    check(model, ids, attention_mask=mask, get=lambda result: result.logits[:, 3:])


def test_a_hugging_face_llama_decodes_with_its_cache():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)).eval()
    ids = torch.randint(0, 64, (1, 4))
    want = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    mesh = mesh_of(2)
    model = dtorch.distribute_module(model, mesh, cut_everything(model, mesh))
    got = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(got.to_torch() if isinstance(got, dtorch.Tensor) else got, want)


def test_a_hugging_face_model_is_saved_and_read_again(tmp_path):
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**SMALL)).eval()
    want = model.state_dict()
    mesh = mesh_of(2)
    dtorch.distribute_module(copy.deepcopy(model), mesh, cut_everything(model, mesh)).save_pretrained(tmp_path)
    again = BertModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, want[name]) for name, value in again.state_dict().items())


# --- others, where they are installed -----------------------------------------------------------------------------


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@needs("diffusers")
def test_a_diffusers_unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    sample, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)
    check(model, sample, 7, text, get=lambda result: result.sample)
    mesh = mesh_of(2)
    placements = cut_everything(model, mesh)
    check(model, sample, torch.tensor([3, 9]), text, mesh=mesh, placements=placements, get=lambda result: result.sample)


@needs("einops")
def test_einops_rearranges_reduces_and_multiplies():
    from einops import einsum, rearrange, reduce

    x = torch.randn(2, 6, 8)
    for placed in ([Shard(0)], [Shard(2)]):
        d = dtorch.distribute_tensor(x, mesh_of(2), placed)
        for function in (
            lambda t: rearrange(t, "b (h w) c -> b c h w", h=2),
            lambda t: reduce(t, "b n c -> b c", "mean"),
            lambda t: einsum(t, t, "b n c, b m c -> b n m"),
        ):
            torch.testing.assert_close(function(d).to_torch(), function(x))
