from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pkgutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.cli import main
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.pipeline.stages.time_limit import RefinementTime

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import ModelFolder, RunCommand, Search, SmallCommand, StartCommand

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SMALL = ("--sequence-length", "64", "--sequences", "2,2,3", "--fisher-draws", "1")


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 300) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        if time.monotonic() > end:
            process.kill()
            pytest.fail("the phase never began")
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


def finished_trials(study: Path) -> int:
    if not study.exists():
        return 0
    with sqlite3.connect(f"file:{study}?mode=ro", uri=True) as connection:
        try:
            return int(connection.execute("SELECT COUNT(*) FROM trials WHERE state = 'COMPLETE'").fetchone()[0])
        except sqlite3.Error:
            return 0


PHASES: dict[str, Callable[[Path], bool]] = {
    "isolated forwards": lambda out: lines(out / "isolated.jsonl") >= 5,
    "uniform table": lambda out: lines(out / "measured.jsonl") >= 3,
    "refinement": lambda out: finished_trials(out / "study.db") >= 4,
    "validation": lambda out: lines(out / "validation.jsonl") >= 2,
    "report": lambda out: (out / "report-data.json").exists(),
}


# Where Ctrl-C is pressed in phases too short to be hit from outside: at the n-th call of a function.
MOMENTS: dict[str, tuple[str, int]] = {
    "model is built": ("transformers.LlamaForCausalLM.__init__", 1),
    "weights are hashed": ("kvtuner.calibration.weights_hash._checksum", 10),
    "statistics": ("kvtuner.calibration.transform_statistics.LayerSums.add", 5),
    "candidates": ("kvtuner.calibration.candidate_pass.CandidateMeasurement._score_layer", 5),
    "validation": ("kvtuner.evaluation.validation.Validator.measure", 5),
    "report is drawn": ("matplotlib.figure.Figure.savefig", 3),
    "report is written": ("kvtuner.report.search_report.write_atomically", 3),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, model_folder: ModelFolder, corpus_file: Path) -> bytes:
    """The profile of the search that `start` starts, by a run to its end."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    status = main([
        "search", "--model", str(model_folder("llama-gqa")), "--data", str(corpus_file), *SMALL, "--budget", "3bit",
        "--trials", "30", "--out", str(out), "--no-report", "--json",
    ])  # fmt: skip
    assert status == 0
    return (out / "profile.json").read_bytes()


# Other phases of Ctrl-C are those of MOMENTS, but for make test-full.
IN_CI = {signal.SIGKILL: ("isolated forwards", "validation", "report"), signal.SIGINT: ("refinement",)}
ENDED = [
    pytest.param(phase, how, marks=() if phase in phases else pytest.mark.full)
    for how, phases in IN_CI.items()
    for phase in PHASES
]


@pytest.mark.parametrize(("phase", "how"), ENDED)
def test_a_run_ended_in_any_phase_is_resumed_by_the_same_command(
    start: StartCommand,
    run: RunCommand,
    small_command: SmallCommand,
    uninterrupted: bytes,
    tmp_path: Path,
    phase: str,
    how: signal.Signals,
) -> None:
    out = tmp_path / "run"
    flags = ("--json",) if phase == "report" else ("--json", "--no-report")
    process = start(out, *flags)
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
    status, stdout, err = run(*small_command(out, *flags))
    assert status == 0, err
    assert load_profile(out / "profile.json").digest == json.loads(stdout)["digest"]
    assert (out / "report.html").exists() == (phase == "report")
    if phase != "refinement":  # its sampler goes on from a seed of its own
        assert (out / "profile.json").read_bytes() == uninterrupted
    keys = journal_keys(out)
    assert len(keys) == len(set(keys))
    assert len(keys) >= isolated
    assert finished_trials(out / "study.db") == 30


@pytest.mark.parametrize(
    "has_storage",
    [pytest.param(False, id="run folder"), pytest.param(True, id="--storage", marks=pytest.mark.full)],
)
def test_two_workers_share_one_run(start: StartCommand, tmp_path: Path, has_storage: bool) -> None:
    out = tmp_path / "run"
    study = tmp_path / "studies" / "shared.db" if has_storage else out / "study.db"
    storage = ("--storage", f"sqlite:///{study}") if has_storage else ()
    workers = [start(out, "--json", *storage) for _ in range(2)]
    wait_for((out / "profile.json").exists, workers[0])
    profile = (out / "profile.json").read_bytes()
    results = [worker.communicate(timeout=400) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], [err for _, err in results]
    digests = {json.loads(stdout)["digest"] for stdout, _ in results}
    assert digests == {load_profile(out / "profile.json").digest}
    assert (out / "profile.json").read_bytes() == profile, "the other worker wrote another profile"
    assert finished_trials(study) == 30
    assert [file for file in tmp_path.rglob("*.db") if file != study] == []
    keys = journal_keys(out)
    assert len(keys) == len(set(keys))
    validated = [json.loads(line) for line in (out / "validation.jsonl").read_text().splitlines()]
    assert len(validated) == len({(record["offsets"], record["key"], record["batch"]) for record in validated})


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_at_any_moment_ends_with_130_and_the_same_command_makes_the_same_profile(
    run: RunCommand,
    finished: Path,
    model_folder: ModelFolder,
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    out = tmp_path / "run"
    command = (
        "search", "--model", model_folder("llama-gqa"), "--data", corpus_file, *SMALL, "--budget", "3bit",
        "--trials", "2", "--out", out, *(() if "report" in moment else ("--no-report",)),
    )  # fmt: skip
    function, pressed_at = MOMENTS[moment]
    real, calls = pkgutil.resolve_name(function), itertools.count(1)

    def pressed(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == pressed_at:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(function, pressed)
    status, printed, err = run(*command)
    monkeypatch.undo()
    assert (status, printed) == (130, ""), err
    assert err.endswith("kvtuner search: interrupted; run the same command again to resume\n")
    assert "Traceback" not in err
    status, _, err = run(*command)
    assert status == 0, err
    assert (out / "profile.json").read_bytes() == (finished / "profile.json").read_bytes()
    assert (out / "report.html").exists() == ("report" in moment)


def test_ctrl_c_while_a_library_executes_text_ends_with_130_too(tmp_path: Path) -> None:
    # As when a dataclass is made during an import; `-c` and a script end otherwise than `-m`.
    (tmp_path / "interrupted.py").write_text(
        "import sys\nfrom kvtuner.cli import main\nfrom kvtuner.cli.commands import doctor\n"
        "doctor._devices = lambda: exec('import signal; signal.raise_signal(signal.SIGINT)')\n"
        "sys.exit(main(['doctor']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-m", "interrupted"], capture_output=True, text=True, env=environment)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "\nkvtuner doctor: interrupted\n"


def test_a_full_disk_is_said_in_one_line_and_nothing_is_lost(
    run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    command = ("calibrate", "--model", model_folder("llama-gqa"), "--data", corpus_file, *SMALL, "--out", out)
    real_fsync, calls = os.fsync, iter(range(1000))

    def full_after_forty(descriptor: int) -> None:
        if next(calls) >= 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    monkeypatch.setattr("kvtuner.run_folder.os.fsync", full_after_forty)
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


def test_without_time_to_refine_the_exact_solution_is_validated_and_told(
    run_search: RunCommand, model_folder: ModelFolder, tmp_path: Path
) -> None:
    flags = ("--model", model_folder("llama-gqa"), "--budget", "3bit", "--trials", "30", "--no-report")
    for _ in range(2):  # the same command again leaves it at that
        status, _, stderr = run_search(*flags, "--time-limit", "1s", "--out", tmp_path / "run")
        assert status == 0
        assert "refinement 3bit: 1 of 30 trials; the time limit left out the others" in stderr
    profile = load_profile(tmp_path / "run/profile.json")
    search = profile.provenance.search
    assert search is not None
    assert search.trials == 1
    assert profile.quality is not None
    assert "--time-limit 1" in (profile.provenance.command or "")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert {event["asked"] for event in events if event["event"] == "time limit"} == {"3bit"}


def test_a_study_that_is_deleted_after_a_limit_gets_as_many_trials_again(
    run_search: RunCommand, model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = itertools.count(1)
    monkeypatch.setattr(RefinementTime, "is_over", lambda _: next(asked) > 4)  # before each trial but the first
    flags = ("--model", model_folder("llama-gqa"), "--budget", "3bit", "--trials", "30", "--no-report")
    profiles = []
    for _ in range(2):
        status, _, stderr = run_search(*flags, "--time-limit", "1h", "--out", tmp_path / "run")
        assert status == 0
        assert "refinement 3bit: 5 of 30 trials; the time limit left out the others" in stderr
        assert finished_trials(tmp_path / "run/study.db") == 5
        profiles.append((tmp_path / "run/profile.json").read_bytes())
        (tmp_path / "run/study.db").unlink()
    assert profiles[0] == profiles[1]


def test_a_limit_that_is_long_enough_changes_nothing(search: Search, tmp_path: Path) -> None:
    plain = search(tmp_path / "plain", "--budget", "3bit", "4bit", trials=8)
    limited = search(tmp_path / "limited", "--budget", "3bit", "4bit", "--time-limit", "2h", trials=8)
    assert [result["digest"] for result in limited] == [result["digest"] for result in plain]


@pytest.mark.parametrize("text", ["0", "-1min", "soon", "10 parsecs"])
def test_what_is_no_time_is_refused(text: str, run: RunCommand, tmp_path: Path) -> None:
    status, _, stderr = run("search", "--model", "demo", "--budget", "3bit", f"--time-limit={text}", "--out", tmp_path)
    assert status != 0
    assert "a time is written 90s, 10min or 1.5h" in stderr


def test_hand_written_layers_have_no_trials_to_leave_out(run: RunCommand, tmp_path: Path) -> None:
    status, _, stderr = run(
        "search", "--model", "demo", "--layers", "0-8:K4V4", "--time-limit", "1min", "--out", tmp_path
    )
    assert status != 0
    assert "--time-limit is of a search" in stderr
