"""Continuous batching: what each step computes, and which request has which pages. Knows nothing of models or text."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from kvtuner.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtuner.runtime_loader.engine.engine_options import EngineOptions
    from kvtuner.runtime_loader.engine.generation import Generation
    from kvtuner.runtime_loader.engine.page_allocator import PageAllocator
    from kvtuner.runtime_loader.engine.paged_pool import PagedPool
    from kvtuner.runtime_loader.engine.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class EngineState:
    """The counts of an engine at one moment; pages are running requests', the prefix cache's alone, or free."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_idle_pages: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_answer_tokens: int
    num_retracted: int


class BatchScheduler:
    """The requests of an engine, by age.

    In a step every request that decodes has one token, and the oldest that prefill share `chunk_tokens`. A request has
    the pages of all of its tokens from its first step on, and takes one more where its answer needs it. Where there is
    none, the youngest request gives up its pages and waits, with its tokens, to be computed anew.
    """

    def __init__(
        self, options: EngineOptions, pool: PagedPool, allocator: PageAllocator, tree: PrefixTree | None
    ) -> None:
        self._chunk_tokens, self._page_size = options.chunk_tokens, pool.shape.page_size
        self._pool, self._allocator, self._tree = pool, allocator, tree
        self._slots = list(range(pool.shape.max_requests - 1, -1, -1))
        self._pinned: list[list[int]] = []
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []
        self.num_retracted = self.num_cached_tokens = 0

    @property
    def has_requests(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running)

    def submit(self, generation: Generation) -> None:
        """Let a request wait for its turn.

        Raises:
            RequestError: The pool could not hold it if it were alone.
        """
        free_pages = self._allocator.num_pages - self._num_pinned()
        own = [self._pages_of(each.most_tokens) - self._num_shared(generation) for each in generation.branches]
        if self._pages_of(generation.most_tokens) + sum(own) > free_pages:
            raise RequestError(
                f"the request may take {generation.most_tokens} tokens with its answer, but the pool holds"
                f" {free_pages * self._page_size} beside what is pinned; ask for fewer, or give the engine more KV"
                " memory"
            )
        if len(generation.branches) >= self._pool.shape.max_requests:
            raise RequestError(
                f"{1 + len(generation.branches)} branches do not run at once; give the engine max_requests"
            )
        self.waiting.append(generation)

    def schedule(self) -> list[tuple[Generation, int]]:
        """The requests of the next step with their number of new tokens, those that decode first."""
        decoding, prefilling = [], []
        for generation in list(self.running):  # oldest first, so that none in the lists is retracted any more
            if generation.slot is None:
                continue
            if not generation.decodes:
                prefilling.append(generation)
            elif self._grow(generation):
                decoding.append((generation, 1))
        budget = self._chunk_tokens
        chunks: list[tuple[Generation, int]] = []
        for generation in chain(prefilling, self._admitted()):
            whole = generation.num_chunk
            if whole > budget and chunks:
                break
            count = whole or min(budget, generation.num_missing)
            chunks.append((generation, count))
            budget -= count
            if budget <= 0:
                break
        return decoding + sorted(chunks, key=lambda chunk: chunk[0].num_stored > 0)

    def stored(self, generation: Generation, num_tokens: int) -> None:
        """Take note that a step has stored tokens of a request; others may use their pages."""
        was_prefill = not generation.decodes
        generation.num_stored += num_tokens
        if was_prefill:
            self._keep(generation)
        if generation.branches and generation.num_stored == generation.split:
            self._branch(generation)

    def finish(self, generation: Generation) -> None:
        """Take a request's pages and slot, whether it waits or runs, or waits for the beginning of another."""
        for other in (*self.waiting, *self.running):
            if generation in other.branches:
                other.branches.remove(generation)
                self._release(generation)
                return
        if generation.slot is None:
            self._dissolve(generation)
            self.waiting.remove(generation)
        else:
            self._leave(generation)

    def pin(self, tokens: list[int]) -> int:
        """Keep the pages of a text that the prefix cache has from eviction; returns how many tokens those are.

        Raises:
            RequestError: A request that is there could not be finished beside them.
        """
        if self._tree is None:
            raise RequestError("nothing can be pinned without a prefix cache; give it tokens")
        pages = self._tree.find(tokens)
        needed = max((self._pages_of(each.most_tokens) for each in (*self.waiting, *self.running)), default=1)
        new = set(pages).difference(*self._pinned)
        if self._num_pinned() + len(new) + needed > self._allocator.num_pages:
            raise RequestError(
                f"{len(pages)} pages cannot be pinned: of {self._allocator.num_pages}, {self._num_pinned()} are pinned"
                f" already, and a request may need {needed}; unpin, or give the engine more KV memory"
            )
        self._pinned.append(self._tree.use(tokens))
        return len(pages) * self._page_size

    def unpin_all(self) -> None:
        """Leave all pinned pages to eviction again."""
        for pages in self._pinned:
            self._allocator.release(pages)
        self._pinned.clear()

    def _admitted(self) -> Iterator[Generation]:
        """The requests that prefill once they are admitted, each when there is its turn.

        Whoever is admitted late finds more in the prefix cache.
        """
        while self.waiting and self._slots and self._admit(self.waiting[0]):
            generation = self.waiting.pop(0)
            insort(self.running, generation, key=lambda each: each.number)
            if not generation.decodes:
                yield generation

    def _admit(self, generation: Generation) -> bool:
        """Give a waiting request a slot, the pages that the cache has of it, and new ones for its other tokens."""
        tokens = generation.tokens
        uses_cache = self._tree is not None and generation.split is None
        uses_cache &= generation.sampling.prompt_logprobs is None
        # The last token is always computed: its logits are the answer's beginning.
        cached = self._tree.find(tokens[:-1]) if self._tree is not None and uses_cache else []
        own = [self._pages_of(len(each.tokens)) - self._num_shared(generation) for each in generation.branches]
        num_new = self._pages_of(len(tokens)) - len(cached) + sum(own)
        idle_hits = sum(self._allocator.is_idle(page) for page in cached)
        # Each request that runs may soon need a page: one that is admitted and retracted at once gains nobody anything.
        is_full = num_new + len(self.running) > self._allocator.num_available - idle_hits
        if is_full or len(self._slots) <= len(own):
            return False
        pages = self._tree.use(tokens[:-1]) if self._tree is not None and uses_cache else []
        self._make_room(num_new)
        generation.pages = pages + self._allocator.take(num_new - sum(own))
        for branch, num_pages in zip(generation.branches, own, strict=True):
            branch.pages, branch.slot = self._allocator.take(num_pages), self._slots.pop()
        generation.slot = self._slots.pop()
        generation.num_stored = len(pages) * self._page_size
        self.num_cached_tokens += generation.num_stored
        if generation.num_cached is None:
            generation.num_cached = generation.num_stored
        self._pool.begin_request(generation.slot)
        self._pool.set_pages(generation.slot, generation.pages)
        return True

    def _branch(self, generation: Generation) -> None:
        """Let the branches of a request run, now that what they begin with is stored."""
        assert generation.slot is not None and generation.split is not None
        shared = generation.pages[: self._num_shared(generation)]
        for branch in generation.branches:
            assert branch.slot is not None
            self._allocator.share(shared)
            branch.pages, branch.num_stored, branch.num_cached = shared + branch.pages, generation.split, 0
            self._pool.begin_request(branch.slot)
            self._pool.set_pages(branch.slot, branch.pages)
            self._pool.copy_beginning(generation.slot, branch.slot, generation.split)
            insort(self.running, branch, key=lambda each: each.number)
        generation.branches = []

    def _dissolve(self, generation: Generation) -> None:
        """Let branches that have not begun wait by themselves."""
        for branch in generation.branches:
            self._release(branch)
            insort(self.waiting, branch, key=lambda each: each.number)
        generation.branches = []

    def _release(self, generation: Generation) -> None:
        """Take the pages and the slot of a request that has them."""
        self._allocator.release(generation.pages)
        if generation.slot is not None:
            self._slots.append(generation.slot)
        generation.pages, generation.slot, generation.num_stored = [], None, 0

    def _num_shared(self, generation: Generation) -> int:
        """The whole pages that a request's branches share with it."""
        return (generation.split or 0) // self._page_size

    def _grow(self, generation: Generation) -> bool:
        """Give a request the page of its next token; False where it was retracted."""
        if generation.num_stored < len(generation.pages) * self._page_size:
            return True
        while not self._make_room(1):
            youngest = self.running[-1]
            self._retract(youngest)
            if youngest is generation:
                return False
        assert generation.slot is not None
        pages = self._allocator.take(1)
        self._pool.set_pages(generation.slot, pages, len(generation.pages))
        generation.pages += pages
        return True

    def _make_room(self, num_pages: int) -> bool:
        """Evict what is needed for so many free pages; False where there are not as many."""
        missing = num_pages - self._allocator.num_free
        return missing <= 0 or (self._tree is not None and self._tree.evict(missing) == missing)

    def _retract(self, generation: Generation) -> None:
        self._leave(generation)
        self.num_retracted += 1
        insort(self.waiting, generation, key=lambda each: each.number)

    def _leave(self, generation: Generation) -> None:
        """Take a running request's pages and slot; the prefix cache keeps what is stored whole."""
        self._keep(generation)
        self._dissolve(generation)
        self._release(generation)
        self.running.remove(generation)

    def _keep(self, generation: Generation) -> None:
        """Let the prefix cache keep a request's whole pages; the request uses those of others that are the same."""
        if self._tree is None or generation.split is not None:
            return
        assert generation.slot is not None
        before = generation.pages
        generation.pages = self._tree.insert(generation.tokens[: generation.num_stored], before)
        if generation.pages != before:
            self._pool.set_pages(generation.slot, generation.pages)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _num_pinned(self) -> int:
        return len(set().union(*self._pinned))
