"""The pages of a pool: which are free, which requests use, and which the prefix cache alone keeps. Knows no tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class PageAllocator:
    """The pages of a pool by their numbers.

    A page is free, used by requests, kept by the prefix cache, or both; one that is kept and not used is idle, and may
    be evicted.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages
        self._is_kept = bytearray(num_pages)
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        """The pages that hold nothing."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """The pages that the prefix cache keeps and no request uses."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        """The pages that requests could have, once idle ones are evicted."""
        return self.num_free + self.num_idle

    def is_idle(self, page: int) -> bool:
        """Whether the prefix cache alone keeps a page."""
        return self._users[page] == 0 and bool(self._is_kept[page])

    def take(self, count: int) -> list[int]:
        """Give free pages to a request."""
        assert 0 <= count <= self.num_free, f"{count} pages are asked for, but {self.num_free} are free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Let one more request use pages that are used or kept."""
        for page in pages:
            assert self._users[page] or self._is_kept[page], f"page {page} is free"
            self._num_idle -= self.is_idle(page)
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take pages from a request; those that nobody else uses or keeps are free."""
        for page in pages:
            assert self._users[page], f"page {page} is used by nobody"
            self._users[page] -= 1
            if self._users[page] == 0 and not self._is_kept[page]:
                self._free.append(page)
            self._num_idle += self.is_idle(page)

    def keep(self, pages: Iterable[int]) -> None:
        """Let the prefix cache keep pages that a request uses."""
        for page in pages:
            assert self._users[page] and not self._is_kept[page], f"page {page} is kept already, or used by nobody"
            self._is_kept[page] = True

    def evict(self, page: int) -> None:
        """Free an idle page."""
        assert self.is_idle(page), f"page {page} is in use, or not kept"
        self._is_kept[page] = False
        self._num_idle -= 1
        self._free.append(page)
