"""Messages: what was packed comes back; what is foreign, damaged or repeated is refused, whatever its bytes."""

import struct
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.runtime.protocol import (
    MAGIC,
    VERSION,
    BadMessage,
    Kind,
    as_buffer,
    as_bytes,
    decode,
    describe,
    encode,
    from_blob,
    pack_run,
    read_meta,
    shaped,
    unpack_run,
)

TOKEN = bytes(range(16))


@given(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.lists(st.integers(-(2**63), 2**63 - 1)), st.binary())
def test_what_was_packed_comes_back(kind, sender, ints, blob):
    message = decode(TOKEN, encode(TOKEN, kind, sender, 7, ints, {"a": [1, None]}, (blob,)))
    assert (message.kind, message.sender, message.number, list(message.ints)) == (kind, sender, 7, ints)
    assert message.data == {"a": [1, None]} and message.blobs == (blob,)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=64), max_size=6))
def test_any_bytes_are_refused(frames):
    with pytest.raises(BadMessage):
        decode(TOKEN, frames)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_message_is_refused_or_is_a_message_still(data):
    frames = [bytearray(frame) for frame in encode(TOKEN, Kind.RUN, 3, 9, pack_run(1, [2], [3], [4]), [["float32"]])]
    frame = data.draw(st.sampled_from([f for f in frames if f]))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    try:
        message = decode(TOKEN, [bytes(frame) for frame in frames])
        unpack_run(message.ints)
    except BadMessage:
        return
    assert isinstance(message.kind, Kind)


def test_messages_of_others_and_repeated_ones_are_refused():
    frames = encode(TOKEN, Kind.DONE, 0, 5, (1,))
    for token, least, why in ((bytes(16), 0, "another cluster"), (TOKEN, 6, "used before")):
        with pytest.raises(BadMessage, match=why):
            decode(token, frames, least)
    other = struct.pack("!4sHH16sIQ", MAGIC, VERSION + 1, Kind.DONE, TOKEN, 0, 5)
    with pytest.raises(BadMessage, match="version"):
        decode(TOKEN, [other, *frames[1:]])
    with pytest.raises(BadMessage, match="frames"):
        decode(TOKEN, [*frames, *[b""] * 5000])
    with pytest.raises(BadMessage, match="nested"):
        decode(TOKEN, [frames[0], b"", b"[" * 100_000])


def test_counts_of_a_run_that_do_not_fit_are_refused():
    plan, arguments, results, frees = unpack_run(pack_run(1, [2, -1], [5], [6, 7]))
    assert (plan, list(arguments), list(results), list(frees)) == (1, [2, -1], [5], [6, 7])
    for bad in ((1,), (1, 5, 0), (1, -1, 0), (1, 0, 2**40)):
        with pytest.raises(BadMessage):
            unpack_run(array("q", bad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_keep_dtype_shape_strides_and_bits(dtype):
    base = torch.arange(24).reshape(2, 3, 4).to(dtype)
    image = torch.arange(48.0).reshape(2, 3, 2, 4).to(dtype).to(memory_format=torch.channels_last)
    for tensor in (base, base.transpose(0, 2), base[0, 0, 0], base[:, :0], image, base[0, 0, ::4][:1]):
        meta, dense = describe(tensor)
        data = as_bytes(dense)
        back = from_blob(bytes(as_buffer(data)), meta)
        assert back.dtype is tensor.dtype and torch.equal(back, tensor)
        if tensor.numel() == base.numel() or tensor is image:
            assert back.stride() == tensor.stride()
    wanting = torch.ones(2, requires_grad=True)
    meta, dense = describe(wanting)
    assert shaped(dense, meta).requires_grad


@pytest.mark.parametrize(
    "meta", [None, [], ["float32", [1], [0]], ["float32", [-1], [0], False], ["add", [1], [0], False],
             ["float32", [1, 2], [0, 0], False], ["float32", ["x"], [0], False], [1, 2, 3, 4]],
)  # fmt: skip
def test_metadata_that_describes_no_tensor_is_refused(meta):
    with pytest.raises(BadMessage):
        read_meta(meta)


def test_bytes_that_are_too_few_are_refused():
    with pytest.raises(BadMessage, match="bytes"):
        from_blob(b"1234", ["float32", [2], [0], False])
