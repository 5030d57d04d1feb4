"""Pool, prefix cache and scheduler under every order of events, against a model that knows what each page holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtuner.errors import RequestError
from kvtuner.runtime_loader.engine.batch_scheduler import BatchScheduler
from kvtuner.runtime_loader.engine.engine_options import EVICTIONS, EngineOptions
from kvtuner.runtime_loader.engine.generation import Generation, SamplingParameters
from kvtuner.runtime_loader.engine.page_allocator import PageAllocator
from kvtuner.runtime_loader.engine.paged_pool import PagedPool, PoolShape
from kvtuner.runtime_loader.engine.prefix_tree import PrefixTree
from kvtuner.runtime_loader.row_format import LayerFormat, RowFormat

FEW = strategies.integers(0, 1)
"""Tokens of so few kinds that texts share beginnings."""
MOST_TOKENS = 40


class Requests(RuleBasedStateMachine):
    """Requests come, are computed, end, are aborted and pinned, in a pool that is too small for all of them."""

    @initialize(
        page_size=strategies.sampled_from([1, 2, 3, 8]),
        num_tokens=strategies.integers(MOST_TOKENS, 3 * MOST_TOKENS),
        max_requests=strategies.integers(1, 5),
        chunk_tokens=strategies.integers(1, 30),
        cached_share=strategies.sampled_from([0.0, 0.3, 1.0]),
        eviction=strategies.sampled_from(EVICTIONS),
    )
    def start(
        self, page_size: int, num_tokens: int, max_requests: int, chunk_tokens: int, cached_share: float, eviction: Any
    ) -> None:
        side = RowFormat(1, 2, None)
        shape = PoolShape([LayerFormat(side, side)], torch.float32, page_size, max_requests, MOST_TOKENS)
        num_pages = -(-num_tokens // page_size)
        self.page_size, self.pool = page_size, PagedPool(shape, num_pages, torch.device("cpu"))
        self.allocator = PageAllocator(num_pages)
        most = int(cached_share * num_pages)
        self.most_kept = most
        self.tree = PrefixTree(self.allocator, page_size, most, eviction) if most else None
        options = EngineOptions(chunk_tokens=chunk_tokens)
        self.chunk_tokens = chunk_tokens
        self.scheduler = BatchScheduler(options, self.pool, self.allocator, self.tree)
        self.written: dict[int, list[Any]] = {page: [None] * page_size for page in range(num_pages)}
        self.live: list[Generation] = []
        self.answers: dict[int, list[int]] = {}
        self.pinned: list[list[int]] = []
        self.count = 0

    @rule(prompt=strategies.lists(FEW, min_size=1, max_size=30), answer=strategies.integers(1, 10))
    def submit(self, prompt: list[int], answer: int) -> None:
        generation = Generation(
            str(self.count), self.count, [*prompt], len(prompt), len(prompt) + answer, SamplingParameters()
        )
        self.count += 1
        free = len(self.written) - len({page for pages in self.pinned for page in pages})
        if generation.most_tokens > free * self.page_size:
            with pytest.raises(RequestError):
                self.scheduler.submit(generation)
            return
        self.scheduler.submit(generation)
        self.live.append(generation)
        self.answers[generation.number] = []

    @precondition(lambda self: self.live)
    @rule(token=FEW)
    def step(self, token: int) -> None:
        scheduled = self.scheduler.schedule()
        chunks = [new for generation, new in scheduled if not generation.decodes]
        assert sum(chunks) <= self.chunk_tokens
        decodes = [generation.decodes for generation, _ in scheduled]
        assert decodes == sorted(decodes, reverse=True)
        for generation, new in scheduled:
            self.compute(generation, new)
            self.scheduler.stored(generation, new)
            if generation.num_missing == 0:
                generation.tokens.append(token)
                self.answers[generation.number].append(token)
                if len(generation.tokens) == generation.most_tokens:
                    self.end(generation)

    def compute(self, generation: Generation, new: int) -> None:
        """Write what a forward would: each slot gets the whole text up to its token, which is what its row tells."""
        assert generation.slot is not None
        stored = generation.num_stored
        slots = self.pool.token_slots(generation.slot, 0, stored + new).tolist()
        for position, slot in enumerate(slots):
            page, place = divmod(slot, self.page_size)
            text = tuple(generation.tokens[: position + 1])
            if position < stored:
                assert self.written[page][place] == text, "a request reads what it did not write"
            else:
                assert page not in self.pages_of_others(generation), "a request writes what another reads"
                self.written[page][place] = text

    def pages_of_others(self, generation: Generation) -> set[int]:
        others = {page for each in self.live if each is not generation for page in each.pages}
        return others | set(self.tree.pages() if self.tree else ()) | {page for pages in self.pinned for page in pages}

    def end(self, generation: Generation) -> None:
        self.scheduler.finish(generation)
        self.live.remove(generation)
        assert generation.answer == self.answers[generation.number], "a token was lost or repeated"

    @precondition(lambda self: self.live)
    @rule(data=strategies.data())
    def abort(self, data: strategies.DataObject) -> None:
        self.end(data.draw(strategies.sampled_from(self.live)))

    @precondition(lambda self: self.tree is not None)
    @rule(count=strategies.integers(1, 20))
    def evict(self, count: int) -> None:
        assert self.tree is not None
        idle = self.allocator.num_idle
        assert self.tree.evict(count) == min(count, idle)

    @precondition(lambda self: self.tree is not None)
    @rule(tokens=strategies.lists(FEW, min_size=1, max_size=12))
    def pin(self, tokens: list[int]) -> None:
        assert self.tree is not None
        pages = self.tree.find(tokens)
        try:
            assert self.scheduler.pin(tokens) == len(pages) * self.page_size
        except RequestError:
            return
        self.pinned.append(pages)

    @rule()
    def unpin(self) -> None:
        self.scheduler.unpin_all()
        self.pinned.clear()

    @invariant()
    def every_page_is_where_it_should_be(self) -> None:
        if not hasattr(self, "live"):
            return
        kept = list(self.tree.pages()) if self.tree else []
        assert len(kept) == len(set(kept)) <= max(self.most_kept, 0)
        assert self.tree is None or self.tree.num_pages == len(kept)
        pinned = {page for pages in self.pinned for page in pages}
        assert pinned <= set(kept)
        used = {page for generation in self.live for page in generation.pages} | pinned
        for generation in self.live:
            assert len(generation.pages) == len(set(generation.pages))
            if generation.slot is not None:
                (table,) = self.pool.pages([generation.slot], len(generation.pages) * self.page_size).tolist()
                assert table == generation.pages
        assert self.allocator.num_idle == len(set(kept) - used)
        assert self.allocator.num_free == len(self.written) - len(used | set(kept))
        assert len({generation.slot for generation in self.scheduler.running}) == len(self.scheduler.running)
        numbers = [[each.number for each in queue] for queue in (self.scheduler.waiting, self.scheduler.running)]
        assert all(queue == sorted(queue) for queue in numbers)

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        for _ in range(10_000):  # whatever happened, all that is left is answered
            if not self.live:
                break
            self.step(0)
        assert not self.live
        assert self.allocator.num_available == len(self.written) - len({page for each in self.pinned for page in each})


class TestRequests(Requests.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.full
class TestManyRequests(Requests.TestCase):
    """20,000 steps."""

    settings = settings(max_examples=200, stateful_step_count=100, deadline=None)
