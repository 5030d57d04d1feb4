"""Tiny seeded models, and rows of every kind."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from interpreted_kernels import replace_language_once
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.packed_attention import PackedRows
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtuner.geometry import ModelGeometry
    from kvtuner.precision import Fit, WordBits

replace_language_once()

SPARE = 255
"""The byte of rows that nobody wrote: their scale words are NaN."""
# A wide initialization, so that attention is far from uniform and an error in keys or values reaches the logits.
COMMON = {
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def llama_gqa_64() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(**COMMON, hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    )


def qwen2_mqa_80() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**COMMON, hidden_size=160, num_attention_heads=2, num_key_value_heads=1))


def qwen3_mha_64() -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(**COMMON, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=64)
    )


BUILDERS = {"llama-gqa-64": llama_gqa_64, "qwen2-mqa-80": qwen2_mqa_80, "qwen3-mha-64": qwen3_mha_64}


@cache
def tiny_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(7)
    return BUILDERS[name]().to(dtype).eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small spend their time waiting for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BUILDERS)
def model_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model_of() -> Callable[[str, torch.dtype], PreTrainedModel]:
    """A model by name and dtype; shared, never to be changed."""
    return tiny_model


@pytest.fixture
def transform_of() -> Callable[[str, ModelGeometry, int], Transform]:
    """A transform by name, with random constants."""

    def make(name: str, geometry: ModelGeometry, seed: int) -> Transform:
        kind = TransformKind.parse(name)
        generator = torch.Generator().manual_seed(seed)
        shape = (geometry.num_kv_heads, geometry.head_dim)
        mu = torch.randn(shape, generator=generator).half()
        lam = torch.randn(shape, generator=generator).exp().clamp(1 / 64, 64).half()
        return Transform(kind, mu if kind.centered else None, lam if kind.balanced else None)

    return make


@pytest.fixture
def row_format() -> Callable[..., RowFormat]:
    """`row_format(num_heads, head_dim, bits, kind, group_size, symmetric, fit, word_bits)`, with random constants."""

    def make(
        num_heads: int,
        head_dim: int,
        bits: int,
        kind: str = "none",
        group_size: int | None = None,
        symmetric: bool = False,
        fit: Fit = "minmax",
        word_bits: WordBits = 32,
    ) -> RowFormat:
        if bits == 16:
            return RowFormat(num_heads, head_dim, None)
        generator = torch.Generator().manual_seed(bits)
        parts, shape = TransformKind.parse(kind), (num_heads, head_dim)
        mu = (0.3 * torch.randn(shape, generator=generator)).half() if parts.centered else None
        lam = (0.4 * torch.randn(shape, generator=generator)).exp().half() if parts.balanced else None
        transform = Transform(parts, mu, lam)
        spec = QuantSpec(bits, transform, group_size, symmetric, fit, word_bits=word_bits)
        return RowFormat(num_heads, head_dim, spec)

    return make


@pytest.fixture
def poisoned() -> Callable[..., PackedRows]:
    """`poisoned(row_format, num_slots, dtype)`: rows in which whatever is not written reads NaN."""

    def make(row_format: RowFormat, num_slots: int, dtype: torch.dtype = torch.float16) -> PackedRows:
        if row_format.spec is None:
            shape = (num_slots, row_format.num_heads, row_format.head_dim)
            return PackedRows(torch.full(shape, torch.nan, dtype=dtype), row_format)
        row_bytes = row_format.row_bytes(dtype)
        return PackedRows(torch.full((num_slots, row_bytes), SPARE, dtype=torch.uint8), row_format)

    return make
