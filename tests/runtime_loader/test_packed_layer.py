"""Rows are those of `quant`, buffers grow by little, and the batch can be cut and turned."""

from __future__ import annotations

import pytest
import torch

from kvtuner.errors import CacheError, ProfileError
from kvtuner.precision import PACKED_BITS, ExactWindow, WordBits, row_bytes
from kvtuner.quant import QuantSpec, Transform, quantize
from kvtuner.row_packing import pack_rows, pack_token_groups
from kvtuner.runtime_loader import row_format
from kvtuner.runtime_loader.packed_layer import PackedSide, PerChannelSide, TokenBuffer, packed_side
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind

HADAMARD = Transform(TransformKind.parse("hadamard"))


def states(batch: int, heads: int, tokens: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(batch, heads, tokens, head_dim, generator=generator) + 1


def stored(spec: QuantSpec | None, heads: int = 3, head_dim: int = 64) -> PackedSide:
    return PackedSide(RowFormat(heads, head_dim, spec))


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 32), (64, 64), (80, 40), (80, 80), (128, 64)])
@pytest.mark.parametrize(("symmetric", "word_bits"), [(False, 32), (True, 32), (False, 16)])
def test_chunks_become_the_rows_that_quant_packs_of_the_whole(
    bits: int, head_dim: int, group_size: int, symmetric: bool, word_bits: WordBits
) -> None:
    side = stored(QuantSpec(bits, HADAMARD, group_size, symmetric, word_bits=word_bits), head_dim=head_dim)
    whole = states(2, 3, 37, head_dim)
    for chunk in whole.split([1, 5, 30, 1], dim=2):
        side.extend(chunk, fresh_is_exact=False)
    rotated = HADAMARD.apply(whole.transpose(1, 2))
    expected = pack_rows(quantize(rotated, bits, group_size, symmetric=symmetric, word_bits=word_bits))
    assert expected.shape == (2, 37, row_bytes(3, head_dim, bits, group_size, word_bits=word_bits))
    assert torch.equal(side.buffer.rows, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_read_back_as_quant_simulates_them_in_the_dtype_of_the_keys(dtype: torch.dtype) -> None:
    spec = QuantSpec(4, HADAMARD)
    keys = states(2, 3, 9, 64).to(dtype)
    read = stored(spec).extend(keys, fresh_is_exact=False)
    assert read.dtype == dtype
    assert torch.equal(read, spec.simulate(keys.transpose(1, 2)).transpose(1, 2).to(dtype))


def test_long_chunks_are_packed_and_read_in_blocks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = states(2, 3, 23, 64)
    whole, in_blocks = stored(QuantSpec(2)), stored(QuantSpec(2))
    expected = whole.extend(keys, fresh_is_exact=False)
    monkeypatch.setattr(row_format, "BLOCK_TOKENS", 5)
    assert torch.equal(in_blocks.extend(keys, fresh_is_exact=False), expected)
    assert torch.equal(in_blocks.buffer.rows, whole.buffer.rows)


def test_an_exact_chunk_is_read_as_it_came_behind_a_quantized_past() -> None:
    spec = QuantSpec(2)
    side = stored(spec)
    first, second = states(1, 3, 6, 64), states(1, 3, 1, 64, seed=1)
    assert torch.equal(side.extend(first, fresh_is_exact=True), first)
    read = side.extend(second, fresh_is_exact=True)
    past = spec.simulate(first.transpose(1, 2)).transpose(1, 2)
    assert torch.equal(read, torch.cat((past, second), dim=2))
    assert not torch.equal(past, first)


def test_a_group_with_nan_reads_nan_and_leaves_the_others_alone() -> None:
    side = stored(QuantSpec(4, group_size=32))
    keys = states(2, 3, 5, 64)
    keys[1, 2, 3, 40] = torch.nan
    keys[0, 0, 0, 0] = torch.inf
    read = side.extend(keys, fresh_is_exact=False)
    expected = torch.zeros_like(keys, dtype=torch.bool)
    expected[1, 2, 3, 32:] = True
    expected[0, 0, 0, :32] = True
    assert torch.equal(read.isnan(), expected)


def test_appending_tokens_one_by_one_copies_a_constant_number_of_tokens_each() -> None:
    buffer = TokenBuffer()
    num_tokens, copied, address = 3000, 0, None
    for token in range(num_tokens):
        buffer.append(torch.full((2, 1, 24), token % 251, dtype=torch.uint8))
        if buffer.rows.data_ptr() != address:
            copied += token
            address = buffer.rows.data_ptr()
        assert buffer.allocated_bytes <= 2 * 24 * max((token + 1) * 1.25, token + 1 + 16)
    assert copied <= 6 * num_tokens
    assert buffer.stored_bytes == 2 * num_tokens * 24
    assert torch.equal(buffer.rows[1, :, 0], (torch.arange(num_tokens) % 251).to(torch.uint8))


def test_a_truncated_buffer_forgets_and_is_written_anew() -> None:
    buffer = TokenBuffer()
    rows = torch.arange(2 * 9 * 4, dtype=torch.uint8).reshape(2, 9, 4)
    buffer.append(rows)
    buffer.truncate(20)
    assert len(buffer) == 9
    buffer.truncate(5)
    assert buffer.stored_bytes == 2 * 5 * 4
    buffer.append(rows[:, :2] + 100)
    assert torch.equal(buffer.rows, torch.cat((rows[:, :5], rows[:, :2] + 100), dim=1))


@pytest.mark.parametrize("indices", [torch.tensor([2, 0, 2, 1]), torch.tensor([1]), torch.tensor([True, False, True])])
def test_taking_a_batch_keeps_rows_and_room_to_append(indices: torch.Tensor) -> None:
    buffer = TokenBuffer()
    rows = torch.arange(3 * 4 * 2, dtype=torch.uint8).reshape(3, 4, 2)
    buffer.append(rows)
    buffer.take(indices)
    fresh = rows[indices][:, :1] + 7
    buffer.append(fresh)
    assert torch.equal(buffer.rows, torch.cat((rows[indices], fresh), dim=1))


def test_an_empty_buffer_can_be_cut_turned_and_measured() -> None:
    buffer = TokenBuffer()
    buffer.truncate(0)
    buffer.take(torch.tensor([1, 0]))
    assert (len(buffer), buffer.rows, buffer.stored_bytes, buffer.allocated_bytes) == (0, None, 0, 0)


def test_rows_written_in_inference_mode_can_be_appended_to_after_it() -> None:
    side = stored(None)
    keys = states(1, 3, 6, 64)
    with torch.inference_mode():
        side.extend(keys[:, :, :2], fresh_is_exact=False)
        side.extend(keys[:, :, 2:4], fresh_is_exact=False)
        side.buffer.take(torch.tensor([0]))
    assert side.buffer.allocated_bytes > side.buffer.stored_bytes, "no room left: a new buffer would hide it"
    assert torch.equal(side.extend(keys[:, :, 4:], fresh_is_exact=False), keys)


def test_stored_rows_carry_no_gradient() -> None:
    for spec in (None, QuantSpec(4)):
        side = stored(spec)
        side.extend(states(1, 3, 4, 64).requires_grad_(), fresh_is_exact=True)
        assert not side.buffer.rows.requires_grad


def per_channel(bits: int = 4, group: int = 16, residual_length: int = 16, heads: int = 3) -> PackedSide:
    spec = QuantSpec(bits, token_group=group)
    return packed_side(RowFormat(heads, 64, spec), ExactWindow(residual_length))


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("cuts", [[1] * 70, [3, 30, 1, 1, 14, 21], [16, 16, 38], [70]], ids=str)
def test_groups_are_packed_once_they_are_full_however_the_tokens_came(bits: int, cuts: list[int]) -> None:
    side, whole = per_channel(bits), states(2, 3, 70, 64)
    assert isinstance(side, PerChannelSide)
    spec, past = side.format.spec, 0
    for chunk in whole.split(cuts, dim=2):
        read = side.extend(chunk, fresh_is_exact=False)
        past += chunk.shape[2]
        full = past // 16 * 16
        expected = spec.simulate(whole[:, :, :past].transpose(1, 2)).transpose(1, 2)
        near = past - min(past, 16)  # of the window
        assert torch.equal(read[:, :, :near], expected[:, :, :near])
        assert torch.equal(read[:, :, near:], whole[:, :, near:past])
        assert torch.equal(
            side.buffer.rows[:, :full], pack_token_groups(spec.quantize(whole[:, :, :full].transpose(1, 2)))
        )
    assert side.buffer.stored_bytes == 2 * 70 * row_bytes(3, 64, bits, 16, granularity="per_channel")


def test_a_chunk_that_is_exact_within_itself_reads_before_it_the_group_that_it_fills() -> None:
    side, whole = per_channel(), states(1, 3, 50, 64)
    side.extend(whole[:, :, :37], fresh_is_exact=True)
    read = side.extend(whole[:, :, 37:], fresh_is_exact=True, num_copies=28)
    rows = side.format.spec.simulate(whole[:, :, :48].transpose(1, 2)).transpose(1, 2)
    assert torch.equal(read, torch.cat((whole[:, :, 22:], rows[:, :, :37], whole[:, :, 37:]), dim=2))


@pytest.mark.parametrize("kept", [0, 16, 30, 40, 48, 53])
def test_after_a_removal_a_group_is_stored_again_of_copies_or_of_what_its_rows_gave(kept: int) -> None:
    side, whole, other = per_channel(), states(2, 3, 54, 64), states(2, 3, 40, 64, seed=1)
    for token in whole.split(1, dim=2):
        side.extend(token, fresh_is_exact=False)
    before = side.format.unpack(side.buffer.rows[:, :48], torch.float32).transpose(1, 2)
    side.truncate(kept)
    read = side.extend(other, fresh_is_exact=False)
    known = whole[:, :, :kept].clone()
    without_copy = slice(kept // 16 * 16, min(38, kept))  # copies were of tokens 38 to 53
    known[:, :, without_copy] = before[:, :, without_copy]
    expected = side.format.spec.simulate(torch.cat((known, other), dim=2).transpose(1, 2)).transpose(1, 2)
    assert torch.equal(read[:, :, :-16], expected[:, :, :-16])
    assert torch.equal(read[:, :, -16:], other[:, :, -16:])


def test_a_batch_takes_its_groups_that_are_not_full_along() -> None:
    side, whole, other = per_channel(), states(3, 3, 27, 64), states(2, 3, 20, 64, seed=1)
    side.extend(whole, fresh_is_exact=False)
    side.take(torch.tensor([2, 0]))
    read = side.extend(other, fresh_is_exact=False)
    expected = side.format.spec.simulate(torch.cat((whole[[2, 0]], other), dim=2).transpose(1, 2)).transpose(1, 2)
    assert torch.equal(read[:, :, :31], expected[:, :, :31])
    side.clear()
    assert torch.equal(side.extend(other, fresh_is_exact=True), other)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((2, 2, 4, 64), torch.float32, ProfileError, "stores 3 KV heads of 64 channels, but .* 2 of 64"),
        ((2, 3, 4, 80), torch.float32, ProfileError, "stores 3 KV heads of 64 channels, but .* 3 of 80"),
        ((5, 3, 4, 64), torch.float32, CacheError, "batch of 2, but was given one of 5"),
        ((2, 3, 4, 64), torch.float16, CacheError, "holds torch.float32, but was given torch.float16"),
    ],
)
def test_states_of_another_kind_are_refused(
    shape: tuple[int, ...], dtype: torch.dtype, error: type[Exception], message: str
) -> None:
    side = stored(None)
    side.extend(states(2, 3, 1, 64), fresh_is_exact=True)
    with pytest.raises(error, match=message):
        side.check(torch.zeros(shape, dtype=dtype))
    side.check(torch.zeros(2, 3, 4, 64))
