"""Items of work that any number of processes share, each done once. Knows nothing of what the items are.

All workers run the same program and come to the same items in the same order. Each takes what nobody has, waits for
what others have, and then reads all results: so the result does not depend on who did what.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kvtuner.run_folder import canonical_json, sha256_of
from kvtuner.workers.led_folder import claims_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

    from kvtuner.journal import Journal

FIRST_POLL_S: Final = 0.02
LONGEST_POLL_S: Final = 0.5
FEWEST_WORTH_PREPARING: Final = 3
"""Fewer items of groups that others have prepared are done sooner by those than by who would prepare them again."""
MOST_LOOKS: Final = 30
"""The looks, a second of them or more, after which an idle worker takes even those: it may then help for long.

They are counted, not timed: all ranks of a group must decide alike.
"""

WorkItem = TypeVar("WorkItem")


class WorkQueue(Generic[WorkItem]):
    """The items whose results are one journal's.

    An item is done when the journal has a record of it, and whoever takes it has `measure` append that.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        measure: Callable[[Sequence[WorkItem]], None],
        refresh: Callable[[], None] | None = None,
        is_done: Callable[[WorkItem], bool] | None = None,
        key_of: Callable[[WorkItem], Any] = lambda item: item,
        group_of: Callable[[WorkItem], Hashable] = lambda _: None,
        held_groups: Collection[Hashable] = (),
        at_once: int = 1,
        at_once_alone: int | None = None,
    ) -> None:
        """Share items that are equal where their keys, plain JSON values, and their journals' names and identities are.

        `refresh` reads what was journalled since, for `is_done`: by default the journal's own, of records whose keys
        are the items. `measure` gets at most `at_once` items, or `at_once_alone` while there is no other worker, and
        journals their results. Items of a group share preparation: those of `held_groups`, which this process has
        prepared, are taken first, and those of a group that others have worked on last, where they are fewer than
        `FEWEST_WORTH_PREPARING` only once in `MOST_LOOKS`.
        """
        self._claims = claims_of(journal.folder)
        self._prefix = f"{journal.name}|{sha256_of(journal.identity)[7:19]}|"
        self._refresh = refresh or journal.refresh
        self._is_done = is_done or (lambda item: journal.known(item) is not None)
        self._measure, self._key_of = measure, key_of
        self._group_of, self._held_groups = group_of, held_groups
        self._at_once, self._at_once_alone = at_once, at_once_alone or at_once
        self._groups: dict[str, Hashable] = {}  # of all items that came up, by their texts
        self._idle_looks = 0

    def finish(
        self,
        items: Sequence[WorkItem],
        *,
        on_done: Callable[[WorkItem], object] | None = None,
        meanwhile: Callable[[], bool] | None = None,
    ) -> None:
        """Return when every item is done, by this process or another; `on_done` is called once for each.

        While others have all that is left, `meanwhile` is called, which says whether it found something to do. What
        `measure` raises is raised here; its items are then free for others.

        Raises:
            RunFolderError: The folder cannot be written.
        """
        left = self._without_done(dict.fromkeys(items), on_done)
        if not left:
            return
        with self._claims.beating():
            last = time.monotonic()
            while left:
                if self.take_some(left) or (meanwhile is not None and meanwhile()):
                    last = time.monotonic()
                else:
                    time.sleep(_poll_after(time.monotonic() - last))
                left = self._without_done(left, on_done)

    @property
    def is_alone(self) -> bool:
        """Whether no other living worker has shown itself in the run folder."""
        return self._claims.is_alone

    def take_some(self, left: Collection[WorkItem]) -> bool:
        """Take and do items that are not done and that nobody has; False where there are none."""
        texts = self._wanted([item for item in left if not self._is_done(item)])
        taken = self._claims.take(texts, self._at_once_alone if self.is_alone else self._at_once) if texts else []
        if taken:  # another worker may have done one, and ended, after it was looked up
            self._refresh()
        missing = [texts[text] for text in taken if not self._is_done(texts[text])]
        if missing:
            try:
                self._measure(missing)
            except BaseException:
                self._claims.release(taken)
                raise
        return bool(taken)

    def _wanted(self, left: Collection[WorkItem]) -> dict[str, WorkItem]:
        """The items that this worker would take, by their texts, in the order of the groups that it has prepared."""
        texts = {self._text_of(item): item for item in left}
        self._groups.update((text, self._group_of(item)) for text, item in texts.items())
        held = self._claims.held_by_others()
        groups_of_others = {self._groups[text] for text in held if text in self._groups} - {None}
        here, unprepared, elsewhere = dict[str, WorkItem](), dict[str, WorkItem](), dict[str, WorkItem]()
        for text in (text for text in texts if text not in held):
            group = self._groups[text]
            to = here if group in self._held_groups else elsewhere if group in groups_of_others else unprepared
            to[text] = texts[text]
        if elsewhere and not here and not unprepared and len(elsewhere) < FEWEST_WORTH_PREPARING:
            self._idle_looks += 1
            if self._idle_looks < MOST_LOOKS:
                return {}
            self._idle_looks = 0
        return here | unprepared | elsewhere

    def _without_done(
        self, left: Mapping[WorkItem, None], on_done: Callable[[WorkItem], object] | None
    ) -> dict[WorkItem, None]:
        self._refresh()
        still: dict[WorkItem, None] = {}
        for item in left:
            if not self._is_done(item):
                still[item] = None
            elif on_done is not None:
                on_done(item)
        return still

    def _text_of(self, item: WorkItem) -> str:
        return self._prefix + canonical_json(self._key_of(item))


def _poll_after(idle_s: float) -> float:
    """The seconds until a worker that has been idle for so long looks again: what it then finds late is a tenth."""
    return min(max(FIRST_POLL_S, idle_s / 10), LONGEST_POLL_S)
