"""Workers that are killed, that work at the same time, or that fall silent."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import optuna
import pytest
from optuna.trial import TrialState

from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.budget import Constraint
from kvtuner.search_spaces.space import Configuration, SearchSpace, predicted_score
from kvtuner.tuner import liveness
from kvtuner.tuner.samplers import FIXED_PARAMS, make_sampler
from kvtuner.tuner.study import StudyResult, refine
from kvtuner.tuner.study_storage import open_storage
from kvtuner.tuner.trials import OUTCOME, TICKET, TrialReader, TrialRecord
from kvtuner.tuner.worker import Worker
from kvtuner.workers import worker_identity

if TYPE_CHECKING:
    from pathlib import Path

    from optuna.trial import FrozenTrial

pytestmark = pytest.mark.slow

Space = Callable[..., SearchSpace]
Limit = Callable[..., Constraint]
PAIRS = [PrecisionPair(2, 2), PrecisionPair(4, 4), PrecisionPair(8, 8)]
NUM_TRIALS, NUM_WARM, NUM_LAYERS = 30, 8, 4
TEST_IDENTITY = {"test": 1}

# A worker as its own process. It writes a line for each measurement that it begins, and takes a while for it.
WORKER = """
import sys, time
from kvtuner.precision import PrecisionPair, RowShape
from kvtuner.search_spaces.budget import Budget, Constraint
from kvtuner.search_spaces.space import LayerChoice, LayerMenu, SearchSpace, predicted_score
from kvtuner.tuner.study import refine

url, log, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
shape = RowShape(2, 64, 32)
pairs = [PrecisionPair(bits, bits) for bits in (2, 4, 8)]
choices = tuple(LayerChoice(p, "none", "none", shape.pair_bytes(p), 1 / p.k_bits) for p in pairs)
space = SearchSpace(tuple(LayerMenu(i, choices) for i in range(4)), tuple((i,) for i in range(4)), shape)
constraint = Constraint(Budget.parse("7bit"), shape, (range(4),))

def objective(configuration):
    with open(log, "a") as lines:
        lines.write("".join(str(choice.pair) for choice in configuration) + "\\n")
    time.sleep(seconds)
    return predicted_score(configuration)

