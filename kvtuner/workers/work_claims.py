"""Claims of items of work, by which workers of a run folder share them. Knows nothing of what the items are.

A claim holds while its worker lives: on this machine by its process, elsewhere by heartbeats. It is no result: a file
that is lost costs nothing but work that is done twice.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import RunFolderError
from kvtuner.run_folder import LostLockError
from kvtuner.workers import worker_identity
from kvtuner.workers.worker_identity import has_ended, worker_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtuner.run_folder import RunFolder

CLAIMS: Final = "claims.jsonl"


class Claims:
    """The items that each worker of a run folder has taken."""

    def __init__(self, folder: RunFolder, worker: str | None = None) -> None:
        """Take part as this process, or as another `worker` of that name."""
        self._folder, self._worker = folder, worker or worker_id()
        self._position = 0
        self._owners: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._beaten = -math.inf

    def take(self, items: Iterable[str], most: int = 1) -> list[str]:
        """Claim the first `most` of the items that no living worker has, whatever other workers do meanwhile.

        Raises:
            RunFolderError: The folder cannot be written.
        """
        items = list(items)
        while True:
            with contextlib.suppress(LostLockError):
                with self._folder.exclusive(CLAIMS) as log:
                    held = self.held_by_others()
                    taken = list(islice((item for item in items if item not in held), most))
                    log.append(*({"item": item, "worker": self._worker} for item in taken))
                return taken

    def release(self, items: Iterable[str]) -> None:
        """Give back items that are not done."""
        self._folder.append(CLAIMS, *({"item": item, "worker": None} for item in items))

    def held_by_others(self) -> set[str]:
        """The items that other living workers have claimed, as far as this process has read."""
        self._read()
        lost = {worker for worker in set(self._owners.values()) if not self._lives(worker)}
        return {item for item, owner in self._owners.items() if owner != self._worker and owner not in lost}

    @property
    def is_alone(self) -> bool:
        """Whether no other living worker has shown itself."""
        self._read()
        return not any(self._lives(worker) for worker in self._heard if worker != self._worker)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Show other workers that this one lives, from now on and for as long as the context is open."""
        if time.monotonic() - self._beaten > worker_identity.HEARTBEAT_S:
            self._beat()
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(worker_identity.HEARTBEAT_S):
                with contextlib.suppress(RunFolderError):  # a folder that is full now may not be at the next beat
                    self._beat()

        thread = threading.Thread(target=beat, name="kvtuner-claims", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _beat(self) -> None:
        self._folder.append(CLAIMS, {"item": None, "worker": self._worker})
        self._beaten = time.monotonic()

    def _read(self) -> None:
        records, self._position = self._folder.records_after(CLAIMS, self._position)
        for record in records:
            self._count(record)

    def _count(self, record: dict[str, Any]) -> None:
        item, worker = record["item"], record["worker"]
        if worker is not None:
            self._heard[worker] = time.monotonic()  # of this clock: those of two machines need not agree
        if item is None:
            return
        if worker is None:
            self._owners.pop(item, None)
        else:
            self._owners[item] = worker

    def _lives(self, worker: str) -> bool:
        return not has_ended(worker) and time.monotonic() - self._heard[worker] <= worker_identity.GRACE_S
