"""Groups of keys per channel that kernels pack: the bytes are those that torch packs."""

from __future__ import annotations

import pytest
import torch
from hostile_groups import hostile_groups
from option_rows.channel_groups import CASES, bounds_of, keys_format

from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.exact_ring import EMPTY, ExactRing, NewTokens
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import NewKeys, PackedRows
from kvtuner.runtime_loader.torch_attention import TorchAttention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def attention() -> TritonAttention:
    return TritonAttention(torch.device("cpu"))


@pytest.mark.parametrize(("shape", "bits", "group"), CASES, ids=str)
def test_groups_that_new_tokens_fill_are_packed_as_by_torch(
    attention: TritonAttention, shape: tuple[int, int, int], bits: int, group: int
) -> None:
    heads, channels, _ = shape
    row_format, window = keys_format(heads, channels, bits, group), ExactWindow(group + 3, 2)
    # Rows of zeros, as a pool's: nobody writes what pads them.
    found, wanted = (PackedRows.zeros(row_format, 1024, torch.float32, "cpu") for _ in range(2))
    of_channels = hostile_groups(group)[:, 0]
    places = torch.arange(heads * channels) % len(of_channels)
    hostile = of_channels[places].view(heads, channels, group).movedim(-1, 0)
    # The tokens of three requests before and in a chunk, which fill no group, one, and several.
    past, new = (group - 1, 5, 2 * group), (0, group - 5, 2 * group + 1)
    before = [torch.cat((hostile, hostile, hostile))[:count] for count in past]
    states = torch.cat([torch.cat((hostile, 2 * hostile, -hostile))[:count] for count in new])
    slots = torch.arange(1024).view(-1, group)[torch.tensor([7, 1, 5, 2, 6, 0, 3, 4])].flatten()
    first = (0, group, 2 * group)  # of each request, in whole groups
    stored = torch.cat([slots[at : at + count] for at, count in zip(first, past, strict=True)])
    at = torch.cat([slots[s + p : s + p + n] for s, p, n in zip(first, past, new, strict=True)])
    ring = ExactRing(
        torch.zeros(4, window.num_tokens, heads, channels), torch.zeros(4, window.num_tokens, heads, channels),
        torch.full((4, window.num_tokens), EMPTY, dtype=torch.int32), window,
    )  # fmt: skip
    requests = torch.tensor([2, 0, 3])
    ring.store(NewTokens(requests, bounds_of([0, 0, 0]), bounds_of(past)), torch.cat(before), torch.cat(before))
    step, chunk = NewTokens(requests, bounds_of(past), bounds_of(new)), NewKeys(at, states, max(new))
    attention.store_groups(found, ring, step, stored, chunk)
    TorchAttention().store_groups(wanted, ring, step, stored, chunk)
    assert torch.equal(found.rows, wanted.rows)
    before_decode = wanted.rows.clone()
    assert before_decode.any()
    # And one new token each, whose copies are made already; that of the first request fills its group.
    one = torch.cat([hostile[-1:]] * 3)
    total = [p + n + 1 for p, n in zip(past, new, strict=True)]
    ring.store(step, states, states)
    decoded = NewTokens(requests, bounds_of(total))
    ring.store(decoded, one, one)
    stored = torch.cat([slots[s : s + t] for s, t in zip(first, total, strict=True)])
    for each, rows in ((attention, found), (TorchAttention(), wanted)):
        each.store_groups(rows, ring, decoded, stored)
    assert torch.equal(found.rows, wanted.rows)
    changed = (wanted.rows != before_decode).any(1).nonzero().flatten()
    assert 0 < len(changed) <= group
    assert set((changed // group).tolist()) == {7}, "the group that the first request filled"


def test_a_copy_that_is_not_at_hand_marks_its_group_with_nan(attention: TritonAttention) -> None:
    keys = PackedRows.zeros(keys_format(1, 64, 4, 16), 64, torch.float32, "cpu")
    window = ExactWindow(16)
    positions = torch.arange(16, dtype=torch.int32).repeat(2, 1)
    positions[1, 9] = EMPTY
    ring = ExactRing(torch.ones(2, 16, 1, 64), torch.ones(2, 16, 1, 64), positions, window)
    new = NewTokens(torch.tensor([0, 1]), bounds_of([16, 16]))
    attention.store_groups(keys, ring, new, torch.cat((torch.arange(16, 32), torch.arange(48, 64))))
    read = keys.read(torch.arange(64), torch.float32)
    assert (read[16:32] == 1).all()
    assert read[48:].isnan().all()
