"""Memory between launches: one address for every layer, and never less than what was asked for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch_settings import INTERPRETED, MOST_SPLITS
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ScoreScaling
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat


def test_pieces_lie_apart_and_come_again_at_the_same_address() -> None:
    scratch = Scratch(2048, torch.device("cpu"))
    a, b = scratch.take((3, 5), torch.float32), scratch.take((7,), torch.float16)
    a.fill_(1.0)
    b.fill_(2.0)
    assert (a == 1).all()
    assert a.data_ptr() % 16 == b.data_ptr() % 16
    assert scratch.restart().take((15,), torch.float32).data_ptr() == a.data_ptr()


def test_what_does_not_fit_has_memory_of_its_own() -> None:
    scratch = Scratch(256, torch.device("cpu"))
    small = scratch.take((16,), torch.float32)
    large = scratch.take((1000,), torch.float32)
    large.fill_(3.0)
    small.fill_(1.0)
    assert (large == 3).all()
    assert large.shape == (1000,)


def test_no_two_streams_share_a_piece() -> None:
    streams = iter((7, 9, 7, 9, 7))
    scratch = Scratch(4096, torch.device("cpu"), lambda _: next(streams))
    taken = [(scratch.restart().take((100,), torch.float32), scratch.take((50,), torch.float16)) for _ in range(5)]
    spans = [[(piece.data_ptr(), piece.data_ptr() + piece.nbytes) for piece in pieces] for pieces in taken]
    assert spans[0] == spans[2] == spans[4]  # the first stream's calls follow one another
    apart = [spans[0], spans[1], spans[3]]
    for one, other in itertools.combinations([span for pieces in apart for span in pieces], 2):
        assert one[1] <= other[0] or other[1] <= one[0]


def test_layers_of_all_kinds_share_it_at_every_batch(row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = ((4, 8, "centered+hadamard", 3.0), (16, 2, "none", 0.0), (8, 16, "balanced", 3.0))
    layers = [(poisoned(row_format(2, 64, k, kind), 40), poisoned(row_format(2, 64, v), 40)) for k, v, kind, _ in kinds]
    for side in (side for layer in layers for side in layer):
        side.write(torch.arange(40), torch.randn(40, 2, 64, generator=generator).half())
    implementation = TritonAttention(torch.device("cpu"))
    implementation.prepare(layers, num_heads=4, max_requests=3)
    slots = torch.randperm(40, generator=generator)
    for num_requests in (3, 1, 2):
        indptr = torch.tensor([0, 20, 21, 40][: num_requests + 1])
        q = torch.randn(num_requests, 4, 64, generator=generator)
        for (keys, values), (*_, cap) in zip(layers, kinds, strict=True):
            scores = ScoreScaling(0.125, cap)
            expected = TorchAttention().decode(q, keys, values, indptr, slots, scores)
            out = torch.full_like(q, torch.nan)
            assert implementation.decode(q, keys, values, indptr, slots, scores, out) is out
            assert (out - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.parametrize("num_splits", [5, MOST_SPLITS])
def test_splits_without_tokens_are_not_read(num_splits: int, row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    lengths = (0, 16, 33, 400)
    values, heads, block = KernelSide.of(poisoned(row_format(1, 64, 4), 2)), 2, INTERPRETED.tokens
    generator = torch.Generator().manual_seed(1)
    # A split that nobody wrote holds anything, its weight too.
    partial = torch.full((len(lengths), heads, num_splits, 64), torch.nan)
    lse = torch.full((len(lengths), heads, num_splits), torch.nan)
    expected = torch.zeros(len(lengths), heads, 64)
    for request, length in enumerate(lengths):
        per_split = -(-max(length, INTERPRETED.min_split * num_splits) // num_splits)
        used = -(-length // (-(-per_split // block) * block))
        assert used <= num_splits
        if used:
            partial[request, :, :used] = torch.randn(heads, used, 64, generator=generator)
            lse[request, :, :used] = 3 * torch.randn(heads, used, generator=generator)
            shares = torch.softmax(lse[request, :, :used] * torch.log(torch.tensor(2.0)), dim=-1)
            expected[request] = (partial[request, :, :used] * shares[..., None]).sum(1)
    out, indptr = torch.full_like(expected, torch.nan), torch.tensor([0, *itertools.accumulate(lengths)])
    launch.merge(
        partial, lse, indptr, values, INTERPRETED, num_splits, len(lengths), out, ScoreScaling(0.125), extend=False,
        exact_parts=0,
    )  # fmt: skip
    assert (out - expected).abs().max() < 1e-5
