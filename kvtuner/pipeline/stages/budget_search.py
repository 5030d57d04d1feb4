"""The search for the winner of one target: space, exact solution, warm starts, refinement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import NonFiniteActivationError
from kvtuner.journal import Journal
from kvtuner.pipeline.progress import say
from kvtuner.progress.bar import ProgressBar
from kvtuner.report.search_text import refinement_text
from kvtuner.run_folder import sha256_of
from kvtuner.search_spaces.space import (
    Configuration,
    SearchSpace,
    all_pairs,
    build_space,
    configuration_from_pairs,
    pairs_of,
    predicted_score,
)
from kvtuner.tuner.exact_solver import Front, nested, solve, solve_front
from kvtuner.tuner.refinement_gain import RefinementGain
from kvtuner.tuner.samplers import POPULATION_SIZE
from kvtuner.tuner.study import StudyResult, refine
from kvtuner.tuner.study_storage import sqlite_url
from kvtuner.tuner.uniform_table import measure_uniforms
from kvtuner.tuner.warm_starts import warm_starts
from kvtuner.workers.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.pipeline.stages.search_run import SearchRun
    from kvtuner.pipeline.stages.search_targets import SearchTarget
    from kvtuner.pipeline.stages.time_limit import TimeLimit
    from kvtuner.precision import PrecisionPair
    from kvtuner.search_spaces.budget import Constraint
    from kvtuner.tuner.objective import MeasuredKL
    from kvtuner.tuner.trials import TrialRecord

STUDY_FILE: Final = "study.db"
REFINEMENTS: Final = "refinements.jsonl"
"""The refinements that have ended, with the number of their trials.

Until then one worker proposes trials, and the others measure them with it.
"""


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The outcome of a search for one target: the configuration that won; `fits` says if a scheme keeps the budget.

    Every KL is that of the select split, nats per token, and of most uniforms an estimate; a uniform without transforms
    is not measured there. There is no exact solution where nothing was searched. Fronts are by pipeline stage;
    `uniform_name` is the pair of the uniform that replaced the winner, if one did. `gain` is that of refinement over
    the exact solution.
    """

    asked: str
    configuration: Configuration
    measured_kl: float | None
    fits: Callable[[CacheScheme], bool]
    uniform_kl: Mapping[PrecisionPair, float]
    exact: Configuration | None = None
    exact_kl: float | None = None
    study: StudyResult | None = None
    gain: RefinementGain | None = None
    fronts: tuple[Front, ...] = ()
    uniform_name: str | None = None

    @property
    def trials(self) -> Sequence[TrialRecord]:
        """The trials of the refinement; none where nothing was searched."""
        return () if self.study is None else self.study.trials

    @property
    def has_transforms(self) -> bool:
        """Whether any keys or values are transformed."""
        return any((choice.k_transform, choice.v_transform) != ("none", "none") for choice in self.configuration)


