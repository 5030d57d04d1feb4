"""One search by several processes: the same profile byte for byte, nothing measured twice, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtuner.calibration.isolated.forwards import JOURNAL as ISOLATED
from kvtuner.calibration.shared_passes import CANDIDATES, STATISTICS
from kvtuner.evaluation.validation import JOURNAL as VALIDATION
from kvtuner.pipeline.stages.budget_search import REFINEMENTS
from kvtuner.run_folder import RunFolder, canonical_json
from kvtuner.tuner.objective import JOURNAL as MEASURED
from kvtuner.workers.database_folder import DatabaseFolder

if TYPE_CHECKING:
    from databases.postgresql import PostgreSQL

pytestmark = pytest.mark.slow

SEARCH = (
    *("search", "--model", "demo", "--budget", "3bit", "--sequence-length", "64", "--sequences", "3,2,2"),
    *("--trials", "12", "--no-three-bits", "--word-bits", "32", "--no-report"),
)
SLURM_SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "cluster" / "search.sbatch"
SCRIPT = """
import multiprocessing
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from kvtuner.pipeline.options import CalibrateOptions
from kvtuner.pipeline.stages.worker_processes import waiting_workers, workers_beside
from kvtuner.run_folder import RunFolder


def show(options, place):
    print(f"worker {place.number} of {place.count} for {options.workers}: {'statistics' in sys.modules}")


if __name__ == "__main__":
    for name in ("started", "waiting"):
        folder = Path(sys.argv[1]) / name
        with waiting_workers(2, "statistics") if name == "waiting" else nullcontext() as waiting:
            with workers_beside(CalibrateOptions(workers=3), RunFolder(folder), show, waiting):
                logs = [folder / f"worker-{number}.log" for number in (1, 2)]
                while not all(log.exists() and log.stat().st_size for log in logs):
                    time.sleep(0.05)
    print("children:", multiprocessing.active_children())
"""
FAILING_SCRIPT = """
import multiprocessing
import sys
import time
from pathlib import Path

from kvtuner.errors import RunFolderError
from kvtuner.pipeline.options import CalibrateOptions
from kvtuner.pipeline.stages.worker_processes import workers_beside
from kvtuner.run_folder import RunFolder


def fail(options, place):
    if place.number == 1:
        raise RunFolderError("the disk is full; free some space")
    raise KeyError("a layer that nobody has")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with workers_beside(CalibrateOptions(workers=3), RunFolder(folder), fail):
        while multiprocessing.active_children():
            time.sleep(0.05)
