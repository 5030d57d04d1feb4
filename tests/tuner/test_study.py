"""One worker's study: what it measures, what wins, and that it says the same every time."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import optuna
import pytest

from kvtuner.errors import SearchSpaceError
from kvtuner.precision import PrecisionPair, mean_bits
from kvtuner.search_spaces.budget import Constraint
from kvtuner.search_spaces.space import Configuration, LayerChoice, LayerMenu, SearchSpace, pairs_of, predicted_score
from kvtuner.tuner.exact_solver import solve
from kvtuner.tuner.samplers import POPULATION_SIZE, SamplerName
from kvtuner.tuner.study import Guidance, refine
from kvtuner.tuner.study_storage import open_storage
from kvtuner.tuner.trials import OUTCOME
from kvtuner.tuner.warm_starts import warm_starts
from kvtuner.tuner.worker import Worker

if TYPE_CHECKING:
    from pathlib import Path

    from kvtuner.tuner.trials import TrialRecord

Space = Callable[..., SearchSpace]
Limit = Callable[..., Constraint]
NUM_LAYERS = 5
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
GUIDANCES: tuple[Guidance, ...] = ("none", "budget", "surrogate")
LOW, MID, HIGH, NATIVE = (PrecisionPair(bits, bits) for bits in (2, 4, 8, 16))


class Landscape:
    """A measured quality in which neighbouring layers interact, and a record of what was measured."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.measured: list[Configuration] = []

    def __call__(self, configuration: Configuration) -> float:
        pairs = pairs_of(configuration)
        assert self.constraint.is_met(pairs), "a configuration beyond the budget was measured"
        self.measured.append(configuration)
        clashes = sum(a.k_bits != b.k_bits for a, b in itertools.pairwise(pairs))
        return predicted_score(configuration) + 0.3 * clashes


@pytest.fixture
def space(random_space: Space) -> SearchSpace:
    return random_space(NUM_LAYERS, 4, num_pairs=6)


@pytest.fixture
def constraint(make_constraint: Limit) -> Constraint:
    return make_constraint("7bit", NUM_LAYERS)


@pytest.fixture
def landscape(constraint: Constraint) -> Landscape:
    return Landscape(constraint)


@pytest.mark.parametrize("sampler", ["nsga2", "tpe", "random"])
def test_a_study_finishes_exactly_the_trials_asked_and_keeps_the_best(
    space: SearchSpace, constraint: Constraint, landscape: Landscape, sampler: SamplerName
) -> None:
    warm = warm_starts(space, constraint, [], 10)
    seen: list[TrialRecord] = []
    result = refine(space, constraint, landscape, warm=warm, sampler=sampler, num_trials=40, on_trial=seen.append)
    assert [trial.number for trial in result.trials] == list(range(40))
    assert result.trials == tuple(seen)
    assert [t.configuration for t in result.trials[:10]] == warm
    assert Counter(t.source for t in result.trials) == {"warm": 10, "sampler": 30}
    assert result.best_value == min(t.value for t in result.trials if t.value is not None)
    assert result.best_value == Landscape(constraint)(result.best)
    assert result.trials[0].value == Landscape(constraint)(warm[0])
    assert sum(trial.is_measured for trial in result.trials) == len(landscape.measured)
    assert result.population_size == (POPULATION_SIZE if sampler == "nsga2" else None)


def test_without_a_sampler_only_warm_starts_are_measured(
    space: SearchSpace, constraint: Constraint, landscape: Landscape
) -> None:
    warm = warm_starts(space, constraint, [], 10)
    result = refine(space, constraint, landscape, warm=warm, sampler="none", num_trials=100)
    assert landscape.measured == warm
    assert len(result.trials) == 10
    assert len(refine(space, constraint, landscape, warm=warm, sampler="none", num_trials=4).trials) == 4


@pytest.mark.parametrize("finished", [0, 1, 5])
def test_a_study_that_is_over_has_the_trials_that_it_finished_and_at_least_one(
    space: SearchSpace, constraint: Constraint, landscape: Landscape, finished: int
) -> None:
    warm = warm_starts(space, constraint, [], 10)
    done: list[TrialRecord] = []
    result = refine(
        space,
        constraint,
        landscape,
        warm=warm,
        num_trials=20,
        on_trial=done.append,
        is_over=lambda: len(done) >= finished,
    )
    assert len(result.trials) == len(done) == max(1, finished)
    assert landscape.measured == warm[: len(done)]


