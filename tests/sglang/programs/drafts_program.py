"""Run by features/test_speculation.py: chains of drafts by SGLang's own operators, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.speculation import check_chain, check_draft_pool, on_ngram_drafts

DRAFTS, TEXTS = 6, [[5, 6, 7, 8, 5, 6], [9, 9, 9, 9], [17, 3]]


def drafted() -> tuple[torch.Tensor, torch.Tensor]:
    """What NGRAM looks up for three texts, of which the last one has no match: tokens, and who reads whom."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    corpus = NgramCorpus(max_trie_depth=8, min_bfs_breadth=1, max_bfs_breadth=1, draft_token_num=DRAFTS)
    corpus.batch_put(TEXTS[:2])
    corpus.synchronize()
    tokens, mask = corpus.batch_get(["a", "b", "c"], TEXTS, [len(text) for text in TEXTS])
    return torch.from_numpy(tokens).view(3, DRAFTS), torch.from_numpy(mask).view(3, DRAFTS, DRAFTS)


def links(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [texts, drafts] and next siblings of drafts, by SGLang's operator on a mask."""
    from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask_func

    shape = (len(TEXTS), DRAFTS)
    positions, index, child, sibling = (torch.full(shape, -7) for _ in range(4))
    lengths = torch.tensor([len(text) for text in TEXTS])
    flat = mask.bool().flatten().contiguous()
    reconstruct_indices_from_tree_mask_func(flat, lengths, positions, index, child, sibling, *shape)
    return positions - lengths[:, None], sibling


def refusal(mask: torch.Tensor, past: int) -> str:
    """What `check_chain` says of one request's mask after another, good one."""
    good = torch.ones(2, 5, dtype=torch.bool).tril(3).flatten()
    starts, tokens = torch.tensor([0, 10, 10 + mask.numel()]), torch.tensor([0, 2, 2 + len(mask)])
    try:
        check_chain(torch.cat((good, mask.flatten())), starts, tokens, torch.tensor([0, 3, 3 + past]))
    except ServingError as error:
        return str(error)
    return ""


def main() -> None:
    from sglang_on_cpu import use_tree_operators_of_triton

    use_tree_operators_of_triton()
    before, tree = drafted()
    positions, siblings = links(tree)
    # The reason of the hook: SGLang fills up with siblings of the first draft.
    assert (siblings >= 0).any() and positions.max() < DRAFTS - 1, (positions, siblings)
    on_ngram_drafts()
    after, chain = drafted()
    assert torch.equal(before, after) and chain.dtype == tree.dtype
    assert len(np.unique(after[:2].numpy())) > 2, "nothing was looked up"
    positions, siblings = links(chain)
    assert torch.equal(positions, torch.arange(DRAFTS).expand(3, -1)) and (siblings == -1).all()

    for drafts in (1, 3):
        for past in (0, 4):
            whole = torch.ones(drafts, past + drafts, dtype=torch.bool).tril(past)
            assert refusal(whole, past) == ""
            for row in range(drafts):
                for column in range(past + drafts):
                    fault = whole.clone()
                    fault[row, column] = not fault[row, column]
                    assert "a tree of drafts, not a chain" in refusal(fault, past), (row, column)

    pool = SimpleNamespace(size=31, page_size=1, get_kv_size_bytes=lambda: (32 * 100, 32 * 28))
    check_draft_pool(pool, 128)
    try:
        check_draft_pool(pool, 127)
    except ServingError as error:
        assert "takes 128 bytes per token, but 127 were charged" in str(error)
    else:
        raise AssertionError("a draft's cache that nobody charged")


main()
