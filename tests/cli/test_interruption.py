from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest

from kvtuner.exported_configs.load import load_profile

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow

SMALL = ("--sequence-length", "64", "--sequences", "2,2,3", "--fisher-draws", "1")


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "the phase never began"
        time.sleep(0.01)


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def journal_keys(out: Path) -> list[tuple[object, ...]]:
    """What every whole line of the journal of isolated forwards measured."""
    keys = []
    for line in (out / "isolated.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            keys.append(tuple(record[name] for name in ("batch", "layer", "side", "bits", "transform")))
    return keys


def finished_trials(out: Path) -> int:
    if not (out / "study.db").exists():
        return 0
    with sqlite3.connect(f"file:{out / 'study.db'}?mode=ro", uri=True) as connection:
        try:
            return int(connection.execute("SELECT COUNT(*) FROM trials WHERE state = 'COMPLETE'").fetchone()[0])
        except sqlite3.Error:
            return 0


PHASES: dict[str, Callable[[Path], bool]] = {
    "isolated forwards": lambda out: lines(out / "isolated.jsonl") >= 5,
    "uniform table": lambda out: lines(out / "measured.jsonl") >= 3,
    "refinement": lambda out: finished_trials(out) >= 4,
    "validation": lambda out: lines(out / "validation.jsonl") >= 2,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_ended_in_any_phase_is_resumed_by_the_same_command(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, phase: str, how: signal.Signals
) -> None:
    out = tmp_path / "run"
    process = start(out)
    wait_for(lambda: PHASES[phase](out), process)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130, err
        assert "run the same command again to resume" in err
        assert "Traceback" not in err
    else:
        assert process.returncode == -signal.SIGKILL
    isolated = lines(out / "isolated.jsonl")
    second = start(out, "--json")
    stdout, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    assert load_profile(out / "profile.json").digest == json.loads(stdout)["digest"]
    keys = journal_keys(out)
    assert len(keys) == len(set(keys))
    assert len(keys) >= isolated
    assert finished_trials(out) == 30


def test_two_workers_share_one_run(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    out = tmp_path / "run"
    workers = [start(out, "--json") for _ in range(2)]
    results = [worker.communicate(timeout=400) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], [err for _, err in results]
    digests = {json.loads(stdout)["digest"] for stdout, _ in results}
    assert digests == {load_profile(out / "profile.json").digest}
    assert finished_trials(out) == 30
    keys = journal_keys(out)
    assert len(keys) == len(set(keys))
    validated = [json.loads(line) for line in (out / "validation.jsonl").read_text().splitlines()]
    assert len(validated) == len({(record["offsets"], record["key"]) for record in validated})


def test_a_full_disk_is_said_in_one_line_and_nothing_is_lost(
    run: Callable[..., tuple[int, str, str]],
    model_folder: Callable[..., Path],
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "run"
    command = ("calibrate", "--model", model_folder("llama-gqa"), "--data", corpus_file, *SMALL, "--out", out)
    real_fsync, calls = os.fsync, iter(range(1000))

    def full_after_twenty(descriptor: int) -> None:
        if next(calls) >= 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    monkeypatch.setattr("kvtuner.run_folder.os.fsync", full_after_twenty)
    status, _, err = run(*command)
    assert status == 2
    assert "no space left" in err.splitlines()[-1]
    kept = journal_keys(out)
    assert len(kept) >= 5
    monkeypatch.undo()
    assert run(*command)[0] == 0
    assert journal_keys(out)[: len(kept) - 1] == kept[:-1]
    keys = journal_keys(out)
    assert len(keys) - len(set(keys)) <= 1  # the line that was written but not known to be safe
