"""From a sensitivity table to the winner of one budget: space, exact solution, warm starts, refinement."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from tqdm import tqdm

from kvtuner.errors import NonFiniteActivationError
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.session import SearchOutcome, SearchRun, ranks_of, row_shape, say_left_out
from kvtuner.precision import ALL_BITS, PrecisionPair
from kvtuner.report.formatting import number
from kvtuner.run_folder import sha256_of
from kvtuner.search_spaces.space import (
    Configuration,
    SearchSpace,
    build_space,
    configuration_from_pairs,
    predicted_score,
    uniform,
)
from kvtuner.search_spaces.written_layers import parse_keep
from kvtuner.tuner.exact import nested, solve, solve_front
from kvtuner.tuner.samplers import POPULATION_SIZE
from kvtuner.tuner.study import StudyResult, refine
from kvtuner.tuner.study_storage import sqlite_url
from kvtuner.tuner.warm_starts import warm_starts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.pipeline.targets import SearchTarget
    from kvtuner.search_spaces.budget import Constraint
    from kvtuner.tuner.objective import MeasuredKL
    from kvtuner.tuner.worker import TrialRecord

STUDY_FILE = "study.db"


@dataclass(frozen=True, slots=True)
class BudgetSearch:
    """Finds winners on the select split.

    Attributes:
        run: what is loaded.
        objective: measures configurations.
    """

    run: SearchRun
    objective: MeasuredKL

    def uniforms(self) -> dict[PrecisionPair, Configuration]:
        """Every uniform pair with the best transforms."""
        rows = row_shape(self.run.args, self.run.shape)
        pairs = (PrecisionPair(*bits) for bits in product(ALL_BITS, ALL_BITS))
        return {pair: uniform(self.run.table, pair, self.run.args.score, rows, transforms=True) for pair in pairs}

    def uniform_table(self) -> dict[PrecisionPair, float]:
        """Measured KL of every uniform pair, nats per token; without those whose KL is not finite, which it says."""
        found = {}
        for pair, configuration in tqdm(self.uniforms().items(), desc="uniform K x V", disable=None):
            try:
                found[pair] = self.objective(configuration)
            except NonFiniteActivationError as error:
                say_left_out(self.run, f"uniform {pair}", str(error))
        return found

    def space(self, constraint: Constraint) -> SearchSpace:
        """What may be chosen under a budget."""
        args = self.run.args
        return build_space(
            self.run.table,
            args.score,
            constraint.shape,
            keep=parse_keep(args.keep) if args.keep else {},
            groups=args.groups,
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

    def find(
        self, target: SearchTarget, member: Configuration | None, uniform_kl: dict[PrecisionPair, float]
    ) -> SearchOutcome:
        """The winner of one target.

        Args:
            target: a budget or a hand-written configuration.
            member: the target's part of a nested family, if there is one.
            uniform_kl: measured KL of uniform pairs.
        """
        if target.constraint is None:
            return self._hand_written(target, uniform_kl)
        constraint = target.constraint
        space = self.space(constraint)
        exact = member or solve(space, target.constraint)
        warm = [exact] if member else self._warm_starts(space, target.constraint)
        with self.run.phases.phase(f"refinement {target.asked}"):
            study = self._refine(target, target.constraint, space, warm)
        exact_kl = self._exact_kl(target, exact, study)
        return SearchOutcome(
            asked=target.asked,
            configuration=study.best,
            measured_kl=study.best_value,
            fits=lambda other: other.keeps(constraint),
            uniform_kl=uniform_kl,
            exact=exact,
            exact_kl=exact_kl,
            study=study,
            fronts=tuple(solve_front(space, target.constraint.cost, stage) for stage in target.constraint.stages),
        )

    def _exact_kl(self, target: SearchTarget, exact: Configuration, study: StudyResult) -> float | None:
        """Measured KL of the exact solution, None where it is not finite; says what refinement gained over it."""
        try:
            exact_kl = self.objective(exact)
        except NonFiniteActivationError:  # its trial has said so
            say(f"refinement {target.asked}: best {study.best_value:.4g} nats per token; the exact solution has no KL")
            return None
        say(
            f"refinement {target.asked}: exact solution {exact_kl:.4g}, best {study.best_value:.4g} nats per token:"
            f" a gain of {number(exact_kl - study.best_value)} on the select split"
        )
        return exact_kl

    def _hand_written(self, target: SearchTarget, uniform_kl: dict[PrecisionPair, float]) -> SearchOutcome:
        assert target.pairs is not None
        rows, ranks = row_shape(self.run.args, self.run.shape), ranks_of(self.run.args, self.run.shape)
        chosen = configuration_from_pairs(self.run.table, target.pairs, self.run.args.score, rows)
        cap = ranks.bytes_per_token(target.pairs)
        return SearchOutcome(
            asked=target.asked,
            configuration=chosen,
            measured_kl=self.objective(chosen),
            fits=lambda other: other.bytes_on(ranks) <= cap,
            uniform_kl=uniform_kl,
        )

    def _warm_starts(self, space: SearchSpace, constraint: Constraint) -> list[Configuration]:
        args = self.run.args
        # As many as a generation of NSGA-II: they become its first population.
        limit = args.trials if args.sampler == "none" else min(args.trials, POPULATION_SIZE)
        return warm_starts(space, constraint, list(self.uniforms().values()), limit)

    def _refine(
        self, target: SearchTarget, constraint: Constraint, space: SearchSpace, warm: Sequence[Configuration]
    ) -> StudyResult:
        args = self.run.args
        identity = {"measurements": sha256_of(self.run.table.identity), **target.identity}
        storage = args.storage or sqlite_url(self.run.folder.file(STUDY_FILE).resolve())
        with tqdm(total=args.trials, desc=f"refine {target.asked}", unit="trial", disable=None) as bar:

            def on_trial(trial: TrialRecord) -> None:
                bar.update(1)
                if trial.failure is not None and trial.is_measured:
                    say_left_out(self.run, f"trial {trial.number} of {target.asked}", trial.failure)

            return refine(
                space,
                constraint,
                self.objective,
                warm=warm,
                sampler=args.sampler,
                num_trials=args.trials,
                seed=args.seed,
                storage=storage,
                study_name=f"{target.name}-{sha256_of(identity)[7:19]}",
                identity=identity,
                race=self.objective.against,
                on_trial=on_trial,
            )
