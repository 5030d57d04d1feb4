"""Optuna's samplers under a constraint, which each version of Optuna sets otherwise. Knows nothing of layers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final, Literal

import optuna
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, TrialState

SamplerName = Literal["nsga2", "tpe", "random", "none"]

POPULATION_SIZE: Final = 24
"""Individuals in a generation of NSGA-II. With Optuna's default of 50 a search would by default end with the first."""

# Proposals for one trial at most. One of TPE takes a hundred times as long as one of the others.
_NUM_PROPOSALS: Final[dict[SamplerName, int]] = {"nsga2": 20, "tpe": 5, "random": 20, "none": 1}

FIXED_PARAMS: Final = "fixed_params"
"""System attribute of a queued trial's parameters, in all versions of Optuna."""

_VIOLATION: Final = "violation"

# Optuna 5 deprecates `constraints_func`, which is all that Optuna 4 has.
_HAS_SET_CONSTRAINT: Final = hasattr(optuna.trial.Trial, "set_constraint")


def set_violation(trial: optuna.Trial, violation: float) -> None:
    """Tell the sampler by how much a trial breaks its constraint; at most 0 where it does not."""
    if _HAS_SET_CONSTRAINT:
        trial.set_constraint("budget", violation)
    else:
        trial.set_user_attr(_VIOLATION, violation)


def make_sampler(
    name: SamplerName,
    seed: int,
    distributions: Mapping[str, BaseDistribution],
    is_wanted: Callable[[Mapping[str, Any]], bool] | None = None,
    suggest: Callable[[int], dict[str, Any] | None] | None = None,
) -> BaseSampler:
    """The sampler of that name; the one of ``none`` is never asked.

    `suggest` gives the parameters to try by the trial's number. Where it gives None the sampler is asked, and asked
    again where `is_wanted` says that its proposal is not worth a trial. The distributions are those of all parameters.
    """
    num_proposals = 1 if is_wanted is None else _NUM_PROPOSALS[name]
    inner = _optuna_sampler(name, seed)
    return _CandidatePoolSampler(inner, num_proposals, distributions, is_wanted or bool, suggest or (lambda _: None))


def _optuna_sampler(name: SamplerName, seed: int) -> BaseSampler:
    options: dict[str, Any] = {} if _HAS_SET_CONSTRAINT else {"constraints_func": _violations}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "nsga2":
            return _RememberingNSGAIISampler(population_size=POPULATION_SIZE, seed=seed, **options)
        if name == "tpe":
            return TPESampler(seed=seed, **options)
        return RandomSampler(seed=seed)


def _violations(trial: FrozenTrial) -> Sequence[float]:
    return (trial.user_attrs[_VIOLATION],)


class _RememberingNSGAIISampler(NSGAIISampler):
    """NSGA-II that does not read its generation and its parents from the storage again for every proposal of a trial.

    Neither changes: a trial keeps its generation, and the parents of a generation are written down when it begins.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._generation_of: dict[int, int] = {}
        self._parents_of: dict[int, list[FrozenTrial]] = {}

    def get_trial_generation(self, study: optuna.Study, trial: FrozenTrial) -> int:
        if trial.number not in self._generation_of:
            self._generation_of = {trial.number: super().get_trial_generation(study, trial)}
        return self._generation_of[trial.number]

    def get_parent_population(self, study: optuna.Study, generation: int) -> list[FrozenTrial]:
        if generation not in self._parents_of:
            self._parents_of = {generation: super().get_parent_population(study, generation)}
        return self._parents_of[generation]


class _CandidatePoolSampler(BaseSampler):
    """Takes a suggestion where there is one; else asks another sampler until a proposal is wanted.

    Of NSGA-II's children of two configurations near the budget every other one breaks it, and many are not new. Neither
    is worth a trial. The last proposal is taken as it is.
    """

    def __init__(
        self,
        inner: BaseSampler,
        num_proposals: int,
        distributions: Mapping[str, BaseDistribution],
        is_wanted: Callable[[Mapping[str, Any]], bool],
        suggest: Callable[[int], dict[str, Any] | None],
    ) -> None:
        self._inner = inner
        self._num_proposals = num_proposals
        self._distributions = dict(distributions)
        self._is_wanted = is_wanted
        self._suggest = suggest

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        relative = self._inner.infer_relative_search_space(study, trial)
        is_fixed = FIXED_PARAMS in trial.system_attrs
        suggested = {} if is_fixed else self._suggest(trial.number)
        if suggested is not None:
            # NSGA-II counts a trial to a generation when asked for it: so these trials become part of its population.
            self._inner.sample_relative(study, trial, relative)
            return suggested
        params: dict[str, Any] = {}
        for _ in range(self._num_proposals):
            params = dict(self._inner.sample_relative(study, trial, relative))
            for name, distribution in self._distributions.items():
                if name not in params:
                    params[name] = self.sample_independent(study, trial, name, distribution)
            if self._is_wanted(params):
                break
        return params

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._inner.before_trial(study, trial)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        self._inner.reseed_rng()
