"""Workers live by their process on this machine, by their heartbeats elsewhere."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from typing import TYPE_CHECKING

import optuna
import pytest
from optuna.trial import TrialState

from kvtuner.tuner import liveness, study_storage
from kvtuner.tuner.study_storage import open_storage
from kvtuner.workers import worker_identity

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_heartbeats_show_that_a_worker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_identity, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(worker_identity, "GRACE_S", 0.2)
    study = optuna.create_study()
    trial = study.ask()
    trial.set_user_attr(liveness.WORKER, "another machine|1|1")
    watch = liveness.LivenessMonitor()
    with liveness.heartbeat(trial):
        for _ in range(30):
            assert not watch.is_lost(study.trials[0])
            time.sleep(0.02)
    begun = time.monotonic()
    while not watch.is_lost(study.trials[0]):
        time.sleep(0.02)
    assert time.monotonic() - begun >= 0.1


@pytest.mark.parametrize("scheme", ["sqlite", "journal"])
def test_heartbeats_go_on_after_a_storage_that_failed_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(worker_identity, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(study_storage, "LOCK_TIMEOUT_S", 0.02)
    url, failed = f"{scheme}:///{tmp_path}/study", threading.Event()
    trial = optuna.create_study(study_name="kvtuner", storage=open_storage(url)).ask()
    write = trial.set_user_attr

    def watched(key: str, value: object) -> None:
        try:
            write(key, value)
        except BaseException:
            failed.set()
            raise

    monkeypatch.setattr(trial, "set_user_attr", watched)

    def beats() -> object:
        (trial,) = optuna.load_study(study_name="kvtuner", storage=open_storage(url)).trials
        return trial.user_attrs.get(liveness.HEARTBEAT)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    holder = sqlite3.connect(tmp_path / "study", isolation_level=None) if scheme == "sqlite" else None
    with liveness.heartbeat(trial), monkeypatch.context() as patch:
        if holder is not None:
            holder.execute("BEGIN EXCLUSIVE")
        else:
            patch.setattr("optuna.storages.journal.JournalFileBackend.append_logs", full)
        assert failed.wait(20), "no heartbeat met the failing storage: the test shows nothing"
        if holder is not None:
            holder.close()
        patch.undo()
        before, begun = beats(), time.monotonic()
        while beats() == before:
            assert time.monotonic() - begun < 20, "the heartbeat ended with the first error"
            time.sleep(0.01)


def test_a_heartbeat_ends_quietly_when_the_trial_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_identity, "HEARTBEAT_S", 0.01)
    study = optuna.create_study()
    trial = study.ask()
    with liveness.heartbeat(trial):
        study.tell(trial, state=TrialState.FAIL)
        time.sleep(0.05)
    assert study.trials[0].state == TrialState.FAIL
