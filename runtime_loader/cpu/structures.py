"""The structures of the library's interface (sources/interface.h), and rows as one of them. Knows no attention."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.precision import NATIVE_BITS, WIDE_WORD_BITS, used_word_bits, words_offset

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedRows

NUMBERS: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The dtypes that the library reads, by their names in its interface."""
_POINTER: Final = ctypes.c_void_p
_INT32: Final = ctypes.c_int32
_INT64: Final = ctypes.c_int64


class RowsOfSide(ctypes.Structure):
    """The structure `Side`."""

    _fields_ = (
        ("rows", _POINTER),
        *((name, _INT64) for name in ("num_rows", "row_bytes", "row_stride", "first_word")),
        *((name, _INT32) for name in ("bits", "numbers", "num_heads", "head_dim")),
        *((name, _INT32) for name in ("group_size", "word_bits", "token_group")),
    )


class AttendJob(ctypes.Structure):
    """The structure `AttendJob`."""

    _fields_ = (
        ("keys", RowsOfSide),
        ("values", RowsOfSide),
        *((name, _POINTER) for name in ("q", "bias", "slots", "tokens", "queries", "first", "last", "out", "lse")),
        *((name, _INT64) for name in ("num_slots", "num_requests", "num_queries")),
        *((name, _INT32) for name in ("gqa", "integers", "threads")),
        ("scale", ctypes.c_float),
        ("logit_cap", ctypes.c_float),
        ("parallel", _POINTER),
    )


class Window(ctypes.Structure):
    """The structure `Window`."""

    _fields_ = (
        ("keys", RowsOfSide),
        ("values", RowsOfSide),
        ("positions", _POINTER),
        ("requests", _POINTER),
        *((name, _INT64) for name in ("num_request_slots", "num_places", "residual_length", "num_sinks")),
    )


class DecodeJob(ctypes.Structure):
    """The structure `DecodeJob`."""

    _fields_ = (
        ("rows", AttendJob),
        ("window", Window),
        *((name, _POINTER) for name in ("mu", "lambda_", "q", "out", "sinks")),
        ("q_stride", _INT64),
        ("out_stride", _INT64),
        *((name, _INT32) for name in ("q_numbers", "out_numbers", "k_block", "v_block")),
        ("k_factor", ctypes.c_float),
        ("v_factor", ctypes.c_float),
    )


class CopyJob(ctypes.Structure):
    """The structure `CopyJob`."""

    _fields_ = (
        ("window", Window),
        *((name, _POINTER) for name in ("k", "v", "tokens")),
        *((name, _INT64) for name in ("num_requests", "k_stride", "v_stride")),
    )


class StoreJob(ctypes.Structure):
    """The structure `StoreJob`."""

    _fields_ = (
        ("side", RowsOfSide),
        *((name, _POINTER) for name in ("states", "slots", "mu", "inverse_lambda")),
        *((name, _INT64) for name in ("num_tokens", "token_stride", "head_stride")),
        *((name, _INT32) for name in ("numbers", "hadamard_block", "symmetric", "fitted")),
        ("hadamard_factor", ctypes.c_float),
    )


JOBS: Final = (DecodeJob, StoreJob, CopyJob)
"""The structures whose sizes the library tells, so that those of another revision are refused."""


def side_of(stored: PackedRows) -> RowsOfSide:
    """Rows as the library reads them, once everything that it takes for granted was checked.

    Raises:
        ServingError: The rows have another device, dtype or shape, or are fp8.
    """
    rows, row_format, spec = stored.rows, stored.format, stored.format.spec
    if rows.device.type != "cpu":
        raise ServingError(f"attention on a processor cannot read rows on {rows.device}")
    heads, channels = row_format.num_heads, row_format.head_dim
    if spec is None:
        return side_of_states(rows, heads, channels)
    if spec.fp8:
        raise ServingError("attention on a processor has no fp8 rows; unset KVTUNER_ATTENTION")
    row_bytes = row_format.row_bytes(torch.bfloat16)  # refuses what cannot be packed
    if rows.dtype != torch.uint8 or rows.ndim != 2 or rows.shape[1] != row_bytes or _stride(rows) < row_bytes:
        raise ServingError(f"rows must be uint8 [slots, {row_bytes}], not {rows.dtype} {list(rows.shape)}")
    first_word = words_offset(heads, channels, spec.bits, spec.word_bits)
    if spec.token_group > 1:  # a row's share of the words stands straight behind its codes
        first_word = heads * channels * spec.bits // 8
    return RowsOfSide(
        rows.data_ptr(), len(rows), row_bytes, _stride(rows), first_word, spec.bits, 0, heads, channels,
        spec.group_size or channels, used_word_bits(spec.bits, spec.word_bits), spec.token_group,
    )  # fmt: skip


def side_of_states(states: Tensor, num_heads: int, head_dim: int) -> RowsOfSide:
    """Keys or values [tokens, num_heads, head_dim] themselves as rows of 16 bits, whatever their dtype.

    Raises:
        ServingError: They have another dtype or shape, or tokens that are not contiguous.
    """
    if states.dtype not in NUMBERS or states.shape[1:] != (num_heads, head_dim):
        wanted = f"float32, float16 or bfloat16 [tokens, {num_heads}, {head_dim}]"
        raise ServingError(f"keys and values must be {wanted}, not {states.dtype} {list(states.shape)}")
    row_bytes = num_heads * head_dim * states.itemsize
    if not states[:1].is_contiguous() or _stride(states) < row_bytes:
        raise ServingError(f"the heads of a token must lie side by side, but have strides {states.stride()}")
    return RowsOfSide(
        states.data_ptr(), len(states), row_bytes, _stride(states), 0, NATIVE_BITS, NUMBERS[states.dtype], num_heads,
        head_dim, head_dim, WIDE_WORD_BITS, 1,
    )  # fmt: skip


def _stride(rows: Tensor) -> int:
    """Bytes from one row to the next; those of a row where there is one at most."""
    if len(rows) < 2:
        return rows[:1].nbytes if len(rows) else rows.itemsize * rows.shape[1:].numel()
    if rows.stride(-1) != 1:
        return -1
    return int(rows.stride(0)) * rows.itemsize
