"""Measurements that a run folder keeps, so that none is made twice. Knows nothing of what is measured."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kvtuner.run_folder import RunFolder, read_line

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping


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
        path = self._folder.file(self._name)
        if not path.exists():
            return
        if path.stat().st_size < self._position:  # another file by the same name
            self._position = 0
        with path.open("rb") as handle:
            handle.seek(self._position)
            for line in handle:
                record = read_line(line)
                if record is None and not line.endswith(b"\n"):
                    return  # it may still be written
                self._position += len(line)
                if record is not None and self._identity in (None, record.get("identity")):
                    yield record

    def get(self, key: Hashable) -> dict[str, Any] | None:
        """The record of a key; None where no process has appended one yet."""
        if key not in self._records:
            self._records.update((self._key_of(record), record) for record in self.unread())
        return self._records.get(key)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append records durably, with the identity.

        Raises:
            RunFolderError: The disk is full, or the folder cannot be written or locked.
        """
        named = {} if self._identity is None else {"identity": self._identity}
        self._folder.append(self._name, *({**named, **record} for record in records))
