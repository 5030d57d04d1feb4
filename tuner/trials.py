"""The trials of a study as Optuna stores them: choices as parameters, outcomes as attributes. Runs nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from optuna.distributions import IntDistribution
from optuna.trial import TrialState

from kvtuner.tuner.samplers import FIXED_PARAMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from optuna.trial import FrozenTrial

    from kvtuner.search_spaces.space import Configuration, LayerChoice, SearchSpace

# User attributes of a trial; optuna-dashboard shows them.
SOURCE: Final = "source"
OUTCOME: Final = "outcome"  # a dictionary: each attribute is a commit of its own
FAILURE: Final = "failure"  # in an outcome, where a KL is not finite
TICKET: Final = "ticket"
LAYERS: Final = "layers"  # every layer's choice in words, as its parameter is a number


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One finished trial.

    Attributes:
        number: The number of the trial in the study, from 0.
        value: KL, nats per token, measured or estimated by a race; None outside the budget, where nothing is measured,
            and where the KL is not finite.
        source: Whether it was a warm start or the sampler's idea.
        is_measured: Whether it took a measurement of its own; else it broke the budget or repeated another.
        failure: The reason why its KL is not finite; None where it is, or was not asked for.
    """

    number: int
    configuration: Configuration
    value: float | None
    source: Literal["warm", "sampler"]
    is_measured: bool
    failure: str | None = None

    @property
    def is_feasible(self) -> bool:
        """Whether it keeps the budget."""
        return self.value is not None or self.failure is not None


class TrialReader:
    """Reads the trials of a study over a search space: indices, one per group, in place of named parameters."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        # A group with one choice is no parameter: samplers change each parameter at a rate of 1 / their number.
        self.distributions = {
            self._name(group): IntDistribution(0, size - 1) for group, size in enumerate(space.sizes) if size > 1
        }

    def _name(self, group: int) -> str:
        """The name of a group's parameter, with the id of its first layer."""
        places = self._space.groups[group]
        return f"{'layer' if len(places) == 1 else 'group'}_{self._space.menus[places[0]].layer:03d}"

    def menus(self) -> dict[str, list[str]]:
        """The choices in words behind the numbers of each parameter."""
        return {
            self._name(group): [self._text(places, index) for index in range(self._space.sizes[group])]
            for group, places in enumerate(self._space.groups)
            if self._name(group) in self.distributions
        }

    def _text(self, places: Sequence[int], index: int) -> str:
        """One choice of a group; its pair alone where its layers have different transforms."""
        choices = [self._space.menus[place].choices[index] for place in places]
        texts = {choice_text(choice) for choice in choices}
        return texts.pop() if len(texts) == 1 else str(choices[0].pair)

    def indices(self, params: Mapping[str, Any]) -> tuple[int, ...]:
        """The index of each group's choice."""
        return tuple(int(params.get(self._name(group), 0)) for group in range(len(self._space.groups)))

    def params(self, indices: Sequence[int]) -> dict[str, Any]:
        """The parameters of a trial that takes these choices."""
        params = {self._name(group): index for group, index in enumerate(indices)}
        return {name: params[name] for name in self.distributions}

    def is_decided(self, trial: FrozenTrial) -> bool:
        """Whether it is known what a trial measures."""
        return all_params(trial).keys() == self.distributions.keys()

    def values_of(self, trials: Iterable[FrozenTrial]) -> dict[tuple[int, ...], float | None]:
        """The KLs of trials, inf if not finite; None for a trial that is yet to be measured or breaks the budget."""
        values: dict[tuple[int, ...], float | None] = {}
        for trial in trials:
            if trial.state != TrialState.FAIL and self.is_decided(trial):
                indices = self.indices(all_params(trial))
                values.setdefault(indices, None)
                # A repetition that was not finished does not hide the value of the first.
                if trial.state == TrialState.COMPLETE and trial.user_attrs[OUTCOME]["is_feasible"]:
                    values[indices] = math.inf if FAILURE in trial.user_attrs[OUTCOME] else trial.value
        return values

    def record(self, trial: FrozenTrial) -> TrialRecord:
        """The record of a finished trial."""
        outcome = trial.user_attrs[OUTCOME]
        failure = outcome.get(FAILURE)
        return TrialRecord(
            number=trial.number,
            configuration=self._space.configuration(self.indices(trial.params)),
            value=trial.value if outcome["is_feasible"] and failure is None else None,
            source=trial.user_attrs.get(SOURCE, "sampler"),
            is_measured=outcome["is_measured"],
            failure=failure,
        )


def choice_text(choice: LayerChoice) -> str:
    """A choice for a reader: ``K8V4``, or ``K8V4, keys hadamard, values hadamard``."""
    sides = (("keys", choice.k_transform), ("values", choice.v_transform))
    return ", ".join([str(choice.pair), *(f"{side} {transform}" for side, transform in sides if transform != "none")])


def layer_texts(configuration: Configuration, ids: Sequence[int]) -> dict[str, str]:
    """The choice of every layer, named by its id, for a reader."""
    return {f"layer {layer}": choice_text(choice) for layer, choice in zip(ids, configuration, strict=True)}


def all_params(trial: FrozenTrial) -> dict[str, Any]:
    """The parameters that a trial has, and those that it is queued with."""
    fixed: dict[str, Any] = trial.system_attrs.get(FIXED_PARAMS, {})
    return {**trial.params, **fixed}


def ticket_of(trial: FrozenTrial) -> int:
    """A trial's place in the queue of `Worker`, from 1; 0 while it has none."""
    return int(trial.user_attrs.get(TICKET, 0))


def is_surplus(trials: Sequence[FrozenTrial], number: int, num_trials: int, *, is_sampling: bool) -> bool:
    """Whether other workers took the last places before trial `number` began; the lower number keeps its place."""
    if not is_sampling and FIXED_PARAMS not in trials[number].system_attrs:
        return True
    num_finished = sum(trial.state == TrialState.COMPLETE for trial in trials)
    num_before = sum(trial.state == TrialState.RUNNING for trial in trials[:number])
    return num_finished + num_before >= num_trials
