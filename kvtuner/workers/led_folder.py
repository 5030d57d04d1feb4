"""The run folder of a group of ranks: the leader alone reads, writes and claims, and the others see what it sees."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kvtuner.run_folder import LockedLog, RunFolder
from kvtuner.workers.work_claims import Claims

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvtuner.workers.rank_group import RankGroup


class LedFolder(RunFolder):
    """A folder that all ranks of a group use by the same calls in the same order; what it is to do is done once.

    Locks, of a log or by name, are for the leader alone, within what it leads.
    """

    def __init__(self, folder: RunFolder, group: RankGroup) -> None:
        super().__init__(folder.path)
        self.folder, self.group = folder, group

    def create(self) -> None:
        """Make the folder, or raise `RunFolderError`."""
        self.group.lead(self.folder.create)

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Append what the leader has; see `RunFolder`."""
        self.group.lead(lambda: self.folder.append(name, *records))

    @contextlib.contextmanager
    def exclusive(self, name: str) -> Iterator[LockedLog]:
        """Hold a log; see `RunFolder`."""
        with self.folder.exclusive(name) as log:
            yield log

    def records_after(self, name: str, position: int) -> tuple[list[dict[str, Any]], int]:
        """The records after a position of a log that the leader sees; see `RunFolder`."""
        return self.group.lead(lambda: self.folder.records_after(name, position))

    def write_checked(self, name: str, payload: Mapping[str, Any]) -> None:
        """Write what the leader has; see `RunFolder`."""
        self.group.lead(lambda: self.folder.write_checked(name, payload))

    def read_checked(self, name: str) -> dict[str, Any]:
        """What the leader reads; see `RunFolder`."""
        return self.group.lead(lambda: self.folder.read_checked(name))

    def has(self, name: str) -> bool:
        """Whether `read_checked` has something to read."""
        return self.group.lead(lambda: self.folder.has(name))


class LedClaims(Claims):
    """The claims of a group, which is one worker: the leader makes them."""

    def __init__(self, folder: LedFolder) -> None:
        super().__init__(folder.folder)
        self._group = folder.group

    def take(self, items: Iterable[str], most: int = 1) -> list[str]:
        """Claim items for the group; see `Claims`."""
        items = list(items)
        return self._group.lead(lambda: super(LedClaims, self).take(items, most))

    def release(self, items: Iterable[str]) -> None:
        """Give back items that are not done."""
        items = list(items)
        self._group.lead(lambda: super(LedClaims, self).release(items))

    def held_by_others(self) -> set[str]:
        """The items that other workers have claimed, as far as the leader has read."""
        return self._group.lead(super().held_by_others)

    @property
    def is_alone(self) -> bool:
        """Whether no other living worker has shown itself to the leader."""
        return self._group.lead(lambda: super(LedClaims, self).is_alone)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Show other workers that the leader lives; a rank that ends takes it along."""
        if self._group.number:
            yield
            return
        with super().beating():
            yield


def claims_of(folder: RunFolder) -> Claims:
    """The claims of this process, or of its group, in a folder."""
    return LedClaims(folder) if isinstance(folder, LedFolder) else Claims(folder)