"""
JOURNALS = {
    STATISTICS: ("batch",),
    CANDIDATES: ("batch",),
    ISOLATED: ("batch", "layer", "side", "bits", "transform"),
    MEASURED: ("configuration", "batch"),
    VALIDATION: ("offsets", "key", "batch"),
    REFINEMENTS: ("key",),
}


def command(out: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "kvtuner", *SEARCH, "--out", str(out), *flags]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done


def counts(folder: RunFolder) -> dict[str, Counter[str]]:
    """How often each item was journalled."""
    return {
        name: Counter(canonical_json([record[field] for field in fields]) for record in folder.records(name))
        for name, fields in JOURNALS.items()
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(command(folder))
    return folder


@pytest.mark.parametrize("workers", [2, pytest.param(7, marks=pytest.mark.full)])
def test_workers_make_the_same_profile_and_measure_nothing_twice(workers: int, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run(command(folder, "--workers", str(workers), "--json"))
    assert (folder / "profile.json").read_bytes() == (alone / "profile.json").read_bytes()
    assert counts(RunFolder(folder)) == counts(RunFolder(alone))
    assert all(set(items.values()) == {1} for items in counts(RunFolder(folder)).values())
    assert json.loads(done.stdout)["profile"] == str(folder / "profile.json")
    assert sorted(log.name for log in folder.glob("worker-*.log")) == [f"worker-{n}.log" for n in range(1, workers)]
    workers_seen = {record["pid"] for record in RunFolder(folder).records("events.jsonl")}
    assert len(workers_seen) > 1
    assert "worker" not in done.stderr
    assert "leaked" not in done.stderr


def test_torchrun_starts_workers_of_which_the_first_speaks(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    done = run([*torchrun, "-m", "kvtuner", *SEARCH, "--out", str(folder), "--json"])
    assert (folder / "profile.json").read_bytes() == (alone / "profile.json").read_bytes()
    assert counts(RunFolder(folder)) == counts(RunFolder(alone))
    assert json.loads(done.stdout)["digest"]
    assert done.stderr.count("loading libraries") == 1
    assert (folder / "worker-1.log").exists()


@pytest.mark.full
def test_the_script_for_slurm_starts_torchrun_on_the_nodes_of_a_job(alone: Path, tmp_path: Path) -> None:
    # Slurm itself is two commands here, of a job with one node.
    for name, line in (("scontrol", "echo 127.0.0.1"), ("srun", 'exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
    job = {"JOB_ID": "71", "JOB_NODELIST": "node[1]", "JOB_NUM_NODES": "1", "GPUS_ON_NODE": "2"}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **{f"SLURM_{key}": job[key] for key in job}}
    flags = [flag for flag in SEARCH if flag not in ("search", "--model", "demo")]
    done = subprocess.run(
        ["bash", str(SLURM_SCRIPT), "demo", str(tmp_path / "run"), *flags],
        capture_output=True, text=True, env=variables, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/profile.json").read_bytes() == (alone / "profile.json").read_bytes()
    assert (tmp_path / "run/worker-1.log").exists()


def test_workers_killed_at_random_lose_what_they_have_in_hand_alone(alone: Path, tmp_path: Path) -> None:
    folder, expected = tmp_path / "run", counts(RunFolder(alone))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)

    workers, killed = [start(), start()], 0
    begun = time.monotonic()
    while any(worker.poll() is None for worker in workers):
        assert time.monotonic() - begun < 900
        time.sleep(0.7)
        has_begun = sum(map(len, counts(RunFolder(folder)).values())) > 15 * (killed + 1) if folder.exists() else False
        if has_begun and killed < 6:
            victim = workers.pop(0)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            killed += 1
            workers.append(start())
    assert killed >= 3
    assert all(worker.wait() == 0 for worker in workers)
    assert (folder / "profile.json").read_bytes() == (alone / "profile.json").read_bytes()
    found = counts(RunFolder(folder))
    assert {name: set(items) for name, items in found.items()} == {name: set(items) for name, items in expected.items()}
    assert all(set(items.values()) == {1} for items in found.values())


@pytest.mark.full
def test_a_worker_that_fails_is_named_and_its_work_is_done(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "worker-1.log").mkdir()  # the log of the first worker beside cannot be opened
    done = run(command(folder, "--workers", "2"))
    assert "worker 1 ended with status 1" in done.stderr
    assert (folder / "profile.json").read_bytes() == (alone / "profile.json").read_bytes()


def test_workers_wait_with_what_they_import_or_are_started_with_their_work(tmp_path: Path) -> None:
    (tmp_path / "statistics.py").write_text("raise RuntimeError('of the folder where the command runs')")
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "children: []\n"
    for number in (1, 2):
        for name, has_imported in (("started", False), ("waiting", True)):
            log = (tmp_path / name / f"worker-{number}.log").read_text()
            assert log == f"worker {number} of 3 for 1: {has_imported}\n"


def test_a_worker_that_fails_leaves_its_traceback_unless_the_error_is_a_refusal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING_SCRIPT)
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused, failed = ((tmp_path / f"worker-{number}.log").read_text() for number in (1, 2))
    assert refused == "RunFolderError: the disk is full; free some space\n"
    assert failed.startswith("Traceback (most recent call last):\n")
    assert f'File "{script}"' in failed
    assert "in fail\n" in failed
    assert failed.endswith("KeyError: 'a layer that nobody has'\n")


@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_ctrl_c_while_libraries_are_imported_ends_all_processes_in_one_line(seconds: float, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command(tmp_path / "run", "--workers", "2"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    assert started.stderr is not None
    first = started.stderr.readline()  # it says that it loads libraries
    time.sleep(seconds)
    os.killpg(started.pid, signal.SIGINT)
    _, stderr = started.communicate(timeout=60)
    assert started.returncode == 130, first + stderr
    assert "Traceback" not in stderr
    assert stderr.endswith("kvtuner search: interrupted; run the same command again to resume\n")
    with pytest.raises(ProcessLookupError):
        _wait_for_the_end_of(started.pid)


def _wait_for_the_end_of(group: int) -> None:
    """Raise `ProcessLookupError` once no process of a group is left."""
    for _ in range(100):
        os.killpg(group, 0)
        time.sleep(0.1)


def test_workers_under_torchrun_are_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        command(tmp_path / "run", "--workers", "2"), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2
    assert "leave --workers out" in done.stderr


def test_machines_without_a_shared_folder_search_in_a_database(
    alone: Path, postgresql: PostgreSQL, tmp_path: Path
) -> None:
    places = [tmp_path / "here" / "run", tmp_path / "there" / "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(folder: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command(folder, "--storage", postgresql.url),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    database = DatabaseFolder(places[0], postgresql.url)
    workers = {place: start(place) for place in places}
    kills = 0  # all before the refinement: who goes on with the study of a worker that ended makes other trials
    while any(worker.poll() is None for worker in workers.values()):
        time.sleep(0.1)
        if kills < 4 and sum(map(len, counts(database).values())) > 12 * (kills + 1):
            kills += 1
            assert not list(database.records(MEASURED))
            if kills % 2:
                workers[places[1]].kill()
                workers[places[1]].wait()
            else:
                postgresql.kill()
                time.sleep(0.5)
                postgresql.start()
        for place, worker in list(workers.items()):
            if worker.poll():  # killed, or its study was away
                workers[place] = start(place)
    assert kills == 4
    for place in places:
        assert (place / "profile.json").read_bytes() == (alone / "profile.json").read_bytes()
        assert not (place / MEASURED).exists()
    found = counts(database)
    assert {name: set(items) for name, items in found.items()} == {
        name: set(items) for name, items in counts(RunFolder(alone)).items()
    }
    assert all(set(items.values()) == {1} for items in found.values())
    database.close()
