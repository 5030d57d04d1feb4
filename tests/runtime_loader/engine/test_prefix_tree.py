"""The prefix cache finds the longest beginning, shares it, and loses what its policy says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtuner.runtime_loader.engine.page_allocator import PageAllocator
from kvtuner.runtime_loader.engine.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from kvtuner.runtime_loader.engine.engine_options import EvictionName

PAGE = 2


def texts(tree: PrefixTree, allocator: PageAllocator, *wanted: list[int]) -> list[list[int]]:
    """Compute texts one after the other, and leave their pages to the tree."""
    kept = []
    for tokens in wanted:
        pages = tree.insert(tokens, allocator.take(len(tokens) // PAGE))
        allocator.release(pages)
        kept.append(pages)
    return kept


def new_tree(
    num_pages: int = 20, most_pages: int = 20, eviction: EvictionName = "lru"
) -> tuple[PrefixTree, PageAllocator]:
    allocator = PageAllocator(num_pages)
    return PrefixTree(allocator, PAGE, most_pages, eviction), allocator


def test_the_longest_beginning_in_whole_pages_is_found() -> None:
    tree, allocator = new_tree()
    first, second = texts(tree, allocator, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 8])
    assert second[:2] == first[:2]  # computed twice, kept once
    assert tree.num_pages == 4
    assert allocator.num_free == 16
    assert tree.find([1, 2, 3, 4, 5, 6, 7]) == first
    assert tree.find([1, 2, 3, 4, 5]) == first[:2]
    assert tree.find([1, 2, 3, 9]) == first[:1]
    assert tree.find([1]) == tree.find([2, 1]) == []
    assert sorted(tree.pages()) == sorted({*first, *second})


def test_what_a_request_uses_is_never_evicted() -> None:
    tree, allocator = new_tree()
    texts(tree, allocator, [1, 2, 3, 4, 5, 6], [1, 2, 9, 9])
    used = tree.use([1, 2, 3, 4, 0])
    assert tree.evict(20) == 2
    assert tree.find([1, 2, 3, 4, 5, 6]) == used
    allocator.release(used)
    assert tree.evict(20) == 2
    assert (tree.num_pages, allocator.num_free) == (0, 20)


LAST: dict[EvictionName, list[list[int]]] = {
    # Texts 1, 2 and 3 were kept in this order; then 1 was used twice and 2 once.
    "lru": [[3], [1], [2]],
    "lfu": [[3], [2], [1]],
    "fifo": [[1], [2], [3]],
    "mru": [[2], [1], [3]],
}


@pytest.mark.parametrize("eviction", LAST)
def test_every_policy_takes_its_own_first(eviction: EvictionName) -> None:
    tree, allocator = new_tree(eviction=eviction)
    texts(tree, allocator, *([text] * 4 for text in (1, 2, 3)))
    for text in (1, 1, 2):
        allocator.release(tree.use([text] * 4))
    for place, (gone,) in enumerate(LAST[eviction]):
        assert tree.evict(1) == 1
        assert len(tree.find([gone] * 4)) == 1  # from its end
        assert tree.evict(1) == 1
        left = [text for (text,) in LAST[eviction][place + 1 :]]
        assert [text for text in (1, 2, 3) if tree.find([text] * 4)] == sorted(left)


def test_a_budget_keeps_the_newest_in_place_of_what_goes_first() -> None:
    tree, allocator = new_tree(most_pages=3)
    texts(tree, allocator, [1, 1, 1, 1], [2, 2, 2, 2])
    assert tree.num_pages == 3
    assert [len(tree.find([text] * 4)) for text in (1, 2)] == [1, 2]
    used = tree.use([2, 2, 2, 2])
    texts(tree, allocator, [3, 3, 3, 3, 3, 3])
    assert [len(tree.find([text] * 6)) for text in (1, 2, 3)] == [0, 2, 1]
    allocator.release(used)
    assert allocator.num_free + allocator.num_idle == 20
