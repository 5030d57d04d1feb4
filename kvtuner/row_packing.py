"""The packing of codes and scale words into rows of bytes, and back. Knows nothing of how codes were chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtuner.errors import PrecisionError
from kvtuner.precision import row_bytes
from kvtuner.quant import Quantized


def pack_rows(quantized: Quantized) -> Tensor:
    """Lay tokens out as rows: halfword-sliced codes of every head, then the scale words, padded to 16 bytes.

    Per head there are ``head_dim * bits / 16`` little-endian 16-bit units; slot j of unit u holds channel
    ``j * (head_dim * bits / 16) + u`` in bits ``[j * bits, (j + 1) * bits)``. A scale word is little-endian uint32:
    fp16 scale | fp16 minimum << 16, one per (head, group).

    Returns:
        uint8 [..., row_bytes].
    """
    bits, slots = quantized.bits, 16 // quantized.bits
    num_heads, head_dim = quantized.codes.shape[-2:]
    lead = quantized.codes.shape[:-2]
    sliced = quantized.codes.to(torch.int32).unflatten(-1, (slots, head_dim // slots))
    shifts = torch.arange(slots, dtype=torch.int32, device=sliced.device) * bits
    units = (sliced << shifts.unsqueeze(-1)).sum(dim=-2, dtype=torch.int32)
    code_bytes = torch.stack((units & 0xFF, units >> 8), dim=-1).to(torch.uint8).flatten(-3)
    words = torch.stack((quantized.scale, quantized.minimum), dim=-1).contiguous()
    word_bytes = words.view(torch.uint8).flatten(-3)
    group_size = head_dim // quantized.scale.shape[-1]
    padding = row_bytes(num_heads, head_dim, bits, group_size) - code_bytes.shape[-1] - word_bytes.shape[-1]
    zeros = code_bytes.new_zeros(*lead, padding)
    return torch.cat((code_bytes, word_bytes, zeros), dim=-1)


def unpack_rows(rows: Tensor, bits: int, num_heads: int, head_dim: int, group_size: int | None = None) -> Quantized:
    """Read rows that `pack_rows` wrote, uint8 [..., row_bytes]; `group_size` is head_dim by default.

    Raises:
        PrecisionError: A row of another length, or what `check_group_size` refuses.
    """
    group_size = head_dim if group_size is None else group_size
    expected = row_bytes(num_heads, head_dim, bits, group_size)
    if rows.shape[-1] != expected or rows.dtype != torch.uint8:
        raise PrecisionError(f"a row is uint8 [..., {expected}], not {rows.dtype} [..., {rows.shape[-1]}]")
    lead, slots = rows.shape[:-1], 16 // bits
    num_code_bytes = num_heads * head_dim * bits // 8
    num_word_bytes = 4 * num_heads * (head_dim // group_size)
    halves = rows[..., :num_code_bytes].reshape(*lead, num_heads, head_dim // slots, 2).to(torch.int32)
    units = halves[..., 0] | halves[..., 1] << 8
    shifts = torch.arange(slots, dtype=torch.int32, device=rows.device) * bits
    codes = (units.unsqueeze(-2) >> shifts.unsqueeze(-1)) & (2**bits - 1)
    words = rows[..., num_code_bytes : num_code_bytes + num_word_bytes].contiguous().view(torch.float16)
    words = words.reshape(*lead, num_heads, head_dim // group_size, 2)
    return Quantized(codes.to(torch.uint8).flatten(-2), words[..., 0], words[..., 1], bits)
