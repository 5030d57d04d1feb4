"""What an index is given in place of a mask, and what is hidden by the tokens that it selects."""

from __future__ import annotations

import pytest
import torch

from kvtuner.calibration.forward.seen_tokens import CausalMask, SelectedTokens


@pytest.mark.parametrize(("rows", "tokens"), [(7, 7), (3, 7), (1, 1)])
def test_a_mask_for_an_index_is_causal_for_the_last_queries_on_any_device(rows: int, tokens: int) -> None:
    mask = CausalMask(rows, tokens, torch.device("cpu"))
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()[tokens - rows :]
    assert torch.equal(mask[:, 0, :, :], causal.unsqueeze(0))
    assert torch.equal(mask[0, 0, -1], causal[-1])
    # accelerate moves what a layer is called with to the layer's device by this method.
    moved = mask.to("meta", non_blocking=True)[:, 0]
    assert (moved.device.type, moved.shape) == ("meta", (1, rows, tokens))


def test_each_sequence_hides_what_its_own_index_leaves_out() -> None:
    """Tokens that are not there, from 4 on, hide nothing, and those asked for come in any order."""
    indices = torch.tensor([[[0, 2], [5, 3]], [[1, 2], [3, 0]]], dtype=torch.int32)
    selected = SelectedTokens.of(indices, 4)
    assert selected is not None
    hidden = selected.hidden(torch.tensor([1, 0]), torch.tensor([3, 1, 0, 2]), 4)
    expected = [[[0, 1, 1, 1], [1, 1, 0, 0]], [[0, 1, 0, 1], [1, 0, 1, 0]]]
    assert torch.equal(hidden, torch.tensor(expected, dtype=torch.bool).unsqueeze(1))
    assert SelectedTokens.of(indices, 2) is None
