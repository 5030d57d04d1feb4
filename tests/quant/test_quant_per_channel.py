"""Keys per channel: against KIVI's arithmetic in float64, and rows read bit by bit by what the format says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtuner.errors import PrecisionError
from kvtuner.precision import PACKED_BITS, TOKEN_GROUPS, row_bytes
from kvtuner.quant import QuantSpec, Transform, by_channel, by_token
from kvtuner.row_packing import pack_token_groups, unpack_token_groups
from kvtuner.transforms import TransformKind

SHAPES = [(1, 16), (3, 48), (2, 80)]


def keys(tokens: int, heads: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    """Keys [tokens, heads, head_dim] with channels of very different sizes and offsets, as KIVI found them."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(2 * torch.randn(heads, head_dim, generator=generator))
    offset = 5 * torch.randn(heads, head_dim, generator=generator)
    return scale * torch.randn(tokens, heads, head_dim, generator=generator) + offset


def per_channel(bits: int, tokens: int, **options: bool) -> QuantSpec:
    return QuantSpec(bits, token_group=tokens, **options)


def kivi(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Real-valued codes, scale and minimum, float64, of the tokens [tokens, heads, head_dim] of one group."""
    minimum = x.min(0)
    scale = (x.max(0) - minimum) / (2**bits - 1)
    return (x - minimum) / scale, scale, minimum


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("group", TOKEN_GROUPS)
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_each_channel_of_a_group_of_tokens_has_the_grid_of_kivi(
    bits: int, group: int, heads: int, head_dim: int
) -> None:
    x, spec = keys(2 * group, heads, head_dim), per_channel(bits, group)
    found = spec.quantize(x)
    for number in range(2):
        exact = x[number * group : (number + 1) * group].double().numpy()
        codes, scale, minimum = kivi(exact, bits)
        own = {name: getattr(found, name)[number].double().numpy() for name in ("codes", "scale", "minimum")}
        # fp16 words: a minimum rounded down, and a scale that still covers the group; 11 significant bits.
        assert (own["minimum"][..., 0] <= minimum).all() and (own["scale"][..., 0] >= scale * (1 - 1e-6)).all()
        slack = np.abs(minimum) * 2.0**-10 + 2.0**-24
        assert (own["minimum"][..., 0] >= minimum - slack).all()
        assert (own["scale"][..., 0] <= (scale + slack / (2**bits - 1)) * (1 + 2.0**-9) + 2.0**-24).all()
        away = np.moveaxis(own["codes"], -1, 0) - codes
        # Half a step of rounding, and what the rounded words move a value, in steps of KIVI's grid.
        moved = (slack + (2**bits - 1) * (slack / (2**bits - 1) + scale * 2.0**-9 + 2.0**-24)) / scale
        assert (np.abs(away) <= 0.5 + moved + 1e-3).all()
        read = spec.simulate(x)[number * group : (number + 1) * group].double().numpy()
        assert (np.abs(read - exact) <= own["scale"][..., 0] * 0.501 + np.abs(exact) * 2.0**-20).all()


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("group", TOKEN_GROUPS)
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_rows_hold_what_the_format_says(bits: int, group: int, heads: int, head_dim: int) -> None:
    quantized = per_channel(bits, group, symmetric=True).quantize(keys(2 * group, heads, head_dim))
    rows = pack_token_groups(quantized)
    assert rows.shape == (2 * group, row_bytes(heads, head_dim, bits, group, granularity="per_channel"))
    code_bytes, share = heads * head_dim * bits // 8, -(-4 * heads * head_dim // group)
    for number in range(2):
        own = [bytes(row.tolist()) for row in rows[number * group : (number + 1) * group]]
        words = b"".join(row[code_bytes : code_bytes + share] for row in own)
        for channel, word in enumerate(np.frombuffer(words[: 4 * heads * head_dim], "<u4")):
            head, place = divmod(channel, head_dim)
            scale, minimum = (getattr(quantized, name)[number, head, place, 0] for name in ("scale", "minimum"))
            assert np.uint16(word & 0xFFFF).view(np.float16) == float(scale)
            assert np.uint16(word >> 16).view(np.float16) == float(minimum)
        assert not any(words[4 * heads * head_dim :]) and not any(any(row[code_bytes + share :]) for row in own)
    slots = 8 if bits == 3 else 16 // bits
    units = head_dim // slots
    for token in (0, group - 1, group + 5):
        row, (number, place) = bytes(rows[token].tolist()), divmod(token, group)
        for head in range(heads):
            for unit in range(units):
                at = 2 * (head * units + unit)
                value = int.from_bytes(row[at : at + 2], "little")
                if bits == 3:
                    high = (unit % (units // 2)) * 2 + unit // (units // 2)
                    value |= row[2 * heads * units + head * units + high] << 16
                for slot in range(slots):
                    code = int(quantized.codes[number, head, slot * units + unit, place])
                    assert value >> (slot * bits) & (2**bits - 1) == code
    again = unpack_token_groups(rows, bits, heads, head_dim, group)
    assert torch.equal(again.codes, quantized.codes) and torch.equal(again.dequantize(), quantized.dequantize())


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_tokens_of_a_group_that_is_not_full_stay_exact(symmetric: bool) -> None:
    x, spec = keys(83, 2, 48), per_channel(2, 32, symmetric=symmetric)
    read = spec.simulate(x)
    assert torch.equal(read[64:], x[64:])
    assert torch.equal(read[:64], torch.cat([spec.simulate(x[:32]), spec.simulate(x[32:64])]))
    assert not torch.equal(read[:64], x[:64])
    assert torch.equal(spec.simulate(x[:31]), x[:31])
    assert torch.equal(spec.simulate(x.expand(3, 83, 2, 48))[1], read)


def test_tokens_of_a_channel_lie_together_and_come_back() -> None:
    x = keys(64, 2, 48)
    groups = by_channel(x, 32)
    assert groups.shape == (2, 2, 48, 32) and torch.equal(groups[1, 1, 7], x[32:, 1, 7])
    assert torch.equal(by_token(groups), x)


def test_a_channel_with_nan_reads_nan_in_its_group_alone() -> None:
    x = keys(64, 2, 48)
    x[40, 1, 7] = torch.nan
    expected = torch.zeros_like(x, dtype=torch.bool)
    expected[32:, 1, 7] = True
    quantized = per_channel(4, 32).quantize(x)
    assert torch.equal(by_token(quantized.dequantize()).isnan(), expected)
    assert torch.equal(
        unpack_token_groups(pack_token_groups(quantized), 4, 2, 48, 32).dequantize().isnan(), by_channel(expected, 32)
    )


def test_what_keys_per_channel_do_not_have_is_refused() -> None:
    rotated = Transform(TransformKind.parse("hadamard"))
    for options in ({"transform": rotated}, {"fit": "least_squares"}, {"word_bits": 16}):
        with pytest.raises(PrecisionError, match="per-channel keys have no transform, min-max grids and words of 32"):
            QuantSpec(4, token_group=32, **options)
    with pytest.raises(PrecisionError, match="need a group_size of"):
        per_channel(4, 24).quantize(keys(24, 1, 16))
    with pytest.raises(PrecisionError, match="a row is uint8"):
        unpack_token_groups(torch.zeros(32, 48, dtype=torch.uint8), 4, 1, 16, 32)
