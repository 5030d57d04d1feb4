"""The prefix cache: a radix tree over whole pages of tokens. Knows nothing of requests or rows.

An edge holds a run of pages, and branches begin where texts differ. Whoever uses a page uses all pages before it, so
that the idle pages of a path are its last ones and eviction takes leaves from their ends.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvtuner.runtime_loader.engine.engine_options import EngineOptions, EvictionName
    from kvtuner.runtime_loader.engine.page_allocator import PageAllocator

    PageKey = tuple[int, ...]


class _Run:
    """A run of pages behind its parent's, and when it was used; a time is a count of uses of the tree."""

    __slots__ = ("children", "keys", "made_at", "num_uses", "pages", "parent", "used_at")

    def __init__(self, keys: list[PageKey], pages: list[int], parent: _Run | None, made_at: int) -> None:
        self.keys, self.pages, self.parent = keys, pages, parent
        self.children: dict[PageKey, _Run] = {}
        self.made_at = self.used_at = made_at
        self.num_uses = 0


_FIRST_TO_GO: Final[dict[EvictionName, Callable[[_Run], tuple[int, ...]]]] = {
    "lru": lambda run: (run.used_at,),
    "lfu": lambda run: (run.num_uses, run.used_at),
    "fifo": lambda run: (run.made_at,),
    "mru": lambda run: (-run.used_at,),
}
"""What is least of the leaf that eviction takes first, by policy."""


class PrefixTree:
    """The pages of texts that were computed, up to `most_pages`, for requests that begin alike."""

    def __init__(self, allocator: PageAllocator, page_size: int, most_pages: int, eviction: EvictionName) -> None:
        self._allocator, self._page_size, self._most_pages = allocator, page_size, most_pages
        self._first_to_go = _FIRST_TO_GO[eviction]
        self._root = _Run([], [], None, 0)
        self._time = 0
        self.num_pages = 0

    @classmethod
    def of(cls, options: EngineOptions, allocator: PageAllocator, page_size: int) -> PrefixTree | None:
        """The tree that options ask for; None where it would keep nothing."""
        tokens = options.prefix_cache_tokens
        most_pages = allocator.num_pages if tokens is None else min(tokens // page_size, allocator.num_pages)
        return cls(allocator, page_size, most_pages, options.eviction) if most_pages else None

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The pages that are kept of the longest beginning of a text, in whole pages."""
        return [page for run, count in self._path(self._keys(tokens)) for page in run.pages[:count]]

    def use(self, tokens: Sequence[int]) -> list[int]:
        """The same pages, one more request's to use; eviction learns of it."""
        pages = []
        self._time += 1
        for run, count in list(self._path(self._keys(tokens))):
            run = self._split(run, count)
            run.used_at, run.num_uses = self._time, run.num_uses + 1
            pages += run.pages
        self._allocator.share(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: list[int]) -> list[int]:
        """Keep the pages of a text, as far as there is room; returns those that its request uses from now on.

        These are the pages of another request where that computed the same beginning before.
        """
        keys = self._keys(tokens)
        used, run = [], self._root
        self._time += 1
        for run, count in list(self._path(keys)):
            run = self._split(run, count)
            run.used_at = self._time
            used += run.pages
        self._allocator.share(used)
        self._allocator.release(pages[: len(used)])
        added = pages[len(used) : len(keys)]
        room = self._most_pages - self.num_pages
        if len(added) > room:
            added = added[: max(0, room + self.evict(len(added) - room))]
        if added:
            end = len(used) + len(added)
            child = _Run(keys[len(used) : end], added, run, self._time)
            run.children[child.keys[0]] = child
            self._allocator.keep(added)
            self.num_pages += len(added)
        return used + pages[len(used) :]

    def evict(self, num_pages: int) -> int:
        """Free idle pages, as many as asked for if there are; returns how many."""
        leaves = [(self._first_to_go(run), run.made_at, id(run), run) for run in self._leaves(self._root)]
        heapq.heapify(leaves)
        num_evicted = 0
        while leaves and num_evicted < num_pages:
            run = heapq.heappop(leaves)[-1]
            while run.pages and num_evicted < num_pages and self._allocator.is_idle(run.pages[-1]):
                self._allocator.evict(run.pages.pop())
                num_evicted += 1
            if run.pages:
                del run.keys[len(run.pages) :]
                continue
            parent = run.parent
            assert parent is not None
            del parent.children[run.keys[0]]
            if not parent.children and parent.parent is not None:
                heapq.heappush(leaves, (self._first_to_go(parent), parent.made_at, id(parent), parent))
        self.num_pages -= num_evicted
        return num_evicted

    def pages(self) -> Iterator[int]:
        """All pages that are kept, each once."""
        runs = [self._root]
        while runs:
            run = runs.pop()
            yield from run.pages
            runs += run.children.values()

    def _keys(self, tokens: Sequence[int]) -> list[PageKey]:
        size = self._page_size
        return [tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)]

    def _path(self, keys: list[PageKey]) -> Iterator[tuple[_Run, int]]:
        """The runs that a text begins with, and how many pages of each."""
        run, start = self._root, 0
        while start < len(keys) and (child := run.children.get(keys[start])) is not None:
            run, most = child, min(len(child.keys), len(keys) - start)
            count = next((at for at in range(1, most) if run.keys[at] != keys[start + at]), most)
            yield run, count
            if count < len(run.keys):
                return
            start += count

    def _split(self, run: _Run, count: int) -> _Run:
        """The first pages of a run as a run of their own."""
        if count == len(run.pages):
            return run
        parent = run.parent
        assert parent is not None
        first = _Run(run.keys[:count], run.pages[:count], parent, run.made_at)
        first.used_at, first.num_uses = run.used_at, run.num_uses
        run.keys, run.pages, run.parent = run.keys[count:], run.pages[count:], first
        first.children[run.keys[0]] = run
        parent.children[first.keys[0]] = first
        return first

    @staticmethod
    def _leaves(root: _Run) -> Iterable[_Run]:
        runs = list(root.children.values())
        while runs:
            run = runs.pop()
            if run.children:
                runs += run.children.values()
            else:
                yield run