@pytest.mark.parametrize(("sampler", "num_warm"), [("nsga2", 1), *((name, POPULATION_SIZE) for name in SAMPLERS)])
def test_refinement_finds_what_the_additive_model_cannot_see(
    space: SearchSpace, constraint: Constraint, landscape: Landscape, sampler: SamplerName, num_warm: int
) -> None:
    warm = warm_starts(space, constraint, [], num_warm)
    result = refine(space, constraint, landscape, warm=warm, sampler=sampler, num_trials=100)
    assert result.best != warm[0] == solve(space, constraint)
    assert result.best_value < Landscape(constraint)(warm[0])


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("guidance", GUIDANCES)
def test_the_same_seed_gives_the_same_trials(
    space: SearchSpace, constraint: Constraint, tmp_path: Path, sampler: SamplerName, guidance: Guidance
) -> None:
    def run(seed: int, storage: str | None) -> tuple[TrialRecord, ...]:
        return refine(
            space,
            constraint,
            Landscape(constraint),
            warm=warm_starts(space, constraint, [], 6),
            sampler=sampler,
            num_trials=20,
            seed=seed,
            storage=storage,
            guidance=guidance,
        ).trials

    first = run(3, None)
    assert run(3, f"sqlite:///{tmp_path}/study.db") == first
    assert (run(4, None) != first) == (sampler != "none")


def test_a_worker_that_joins_with_the_same_seed_proposes_other_trials(
    space: SearchSpace, make_constraint: Limit, tmp_path: Path
) -> None:
    holds_all = make_constraint("16bit", NUM_LAYERS)

    def configurations(num_trials: int, storage: str | None) -> list[Configuration]:
        result = refine(
            space,
            holds_all,
            Landscape(holds_all),
            warm=[],
            sampler="random",
            num_trials=num_trials,
            seed=3,
            storage=storage,
            guidance="none",
        )
        return [trial.configuration for trial in result.trials]

    shared, alone = f"journal:///{tmp_path}/study", configurations(12, None)
    assert configurations(6, shared) == alone[:6], "the first worker takes the seed as it is"
    # Of 7,776 configurations 6 meet one of 12 by chance in 1 of 100 runs, two of them in 1 of 20,000.
    assert len(set(configurations(12, shared)[6:]) & set(alone)) <= 1


def test_every_other_trial_is_the_surrogates(space: SearchSpace, constraint: Constraint, landscape: Landscape) -> None:
    worker = Worker(optuna.create_study(), space, constraint, landscape)
    worker.enqueue(warm_starts(space, constraint, [], 6))
    worker.work(6, is_sampling=False)
    suggested = [worker.suggest(0, number) for number in range(6, 14)]
    assert [params is not None for params in suggested] == [True, False] * 4
    assert all(worker.is_wanted(params) for params in suggested if params is not None)


@pytest.mark.parametrize("sampler", ["nsga2", "tpe", "random"])
def test_what_breaks_the_budget_is_never_measured_and_never_wins(
    make_space: Space, make_constraint: Limit, sampler: SamplerName
) -> None:
    # Only K2V2 everywhere fits; all else is predicted, and would be measured, far better.
    space = make_space(3, lambda layer, pair: 0.0 if pair != LOW else 1.0)
    constraint = make_constraint("2.1bit", 3)
    landscape = Landscape(constraint)
    smallest = space.configuration([0, 0, 0])
    result = refine(space, constraint, landscape, warm=[smallest], sampler=sampler, num_trials=30)
    assert result.best == smallest
    assert landscape.measured == [smallest]
    broken = [trial for trial in result.trials if not trial.is_feasible]
    assert len(broken) > 20
    assert all(trial.value is None and not trial.is_measured for trial in broken)
    assert all(constraint.is_met(pairs_of(t.configuration)) == t.is_feasible for t in result.trials)


def test_a_guided_study_spends_its_trials_on_what_can_be_measured(space: SearchSpace, constraint: Constraint) -> None:
    counts = []
    for guidance in GUIDANCES:
        landscape = Landscape(constraint)
        warm = warm_starts(space, constraint, [], POPULATION_SIZE)
        refine(space, constraint, landscape, warm=warm, num_trials=100, guidance=guidance)
        counts.append(len(landscape.measured))
    assert min(counts[1:]) > 90 > counts[0]


