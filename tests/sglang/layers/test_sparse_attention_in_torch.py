"""SGLang's layers of sparse attention (DSA), served by the stand-ins for its kernels, against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from served_layers.sparse_latents import SPARSE, TOPK, round_index, select_all
from served_layers.stand_ins import load_stand_ins
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization

if TYPE_CHECKING:
    from types import ModuleType

    from fixture_types import Compare, ModelFolder, ProfileOf, Prompts, Serve
    from torch import Tensor

CHUNK = 64
"""The tokens of a page of these models, and of the chunks in which prompts are prefilled here."""
WITHIN, BEYOND = (5, 33, 1, TOPK - 12), (3 * TOPK + 5, 7, TOPK + 1, 2 * TOPK)
"""Lengths of prompts of which the index selects every token, and of some of which it leaves out most."""


@pytest.fixture(scope="module")
def stand_ins() -> ModuleType:
    return load_stand_ins("sparse_attention_in_torch")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("topk_lengths", [None, (5, 3, 1, 0)])
def test_queries_read_the_slots_that_are_listed_for_them(
    topk_lengths: tuple[int, ...] | None, stand_ins: ModuleType
) -> None:
    heads, channels, d_v, slots, scale = 3, 20, 13, 11, 0.3
    q, rows = numbers(4, heads, channels), numbers(slots, 1, channels, seed=1)
    indices = torch.tensor([[7, 2, 10, 0, 3], [-1, 4, -1, 1, 9], [5, -1, -1, -1, -1], [-1] * 5], dtype=torch.int32)
    lengths = None if topk_lengths is None else torch.tensor(topk_lengths, dtype=torch.int32)
    read, highest, divisors = stand_ins.flash_mla_sparse_fwd(q, rows, indices[:, None], scale, d_v, None, lengths)
    assert read.shape == (4, heads, d_v)
    for token in range(4):
        listed = indices[token].tolist()[: None if topk_lengths is None else topk_lengths[token]]
        taken = rows[[slot for slot in listed if slot >= 0], 0].double()
        for head in range(heads):
            scores = taken @ q[token, head].double() * scale
            expected = scores.softmax(0) @ taken[:, :d_v]
            torch.testing.assert_close(read[token, head].double(), expected, rtol=1e-5, atol=1e-6)  # float32's sums
            if len(taken):
                assert highest[token, head].item() == pytest.approx(scores.max().item(), rel=1e-5)
                assert divisors[token, head].item() == pytest.approx(scores.logsumexp(0).item(), rel=1e-5)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_an_index_is_rounded_to_the_nearest_code_of_its_scale(scale_fmt: str | None, stand_ins: ModuleType) -> None:
    x = numbers(9, 3, 256) * numbers(9, 3, 1, seed=1).exp()
    x[2, 1] = 0
    x[4, 0] *= 1e-6
    codes, scale = stand_ins.rounded_to_fp8(x, 128, scale_fmt)
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.shape == x.shape
    assert scale.shape == (9, 3, 2)
    blocks = x.unflatten(-1, (2, 128)).double()
    least = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    if scale_fmt is None:
        torch.testing.assert_close(scale.double(), least, rtol=1e-6, atol=0.0)  # float32's division
    else:
        assert torch.equal(scale.frexp().mantissa, torch.full_like(scale, 0.5))
        assert (scale >= least).all()
        assert (scale < 2 * least).all()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[every.isfinite()]
    wanted = blocks / scale.double()[..., None]
    nearest = (wanted[..., None] - every).abs().amin(-1)
    found = (wanted - codes.unflatten(-1, (2, 128)).double()).abs()
    # Of two codes equally near it may be either, up to the rounding of a quotient in float32.
    torch.testing.assert_close(found, nearest, rtol=0.0, atol=448 * 2.0**-23)


def test_a_hadamard_transform_has_the_signs_of_its_recursion(stand_ins: ModuleType) -> None:
    signs = torch.tensor([[(-1) ** (row & column).bit_count() for column in range(32)] for row in range(32)])
    transformed = stand_ins.hadamard_transform(numbers(5, 2, 32), scale=32**-0.5)
    expected = numbers(5, 2, 32).double() @ signs.double() * 32**-0.5
    torch.testing.assert_close(transformed.double(), expected, rtol=1e-5, atol=1e-6)  # float32's sums


@pytest.mark.parametrize("name", SPARSE)
def test_a_server_selects_what_transformers_does_by_an_index_of_its_rounding(
    name: str, serve: Serve, compare: Compare, model_folder: ModelFolder, profile_of: ProfileOf, prompts: Prompts
) -> None:
    folder = model_folder(name, **SPARSE[name])
    config = AutoConfig.from_pretrained(folder)
    native = profile_of(config, [LayerQuantization(16, 16)] * config.num_hidden_layers, by_kinds=True)
    with serve(folder, "--skip-server-warmup", "--chunked-prefill-size", str(CHUNK)) as server:

        def agree(lengths: tuple[int, ...], **options: Any) -> Any:
            return compare(server, folder, native, prompts(*lengths), 8, of_prompts=True, **options)

        within, rounded = agree(WITHIN), agree(BEYOND, alter=round_index)
        unrounded, dense = agree(BEYOND), agree(BEYOND, alter=select_all)
        long = prompts(BEYOND[0], BEYOND[-1] + 9)
        hit = compare(server, folder, native, long, 8, 2 * CHUNK, is_hit=True, alter=round_index)
        log = server.log
    assert "prefill=flashmla_sparse, decode=flashmla_sparse." in log
    assert within.divergence < 1e-6
    assert within.same_argmax == 1
    # What rounding moves is the scale: one code that is rounded otherwise may select another token.
    for agreement in (rounded, hit):
        assert replace(agreement, own=unrounded.divergence).is_near, (agreement, unrounded)
    assert dense.divergence > 3 * unrounded.divergence > 0.1