warm = [space.configuration([i // 4 % 2, i // 2 % 2, i % 2, 0]) for i in range(8)]
refine(space, constraint, objective, warm=warm, num_trials=30, storage=url, identity={"test": 1})
"""


@pytest.fixture
def space(make_space: Space) -> SearchSpace:
    return make_space(NUM_LAYERS, lambda layer, pair: 1 / pair.k_bits, pairs=PAIRS)


@pytest.fixture
def constraint(make_constraint: Limit) -> Constraint:
    return make_constraint("7bit", NUM_LAYERS)


def warm_of(space: SearchSpace) -> list[Configuration]:
    return [space.configuration([i // 4 % 2, i // 2 % 2, i % 2, 0]) for i in range(NUM_WARM)]


def start_worker(url: str, log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, url, str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_lines(log: Path, count: int, worker: subprocess.Popen[str]) -> None:
    while not log.exists() or len(log.read_text().splitlines()) < count:
        assert worker.poll() is None, worker.communicate()[0]
        time.sleep(0.01)


def resume(
    space: SearchSpace, constraint: Constraint, url: str, identity: Mapping[str, int] = TEST_IDENTITY
) -> StudyResult:
    return refine(
        space,
        constraint,
        predicted_score,
        warm=warm_of(space),
        num_trials=NUM_TRIALS,
        storage=url,
        identity=identity,
    )


def states(url: str) -> Counter[TrialState]:
    study = optuna.load_study(study_name="kvtuner", storage=open_storage(url))
    return Counter(trial.state for trial in study.trials)


@pytest.mark.parametrize("num_begun", [1, 4, NUM_WARM + 3], ids=["first", "among warm starts", "after them"])
def test_a_study_killed_at_any_moment_resumes_to_exactly_the_trials_asked(
    space: SearchSpace, constraint: Constraint, tmp_path: Path, num_begun: int
) -> None:
    url, log = f"sqlite:///{tmp_path}/study.db", tmp_path / "log"
    worker = start_worker(url, log, 0.05)
    wait_for_lines(log, num_begun, worker)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    begun = time.monotonic()
    result = resume(space, constraint, url)
    assert time.monotonic() - begun < worker_identity.GRACE_S, "the dead worker was waited for"
    assert len(result.trials) == states(url)[TrialState.COMPLETE] == NUM_TRIALS
    assert states(url)[TrialState.RUNNING] == states(url)[TrialState.WAITING] == 0
    assert set(warm_of(space)) <= {trial.configuration for trial in result.trials}


def test_a_study_killed_again_and_again_completes(space: SearchSpace, constraint: Constraint, tmp_path: Path) -> None:
    url, log = f"sqlite:///{tmp_path}/study.db", tmp_path / "log"
    for count in (2, 4, 6):
        worker = start_worker(url, log, 0.1)
        wait_for_lines(log, count, worker)
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
    result = resume(space, constraint, url)
    assert len(result.trials) == NUM_TRIALS
    assert {t.configuration for t in result.trials if t.source == "warm"} == set(warm_of(space))


@pytest.mark.parametrize("scheme", ["sqlite", "journal"])
def test_two_workers_share_a_study_and_finish_exactly_the_trials_asked(
    space: SearchSpace, constraint: Constraint, tmp_path: Path, scheme: str
) -> None:
    url, logs = f"{scheme}:///{tmp_path}/study", [tmp_path / "log0", tmp_path / "log1"]
    workers = [start_worker(url, log, 0.2) for log in logs]
    for worker in workers:
        output, _ = worker.communicate(timeout=200)
        assert (worker.returncode, output) == (0, "")
    shares = [log.read_text().splitlines() for log in logs]
    assert all(shares), "one worker did it all: the test shows nothing"
    result = resume(space, constraint, url)
    assert len(result.trials) == NUM_TRIALS
    # Each measurement was made once, by one of the two.
    assert len(shares[0] + shares[1]) == len(set(shares[0] + shares[1])) == sum(t.is_measured for t in result.trials)


def test_an_interrupted_trial_is_measured_on_resume(space: SearchSpace, constraint: Constraint, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    calls = 0

    def objective(configuration: Configuration) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return predicted_score(configuration)

    with pytest.raises(KeyboardInterrupt):
        refine(space, constraint, objective, warm=warm_of(space), num_trials=9, storage=url, identity={"test": 1})
    assert states(url)[TrialState.RUNNING] == 0
    result = resume(space, constraint, url)
    assert {t.configuration for t in result.trials if t.source == "warm"} == set(warm_of(space))
    assert len(result.trials) == NUM_TRIALS


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_worker_elsewhere_that_falls_silent_is_given_up(
    space: SearchSpace, constraint: Constraint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_queued: bool
) -> None:
    monkeypatch.setattr(worker_identity, "GRACE_S", 0.3)
    monkeypatch.setattr(liveness, "UNNAMED_GRACE_S", 0.3)
    url = f"sqlite:///{tmp_path}/study.db"
    refine(
        space,
        constraint,
        predicted_score,
        warm=warm_of(space),
        sampler="none",
        num_trials=2,
        storage=url,
        identity={"test": 1},
    )
    study = optuna.load_study(study_name="kvtuner", storage=url)
    if not is_queued:
        study.add_trial(optuna.create_trial(state=TrialState.RUNNING))
    taken = study.ask() if is_queued else study.trials[-1]
    if is_queued:
        taken.set_user_attr(liveness.WORKER, "another machine|1|1")
    begun = time.monotonic()
    result = resume(space, constraint, url)
    assert time.monotonic() - begun >= 0.3
    assert len(result.trials) == NUM_TRIALS
    assert set(warm_of(space)) <= {trial.configuration for trial in result.trials}
    assert study.trials[taken.number].state == TrialState.FAIL


def test_a_worker_that_comes_too_late_for_the_last_place_gives_its_trial_back(
    space: SearchSpace, constraint: Constraint
) -> None:
    def objective(configuration: Configuration) -> float:
        pytest.fail("one trial more than asked was measured")

    study = optuna.create_study()
    worker = Worker(study, space, constraint, objective)
    worker.enqueue(warm_of(space))
    study.ask()  # another worker's, between this worker's look at the study and its own trial
    assert worker._run_trial(1, is_sampling=True) is None
    assert study.trials[1].state == TrialState.FAIL
    queued = [t.system_attrs["fixed_params"] for t in study.trials if t.state == TrialState.WAITING]
    assert len(queued) == NUM_WARM - 1
    assert queued[-1] == study.trials[1].system_attrs["fixed_params"]


@pytest.mark.parametrize("scheme", ["sqlite", "journal"])
def test_workers_that_always_propose_the_same_measure_it_once(
    space: SearchSpace, constraint: Constraint, tmp_path: Path, scheme: str
) -> None:
    url, num_rounds = f"{scheme}:///{tmp_path}/study", 8
    _ = optuna.create_study(study_name="kvtuner", storage=open_storage(url))
    measured: list[Configuration] = []
    together = threading.Barrier(2, timeout=60)

    def objective(configuration: Configuration) -> float:
        measured.append(configuration)
        time.sleep(0.05)
        return predicted_score(configuration)

    def work(_: int) -> list[TrialRecord | None]:
        study = optuna.load_study(study_name="kvtuner", storage=open_storage(url))
        worker = Worker(study, space, constraint, objective)
        records = []
        for seed in range(num_rounds):
            study.sampler = make_sampler("random", seed, worker.distributions)
            together.wait()
            records.append(worker._run_trial(1000, is_sampling=True))
        return records

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    for a, b in zip(first, second, strict=True):
        assert a is not None
        assert b is not None
        assert (a.configuration, a.value) == (b.configuration, b.value), "they did not propose the same"
    assert len(measured) == len(set(measured)) > num_rounds / 2
    assert sum(record.is_measured for record in [*first, *second] if record is not None) == len(measured)


@pytest.mark.parametrize("is_decided", [True, False])
def test_a_twin_whose_worker_ended_is_not_waited_for(
    space: SearchSpace, constraint: Constraint, is_decided: bool
) -> None:
    study = optuna.create_study()
    worker = Worker(study, space, constraint, predicted_score)
    warm = warm_of(space)[-1]
    worker.enqueue([warm])
    other = study.ask()
    child = subprocess.Popen([sys.executable, "-c", ""])
    other.set_user_attr(
        liveness.WORKER, f"{worker_identity._machine()}|{child.pid}|{worker_identity._start_of(child.pid)}"
    )
    if is_decided:
        other.set_user_attr(TICKET, 1)
    child.wait()
    begun = time.monotonic()
    study.enqueue_trial(study.trials[other.number].system_attrs[FIXED_PARAMS])
    record = worker._run_trial(10, is_sampling=False)
    assert record is not None
    assert (record.configuration, record.is_measured) == (warm, True)
    assert time.monotonic() - begun < liveness.UNNAMED_GRACE_S, "the dead worker was waited for"
    assert study.trials[other.number].state == TrialState.FAIL


def test_a_ticket_without_all_parameters_is_not_taken_for_a_decision(
    space: SearchSpace, constraint: Constraint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a database may show: parameters as they were before the ticket that is read after them.
    study, seen = optuna.create_study(), []
    worker = Worker(study, space, constraint, lambda _: pytest.fail("the twin measures it"))
    twin = study.ask()
    for name in worker.distributions:
        twin.suggest_int(name, 1, 1)
    twin.set_user_attr(TICKET, 1)
    twin.set_user_attr(liveness.WORKER, worker_identity.worker_id())
    read = worker._trials

    def torn() -> list[FrozenTrial]:
        trials = copy.deepcopy(read())
        seen.append(len(trials))
        if len(seen) <= 3 and trials[0].state == TrialState.RUNNING:
            del trials[0].params[next(reversed(worker.distributions))]
        elif trials[0].state == TrialState.RUNNING:
            study.tell(0, 0.5)
        return trials

    monkeypatch.setattr(worker, "_trials", torn)
    study.enqueue_trial(study.trials[0].params)
    twin.set_user_attr(OUTCOME, {"is_feasible": True})
    record = worker._run_trial(10, is_sampling=False)
    assert record is not None
    assert (record.value, record.is_measured) == (0.5, False)


@pytest.mark.parametrize("is_known", [True, False])
def test_only_what_would_be_measured_waits_for_others(
    space: SearchSpace, make_constraint: Limit, constraint: Constraint, is_known: bool
) -> None:
    study = optuna.create_study()
    worker = Worker(study, space, constraint if is_known else make_constraint("2bit", NUM_LAYERS), predicted_score)
    params = TrialReader(space).params([1, 1, 1, 1])
    if is_known:
        study.enqueue_trial(params)
        assert worker._run_trial(10, is_sampling=False) is not None
    undecided = study.ask()
    undecided.set_user_attr(liveness.WORKER, worker_identity.worker_id())
    study.enqueue_trial(params)
    record = worker._run_trial(10, is_sampling=False)
    assert record is not None
    assert not record.is_measured
    assert record.is_feasible == is_known


def test_a_worker_whose_trial_was_given_up_drops_it_and_goes_on(
    space: SearchSpace, constraint: Constraint, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    given_up = []

    def objective(configuration: Configuration) -> float:
        if not given_up:
            study = optuna.load_study(study_name="kvtuner", storage=url)
            given_up.append(study.tell(0, state=TrialState.FAIL))
            study.enqueue_trial(study.trials[0].params)
        return predicted_score(configuration)

    result = refine(space, constraint, objective, warm=warm_of(space), num_trials=NUM_TRIALS, storage=url)
    assert given_up
    assert [trial.number for trial in result.trials] == list(range(1, NUM_TRIALS + 1))
    assert set(warm_of(space)) <= {trial.configuration for trial in result.trials}


@pytest.mark.parametrize("is_given_up", [False, True])
def test_an_error_of_the_objective_is_not_taken_for_a_trial_given_up(
    space: SearchSpace, constraint: Constraint, tmp_path: Path, is_given_up: bool
) -> None:
    url = f"journal:///{tmp_path}/study"

    def objective(configuration: Configuration) -> float:
        if is_given_up:
            optuna.load_study(study_name="kvtuner", storage=open_storage(url)).tell(0, state=TrialState.FAIL)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        refine(space, constraint, objective, warm=warm_of(space), num_trials=NUM_TRIALS, storage=url)
    assert len(resume(space, constraint, url, identity={}).trials) == NUM_TRIALS


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_of_the_sampler_is_not_taken_for_a_trial_given_up(
    space: SearchSpace, constraint: Constraint, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    study = optuna.create_study()
    worker = Worker(study, space, constraint, predicted_score)
    worker.enqueue(warm_of(space))

    def fail(*_: object) -> None:
        raise error("of the sampler")

    monkeypatch.setattr(study.sampler, "after_trial", fail)
    with pytest.raises(error, match="of the sampler"):
        worker.work(NUM_WARM, is_sampling=False)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_trial_that_ended_meanwhile_is_not_given_up_again(
    space: SearchSpace, constraint: Constraint, is_finished: bool
) -> None:
    study = optuna.create_study()
    worker = Worker(study, space, constraint, predicted_score)
    worker.enqueue(warm_of(space)[:1])
    trial = study.ask()
    seen = copy.deepcopy(study.trials[0])
    assert seen.state == TrialState.RUNNING
    study.tell(trial, 0.5 if is_finished else None, state=None if is_finished else TrialState.FAIL)
    assert not worker._release(seen)
    assert len(study.trials) == 1, "it was queued a second time"