@dataclass(frozen=True, slots=True)
class BudgetSearch:
    """Finds winners on the select split, which the objective measures, within the time limit if there is one."""

    run: SearchRun
    objective: MeasuredKL
    limit: TimeLimit | None = field(default=None, kw_only=True)

    def uniforms(self) -> dict[PrecisionPair, Configuration]:
        """Every uniform pair with the best transforms."""
        return {pair: self.run.uniform(pair, transforms=True) for pair in all_pairs(self.run.table)}

    def uniform_table(self, targets: Sequence[SearchTarget]) -> dict[PrecisionPair, float]:
        """KL of every uniform pair, nats per token: of the largest ones inside each budget, of others an estimate.

        Pairs whose KL is not finite are left out, which it says.
        """
        run, uniforms = self.run, self.uniforms()
        inside = [
            [
                pair
                for pair, uniform in uniforms.items()
                if run.may_be_uniform(pair) and target.is_met(pairs_of(uniform))
            ]
            for target in targets
        ]
        with ProgressBar(desc="uniform K x V", total=0) as bar:

            def lengthen(count: int) -> None:
                bar.total += count

            return measure_uniforms(
                self.objective,
                uniforms,
                inside,
                on_ahead=lengthen,
                on_batch=lambda _: bar.update(),
                on_failure=lambda pair, reason: run.leave_out(f"uniform {pair}", reason),
            )

    def space(self, constraint: Constraint) -> SearchSpace:
        """The space of choices under a budget."""
        options = self.run.options
        return build_space(
            self.run.table,
            options.measurement.score,
            constraint.shape,
            keep=self.run.kept,
            groups=options.groups,
            stages=constraint.stages,
        )

    def family(self, targets: Sequence[SearchTarget]) -> list[Configuration]:
        """Nested solutions, one per target, in the targets' order; says what nesting costs."""
        constraints = [target.constraint for target in targets if target.constraint is not None]
        space = self.space(constraints[0])
        members = nested(space, constraints)
        for target, constraint, member in zip(targets, constraints, members, strict=True):
            alone, here = predicted_score(solve(space, constraint)), predicted_score(member)
            say(f"nested {target.asked}: predicted score {here:.4g}, {alone:.4g} on its own")
        return members

    def winner(
        self, target: SearchTarget, member: Configuration | None, uniform_kl: Mapping[PrecisionPair, float]
    ) -> SearchOutcome:
        """The winner of one target; `member` is its part of a nested family, if there is one."""
        constraint = target.constraint
        if constraint is None:
            return self._hand_written(target, uniform_kl)
        space = self.space(constraint)
        exact = member or solve(space, constraint)
        warm = [exact] if member else self._warm_starts(space, constraint)
        with self.run.phases.phase(f"refinement {target.asked}"):
            study = self._refine_by_one(target, constraint, space, warm)
            winner, gain = self.chosen(exact, study)
        say(f"refinement {target.asked}: {refinement_text(gain) if gain else 'the exact solution has no finite KL'}")
        if self.limit is not None and len(study.trials) < (most := self.run.options.refinement_trials):
            say(f"refinement {target.asked}: {len(study.trials)} of {most} trials; the time limit left out the others")
        return SearchOutcome(
            asked=target.asked,
            configuration=winner,
            measured_kl=self.objective(winner),
            fits=lambda scheme: scheme.keeps(constraint),
            uniform_kl=uniform_kl,
            exact=exact,
            exact_kl=None if gain is None else self.objective(exact),
            study=study,
            gain=gain,
            fronts=tuple(solve_front(space, constraint.cost, stage) for stage in constraint.stages),
        )

    def chosen(self, exact: Configuration, study: StudyResult) -> tuple[Configuration, RefinementGain | None]:
        """The best trial where its gain is clear, else the exact solution; and the gain, if that one's KL is finite."""
        try:
            gain = RefinementGain.of(*map(self.objective.of_each_sequence, (exact, study.best)))
        except NonFiniteActivationError:  # its trial reports it
            return study.best, None
        return (study.best if gain.is_clear else exact), gain

    def _hand_written(self, target: SearchTarget, uniform_kl: Mapping[PrecisionPair, float]) -> SearchOutcome:
        assert target.pairs is not None
        run, ranks = self.run, self.run.ranks
        configuration = configuration_from_pairs(run.table, target.pairs, run.options.measurement.score, run.rows)
        cap = ranks.bytes_per_token(target.pairs)
        return SearchOutcome(
            asked=target.asked,
            configuration=configuration,
            measured_kl=self.objective(configuration),
            fits=lambda scheme: scheme.bytes_on(ranks) <= cap,
            uniform_kl=uniform_kl,
        )

    def _warm_starts(self, space: SearchSpace, constraint: Constraint) -> list[Configuration]:
        options = self.run.options
        # As many as a generation of NSGA-II: they become its first population.
        limit = options.refinement_trials
        if options.refinement_sampler != "none":
            limit = min(limit, POPULATION_SIZE)
        return warm_starts(space, constraint, list(self.uniforms().values()), limit)

    def _refine_by_one(
        self, target: SearchTarget, constraint: Constraint, space: SearchSpace, warm: Sequence[Configuration]
    ) -> StudyResult:
        """The refinement, whose trials one worker proposes and all of them measure.

        So its trials are the same however many workers there are. If that worker ends, another one goes on.
        """
        options, studies = self.run.options, list[StudyResult]()
        limits = {"trials": options.refinement_trials, "seconds": options.time_limit}
        identity = sha256_of({"storage": options.storage, "limits": limits, "study": self._identity(target)})
        ended = Journal(self.run.folder, REFINEMENTS, identity)

        def propose(keys: Sequence[str]) -> None:
            is_over = self._is_over(target)
            study = self._refine(target, constraint, space, warm, num_trials=options.refinement_trials, is_over=is_over)
            studies.append(study)
            ended.append(*({"key": key, "trials": len(study.trials)} for key in keys))

        WorkQueue[str](ended, measure=propose).finish([target.name], meanwhile=self.objective.help)
        if studies:
            return studies[0]
        # Where another worker proposed, its trials are all there are, however few a time limit left; as many again
        # where the study was deleted since.
        return self._refine(target, constraint, space, warm, num_trials=ended.record(target.name)["trials"])

    def _is_over(self, target: SearchTarget) -> Callable[[], bool] | None:
        """Whether the refinement's time has passed, None without a limit; says what it has."""
        if self.limit is None:
            return None
        phases = self.run.phases
        given = self.limit.refinement(f"refinement {target.asked}", phases.passes, phases.seconds)
        self.run.folder.log("time limit", asked=target.asked, seconds=given.seconds, rest=given.rest)
        most = self.run.options.refinement_trials
        plan = f"{given.seconds:.0f} s for at most {most} trials" if given.seconds else "the exact solution alone"
        say(f"refinement {target.asked}: {plan}, since the rest is to take {given.rest:.0f} s")
        return given.is_over

    def _identity(self, target: SearchTarget) -> dict[str, Any]:
        """What the trials of a study must have in common: workers that share a storage count one another's.

        Of a model with other layers too these are the ids as well, by which parameters are called; they were called by
        places, and a study of those is left as it is.
        """
        ids = self.run.shape.geometry.layer_ids
        called_by = {} if ids is None else {"parameters": list(ids)}
        return {"measurements": sha256_of(self.run.table.identity), **called_by, **target.identity}

    def _refine(
        self,
        target: SearchTarget,
        constraint: Constraint,
        space: SearchSpace,
        warm: Sequence[Configuration],
        *,
        num_trials: int,
        is_over: Callable[[], bool] | None = None,
    ) -> StudyResult:
        options = self.run.options
        identity = self._identity(target)
        storage = options.storage or sqlite_url(self.run.folder.file(STUDY_FILE).resolve())
        with ProgressBar(total=num_trials, desc=f"refine {target.asked}", unit="trial") as bar:

            def on_trial(trial: TrialRecord) -> None:
                bar.update(1)
                if trial.failure is not None and trial.is_measured:
                    self.run.leave_out(f"trial {trial.number} of {target.asked}", trial.failure)

            def proposed(objective: Callable[..., float], race: Callable[..., float]) -> StudyResult:
                return refine(
                    space,
                    constraint,
                    objective,
                    warm=warm,
                    sampler=options.refinement_sampler,
                    num_trials=num_trials,
                    seed=self.run.seed,
                    storage=storage,
                    study_name=f"{target.name}-{sha256_of(identity)[7:19]}",
                    identity=identity,
                    race=race,
                    on_trial=on_trial,
                    is_over=is_over,
                )

            return self.run.group.lead(proposed, self.objective, self.objective.against)