def test_nothing_is_measured_twice(make_space: Space, make_constraint: Limit) -> None:
    space = make_space(2, lambda layer, pair: 1.0 / pair.k_bits, pairs=[LOW, HIGH])
    landscape = Landscape(make_constraint("16bit", 2))
    result = refine(space, landscape.constraint, landscape, warm=[], sampler="random", num_trials=20)
    assert len(landscape.measured) == len(set(landscape.measured)) == 4
    assert sum(trial.is_measured for trial in result.trials) == 4
    assert len(result.trials) == 20
    assert pairs_of(result.best) == [HIGH, HIGH]


def test_forced_layers_stay_forced(make_space: Space, make_constraint: Limit) -> None:
    free = make_space(4, lambda layer, pair: 1.0 / pair.k_bits, pairs=[LOW, MID, HIGH])
    forced = LayerMenu(2, (LayerChoice(NATIVE, "none", "none", free.shape.pair_bytes(NATIVE), 0.0),))
    space = SearchSpace((*free.menus[:2], forced, free.menus[3]), free.groups, free.shape)
    landscape = Landscape(make_constraint("7bit", 4))
    warm = [space.configuration([1, 1, 0, 1]), free.configuration([0, 0, 0, 0])]
    result = refine(space, landscape.constraint, landscape, warm=warm, num_trials=30)
    assert {trial.configuration[2].pair for trial in result.trials} == {NATIVE}
    assert len({trial.configuration[:2] for trial in result.trials}) > 2


def test_tied_layers_are_one_parameter(make_space: Space, make_constraint: Limit, tmp_path: Path) -> None:
    space = make_space(4, lambda layer, pair: 1.0 / pair.k_bits, pairs=[LOW, MID, HIGH], groups=((0, 2), (1,), (3,)))
    storage = f"journal:///{tmp_path}/study"
    landscape = Landscape(make_constraint("5bit", 4))
    warm = [solve(space, landscape.constraint)]
    result = refine(space, landscape.constraint, landscape, warm=warm, num_trials=20, storage=storage)
    assert all(trial.configuration[0].pair == trial.configuration[2].pair for trial in result.trials)
    study = optuna.load_study(study_name="kvtuner", storage=open_storage(storage))
    assert set(study.trials[0].params) == {"group_000", "layer_001", "layer_003"}


def test_a_study_says_in_words_what_its_numbers_mean(make_space: Space, make_constraint: Limit, tmp_path: Path) -> None:
    space = make_space(3, lambda layer, pair: 1.0 / pair.k_bits, pairs=[LOW, MID, HIGH], groups=((0, 2), (1,)))
    rotated = tuple(replace(choice, k_transform="hadamard") for choice in space.menus[1].choices)
    space = replace(space, menus=(space.menus[0], LayerMenu(1, rotated), space.menus[2]))
    storage = f"journal:///{tmp_path}/study"
    landscape = Landscape(make_constraint("5bit", 3))
    result = refine(space, landscape.constraint, landscape, warm=[], sampler="random", num_trials=5, storage=storage)
    study = optuna.load_study(study_name="kvtuner", storage=open_storage(storage))
    assert study.metric_names == ["KL, nats per token"]
    menus = {name: study.user_attrs[name] for name in ("group_000", "layer_001")}
    assert menus["group_000"] == [str(choice.pair) for choice in space.menus[0].choices]
    assert menus["layer_001"] == [f"{choice.pair}, keys hadamard" for choice in rotated]
    for trial, record in zip(study.trials, result.trials, strict=True):
        layers = trial.user_attrs["layers"]
        assert list(layers) == ["layer 0", "layer 1", "layer 2"]
        assert layers["layer 0"] == menus["group_000"][trial.params["group_000"]] == str(record.configuration[0].pair)
        assert layers["layer 1"] == menus["layer_001"][trial.params["layer_001"]]


