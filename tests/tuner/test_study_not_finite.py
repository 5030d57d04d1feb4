"""Configurations that make a model overflow: tried once, told, and the study goes on without them."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, get_args

import optuna
import pytest
from optuna.trial import TrialState

from kvtuner.errors import NonFiniteActivationError
from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.budget import Constraint
from kvtuner.search_spaces.space import Configuration, SearchSpace, pairs_of, predicted_score
from kvtuner.tuner.samplers import SamplerName
from kvtuner.tuner.study import StudyResult, refine
from kvtuner.tuner.study_storage import open_storage
from kvtuner.tuner.warm_starts import warm_starts

if TYPE_CHECKING:
    from pathlib import Path

Space = Callable[..., SearchSpace]
Limit = Callable[..., Constraint]
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
LOW, MID, HIGH = (PrecisionPair(bits, bits) for bits in (2, 4, 8))


@pytest.fixture
def space(random_space: Space) -> SearchSpace:
    return random_space(5, 4, num_pairs=6)


@pytest.fixture
def constraint(make_constraint: Limit) -> Constraint:
    return make_constraint("7bit", 5)


class Faulty:
    """Not finite for some configurations: by its value, or by an error as a model's."""

    def __init__(self, constraint: Constraint, bad: Callable[[Configuration], float | None]) -> None:
        self.constraint = constraint
        self.measured: list[Configuration] = []
        self.bad = bad

    def __call__(self, configuration: Configuration) -> float:
        assert self.constraint.is_met(pairs_of(configuration)), "a configuration beyond the budget was measured"
        self.measured.append(configuration)
        found = self.bad(configuration)
        if found == float("-inf"):
            raise NonFiniteActivationError("layer 3 overflows")
        return predicted_score(configuration) if found is None else found

    def race(self, configuration: Configuration, rival: Configuration) -> float:
        assert self.bad(rival) is None, "it was raced against what is not finite"
        return self(configuration)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_not_finite_is_tried_once_and_the_study_goes_on(
    space: SearchSpace, constraint: Constraint, tmp_path: Path, sampler: SamplerName, bad: float
) -> None:
    warm, url = warm_starts(space, constraint, [], 6), f"journal:///{tmp_path}/study"
    # The first warm start, which all others are to be compared with, and about half of what is sampled.
    faulty = Faulty(constraint, lambda c: bad if c == warm[0] or c[2] != warm[1][2] else None)

    def run(num_trials: int) -> StudyResult:
        return refine(
            space, constraint, faulty, warm=warm, sampler=sampler, num_trials=num_trials, storage=url, race=faulty.race
        )

    first = run(12).trials
    result = run(24)
    assert result.trials[: len(first)] == first
    assert len(result.trials) == (6 if sampler == "none" else 24)
    assert max(Counter(faulty.measured).values()) == 1, "what is known not to be finite was measured again"
    failed = [trial for trial in result.trials if trial.failure is not None]
    assert failed[0].configuration == warm[0]
    assert all(trial.value is None and trial.is_feasible for trial in failed)
    assert {t.configuration for t in failed if t.is_measured} == {c for c in faulty.measured if faulty.bad(c)}
    message = "layer 3 overflows" if bad == float("-inf") else f"is {bad} in trial 0 .*{warm[0][0].pair}"
    assert re.search(message, failed[0].failure or "")
    finite = [trial.value for trial in result.trials if trial.value is not None]
    assert result.best_value == min(finite) == predicted_score(result.best)


def test_a_study_in_which_nothing_is_finite_ends_with_the_first_reason(
    space: SearchSpace, constraint: Constraint
) -> None:
    warm = warm_starts(space, constraint, [], 4)
    with pytest.raises(NonFiniteActivationError, match=f"is nan in trial 0 .*{warm[0][0].pair}"):
        refine(space, constraint, lambda _: float("nan"), warm=warm, num_trials=8)


def test_a_repeat_of_what_is_not_finite_is_not_measured(make_space: Space, make_constraint: Limit) -> None:
    space = make_space(2, lambda layer, pair: 1.0 / pair.k_bits, pairs=[LOW, HIGH])
    constraint = make_constraint("16bit", 2)
    faulty = Faulty(constraint, lambda c: None if c[0].pair == HIGH else float("nan"))
    result = refine(space, constraint, faulty, warm=[], sampler="random", num_trials=20)
    assert len(faulty.measured) == 4
    failed = [trial for trial in result.trials if trial.failure is not None]
    assert sum(trial.is_measured for trial in failed) == 2 < len(failed)
    assert all("repeats" in (trial.failure or "") for trial in failed if not trial.is_measured)
    assert pairs_of(result.best) == [HIGH, HIGH]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["sqlite", "journal"])
def test_workers_share_a_study_in_which_some_configurations_are_not_finite(
    make_space: Space, make_constraint: Limit, tmp_path: Path, scheme: str
) -> None:
    space, constraint = (
        make_space(4, lambda layer, pair: 1 / pair.k_bits, pairs=[LOW, MID, HIGH]),
        make_constraint("7bit", 4),
    )
    warm = [space.configuration([i // 4 % 2, i // 2 % 2, i % 2, 0]) for i in range(8)]
    url, measured = f"{scheme}:///{tmp_path}/study", Counter[Configuration]()

    def objective(configuration: Configuration) -> float:
        measured[configuration] += 1
        time.sleep(0.02)
        return float("nan") if configuration[1].pair == LOW else predicted_score(configuration)

    def work(_: int) -> StudyResult:
        return refine(space, constraint, objective, warm=warm, num_trials=30, storage=url)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    assert all(len(result.trials) == 30 for result in results)
    assert set(measured.values()) == {1}
    states = {t.state for t in optuna.load_study(study_name="kvtuner", storage=open_storage(url)).trials}
    assert not states & {TrialState.RUNNING, TrialState.WAITING}
    failed = {trial.configuration for trial in results[0].trials if trial.failure is not None}
    assert failed == {c for c in measured if c[1].pair == LOW}
