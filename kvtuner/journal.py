"""Measurements that a run folder keeps, so that none is made twice. Knows nothing of what is measured."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from kvtuner.run_folder import RunFolder


class Journal:
    """The records of one identity in one file of a run folder, found by their key.

    Any number of processes may append to the same file; a record of another identity is left where it is. The identity
    is the hash of everything that decides a result besides its key; None where the keys say it all. A later record
    replaces an earlier one of the same key.
    """

    def __init__(
        self,
        folder: RunFolder,
        name: str,
        identity: str | None,
        key_of: Callable[[Mapping[str, Any]], Hashable] = itemgetter("key"),
    ) -> None:
        self._folder, self._name, self._identity, self._key_of = folder, name, identity, key_of
        self._position = 0
        self._records: dict[Hashable, dict[str, Any]] = {}

    def unread(self) -> Iterator[dict[str, Any]]:
        """The records that were appended since the last call, by this process or another one.

        Lines that a kill cut or that changed are left out.
        """
        records, self._position = self._folder.records_after(self._name, self._position)
        for record in records:
            if self._identity in (None, record.get("identity")):
                yield record

    def refresh(self) -> None:
        """Read what was appended since the last call, by this process or another one, for `known`."""
        self._records.update((self._key_of(record), record) for record in self.unread())

    def known(self, key: Hashable) -> dict[str, Any] | None:
        """The record of a key as of the last `refresh`; None where there was none."""
        return self._records.get(key)

    def get(self, key: Hashable) -> dict[str, Any] | None:
        """The record of a key; None where no process has appended one yet."""
        if key not in self._records:
            self.refresh()
        return self.known(key)

    def record(self, key: Hashable) -> dict[str, Any]:
        """The record of a key that has one; `KeyError` where none was read."""
        return self._records[key]

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return self._folder

    @property
    def name(self) -> str:
        """The name of the file."""
        return self._name

    @property
    def identity(self) -> str | None:
        """The identity of the records."""
        return self._identity

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append records durably, with the identity.

        Raises:
            RunFolderError: The disk is full, or the folder cannot be written or locked.
        """
        named = {} if self._identity is None else {"identity": self._identity}
        self._folder.append(self._name, *({**named, **record} for record in records))