def test_a_study_without_words_goes_on_as_the_same_study(
    make_space: Space, make_constraint: Limit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = make_space(3, lambda layer, pair: 1.0 / pair.k_bits, pairs=[LOW, MID, HIGH])
    whole = refine(space, (limit := make_constraint("5bit", 3)), Landscape(limit), warm=[], num_trials=12)
    storage, landscape = f"journal:///{tmp_path}/study", Landscape(limit)
    with monkeypatch.context() as before:  # as a study of an earlier version is
        before.setattr(Worker, "describe", lambda self: None)
        before.setattr(optuna.Study, "set_metric_names", lambda self, names: None)
        before.setattr("kvtuner.tuner.worker.layer_texts", lambda configuration, ids: {})
        refine(space, limit, landscape, warm=[], num_trials=12, storage=storage)
    again = refine(space, limit, landscape, warm=[], num_trials=14, storage=storage)
    assert [trial.configuration for trial in again.trials[:12]] == [trial.configuration for trial in whole.trials]
    study = optuna.load_study(study_name="kvtuner", storage=open_storage(storage))
    assert study.metric_names == ["KL, nats per token"]
    assert study.trials[-1].user_attrs["layers"]


def test_a_space_of_one_configuration_is_measured_once(make_space: Space, make_constraint: Limit) -> None:
    space = make_space(3, lambda layer, pair: 1.0, pairs=[MID])
    landscape = Landscape(make_constraint("4bit", 3))
    result = refine(space, landscape.constraint, landscape, warm=[], num_trials=10)
    assert pairs_of(result.best) == [MID] * 3
    assert len(result.trials) == len(landscape.measured) == 1


def test_warm_starts_that_repeat_or_break_the_budget_are_left_out(make_space: Space, make_constraint: Limit) -> None:
    space = make_space(3, lambda layer, pair: 1.0 / pair.k_bits, pairs=[LOW, MID, HIGH])
    landscape = Landscape(make_constraint("4bit", 3))
    warm = [space.configuration(i) for i in ([2, 2, 2], [1, 1, 1], [0, 1, 2], [1, 1, 1], [0, 0, 2])]
    refine(space, landscape.constraint, landscape, warm=warm, sampler="none", num_trials=5)
    assert landscape.measured == [warm[1], warm[4]]


def test_of_equal_values_the_first_tried_wins(make_space: Space, make_constraint: Limit) -> None:
    space = make_space(3, lambda layer, pair: 1.0, pairs=[LOW, MID])
    constraint = make_constraint("4bit", 3)
    warm = [space.configuration(i) for i in ([0, 1, 0], [0, 0, 0])]
    result = refine(space, constraint, lambda _: 1.0, warm=warm, sampler="random", num_trials=12)
    assert (result.best, result.best_value) == (warm[0], 1.0)


def test_a_race_is_run_against_the_best_so_far(
    space: SearchSpace, constraint: Constraint, landscape: Landscape
) -> None:
    warm = warm_starts(space, constraint, [], POPULATION_SIZE)
    whole = refine(space, constraint, landscape, warm=warm, num_trials=60)
    raced: list[Configuration] = []
    best: list[TrialRecord] = []

    def race(configuration: Configuration, rival: Configuration) -> float:
        assert rival == best[0].configuration, "it was not the best so far that was raced against"
        raced.append(configuration)
        return Landscape(constraint)(configuration)

    def keep_best(trial: TrialRecord) -> None:
        assert trial.value is not None
        if not best or trial.value < best[0].value:  # type: ignore[operator]
            best[:] = [trial]

    result = refine(space, constraint, landscape, warm=warm, num_trials=60, race=race, on_trial=keep_best)
    assert result == whole
    assert len(raced) == sum(trial.is_measured for trial in whole.trials) - 1, "the first one has no rival"


@pytest.mark.slow
def test_estimates_of_a_race_never_win_and_the_first_warm_start_gets_none(
    space: SearchSpace, constraint: Constraint, landscape: Landscape, tmp_path: Path
) -> None:
    warm = warm_starts(space, constraint, [], POPULATION_SIZE)
    url = f"sqlite:///{tmp_path}/study.db"
    estimated: set[Configuration] = set()

    def interrupted(configuration: Configuration) -> float:
        raise KeyboardInterrupt

    def race(configuration: Configuration, rival: Configuration) -> float:
        assert configuration != warm[0], "what others are compared with was raced itself"
        assert rival not in estimated
        value, best = landscape(configuration), Landscape(constraint)(rival)
        if value <= 1.1 * best:
            return value
        estimated.add(configuration)
        return 1.01 * best

    # The first warm start is interrupted, and queued again behind all others.
    with pytest.raises(KeyboardInterrupt):
        refine(space, constraint, interrupted, warm=warm, num_trials=60, storage=url)
    result = refine(space, constraint, landscape, warm=warm, num_trials=60, storage=url, race=race)
    assert result.trials[0].configuration != warm[0]
    assert estimated
    assert result.best not in estimated
    assert result.best_value == Landscape(constraint)(result.best)
    assert {t.value for t in result.trials if t.configuration == warm[0]} == {Landscape(constraint)(warm[0])}


def test_a_study_without_a_trial_inside_the_budget_says_so(make_space: Space, make_constraint: Limit) -> None:
    space = make_space(6, lambda layer, pair: 1.0)
    with pytest.raises(SearchSpaceError, match="of 3 none is"):
        refine(space, make_constraint("2.01bit", 6), lambda _: 1.0, warm=[], sampler="random", num_trials=3)


@pytest.mark.slow
def test_warm_starts_are_the_first_population_of_nsga2(
    space: SearchSpace, constraint: Constraint, landscape: Landscape, tmp_path: Path
) -> None:
    storage = f"journal:///{tmp_path}/study"
    warm = warm_starts(space, constraint, [], POPULATION_SIZE)
    refine(space, constraint, landscape, warm=warm, num_trials=2 * POPULATION_SIZE + 1, storage=storage)
    generations = [
        value
        for trial in optuna.load_study(study_name="kvtuner", storage=open_storage(storage)).trials
        for name, value in trial.system_attrs.items()
        if name.lower().endswith("generation")
    ]
    assert generations == [0] * POPULATION_SIZE + [1] * POPULATION_SIZE + [2]


def test_trials_carry_what_a_dashboard_shows(
    space: SearchSpace, constraint: Constraint, landscape: Landscape, tmp_path: Path
) -> None:
    storage = f"journal:///{tmp_path}/study"
    result = refine(
        space, constraint, landscape, warm=[solve(space, constraint)], num_trials=30, storage=storage, guidance="none"
    )
    trials = optuna.load_study(study_name="kvtuner", storage=open_storage(storage)).trials
    for trial, record in zip(trials, result.trials, strict=True):
        pairs = pairs_of(record.configuration)
        outcome = trial.user_attrs[OUTCOME]
        assert outcome["mean_bits"] == float(mean_bits(pairs, constraint.shape))
        assert outcome["bytes_per_token"] == sum(map(constraint.shape.pair_bytes, pairs))
        assert outcome["is_feasible"] == record.is_feasible == constraint.is_met(pairs)
        assert outcome["is_measured"] == record.is_measured
    assert {trial.user_attrs[OUTCOME]["is_feasible"] for trial in trials} == {True, False}


@pytest.mark.parametrize("sampler", ["nsga2", "tpe"])
def test_samplers_are_told_which_trials_break_the_budget(
    space: SearchSpace, constraint: Constraint, landscape: Landscape, tmp_path: Path, sampler: SamplerName
) -> None:
    storage = f"journal:///{tmp_path}/study"
    result = refine(
        space, constraint, landscape, warm=[], sampler=sampler, num_trials=25, storage=storage, guidance="none"
    )
    trials = optuna.load_study(study_name="kvtuner", storage=open_storage(storage)).trials
    for trial, record in zip(trials, result.trials, strict=True):
        # One number in Optuna 5, a list in Optuna 4.
        violations = [value for name, value in trial.system_attrs.items() if name.startswith("constraints")]
        (violation,) = violations[0] if isinstance(violations[0], list) else violations
        assert violation == constraint.violation(pairs_of(record.configuration))
        assert (violation <= 0) == record.is_feasible
    assert {record.is_feasible for record in result.trials} == {True, False}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_studies_are_silent(
    space: SearchSpace,
    constraint: Constraint,
    landscape: Landscape,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    sampler: SamplerName,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refine(
            space,
            constraint,
            landscape,
            warm=[solve(space, constraint)],
            sampler=sampler,
            num_trials=15,
            storage=f"sqlite:///{tmp_path}/study.db",
        )
    assert capfd.readouterr() == ("", "")
