"""The heartbeat of a trial's worker, and whether that still lives. Knows nothing of what trials measure.

Claims (`work_claims`) tell the same of workers of one run folder, in a file of it. Trials need their own heartbeats, in
the study's storage: that is all that workers of two run folders have in common.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final

from kvtuner.tuner.study_storage import STORAGE_ERRORS
from kvtuner.workers import worker_identity
from kvtuner.workers.worker_identity import has_ended

if TYPE_CHECKING:
    from collections.abc import Iterator

    import optuna

WORKER: Final = "worker"
HEARTBEAT: Final = "heartbeat"
UNNAMED_GRACE_S: Final = 10.0
"""The same of a trial without a worker: to name itself is the first thing that a worker does."""


@contextlib.contextmanager
def heartbeat(trial: optuna.Trial) -> Iterator[None]:
    """Show that the worker of a trial lives, for as long as the context is open."""
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.wait(worker_identity.HEARTBEAT_S):
            count += 1
            try:
                trial.set_user_attr(HEARTBEAT, count)
            except (*STORAGE_ERRORS, OSError):
                continue  # a storage that is locked or full now may not be at the next beat
            except RuntimeError:  # others have given the trial up
                return

    thread = threading.Thread(target=beat, name="kvtuner-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class LivenessMonitor:
    """Tells lost trials by heartbeats that this process has seen, so that clocks need not agree."""

    def __init__(self) -> None:
        """Start without having seen any trial."""
        self._seen: dict[int, tuple[object, float]] = {}

    def is_lost(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether the worker of a running trial has ended or fallen silent."""
        worker = trial.user_attrs.get(WORKER)
        if worker is not None and has_ended(worker):
            return True
        # Whatever changes shows life: a worker without a heartbeat yet is choosing parameters one by one.
        state = (worker, trial.user_attrs.get(HEARTBEAT), len(trial.params))
        last_state, seen_at = self._seen.get(trial.number, (None, 0.0))
        if last_state != state:
            self._seen[trial.number] = (state, time.monotonic())
            return False
        return time.monotonic() - seen_at > (UNNAMED_GRACE_S if worker is None else worker_identity.GRACE_S)
