"""The uniform that takes the winner's place: where the paired interval says so, and of the layers that are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvtuner.evaluation.cache_scheme import CacheScheme, Fp8Scheme
from kvtuner.evaluation.validation import SequenceSums
from kvtuner.exported_configs.verdict import LEAST_UNITS
from kvtuner.geometry import ModelGeometry
from kvtuner.pipeline.stages import baseline_comparison
from kvtuner.pipeline.stages.baseline_comparison import BaselineComparison
from kvtuner.pipeline.stages.budget_search import SearchOutcome
from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.space import LayerChoice
from kvtuner.tuner.study import StudyResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Compare = Callable[..., BaselineComparison]

GEOMETRY = ModelGeometry(2, 2, 2, 64, 64)


def scheme(name: str, *pairs: str) -> CacheScheme:
    return CacheScheme(
        name=name,
        pairs=tuple(map(PrecisionPair.parse, pairs or (name, name))),
        rows=GEOMETRY.row_shape(),
        key=name,
        has_transforms=True,
    )


def choices(*pairs: PrecisionPair) -> tuple[LayerChoice, ...]:
    return tuple(LayerChoice(pair, "none", "none", 64, 0.0) for pair in pairs)


def sums(kls: Sequence[float]) -> SequenceSums:
    ones = (1,) * len(kls)
    return SequenceSums(tuple(kls), tuple(map(float, ones)), tuple(map(float, ones)), ones, ones, kl_p99=max(kls))


EXACT, WINNER = scheme("bf16", "K16V16", "K16V16"), scheme("3bit", "K4V2", "K2V2")
MIXED = scheme("mixed", "K4V4", "K4V2")
FP8 = Fp8Scheme.of(GEOMETRY)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Compare:
    """A comparison of a winner with baselines by the KL of each sequence, as if these were measured."""

    def call(
        kls: Mapping[CacheScheme, Sequence[float]], kept: Mapping[int, str] | None = None, **options: bool
    ) -> BaselineComparison:
        baselines = [baseline for baseline in kls if baseline is not WINNER]
        by_name = {baseline.name: baseline for baseline in baselines}
        measured = {baseline.key: {"small": sums(values)} for baseline, values in kls.items()}
        monkeypatch.setattr(baseline_comparison, "_baselines", lambda *_: [EXACT, *baselines])
        monkeypatch.setattr(baseline_comparison, "_measure_all", lambda *_: measured)
        monkeypatch.setattr(
            baseline_comparison, "_winner", lambda _, outcome: by_name.get(outcome.uniform_name, WINNER)
        )
        run = SimpleNamespace(
            seed=0,
            kept={layer: PrecisionPair.parse(pair) for layer, pair in (kept or {}).items()},
            options=SimpleNamespace(**{"nested": False, **options}),
            folder=SimpleNamespace(log=lambda *_, **__: None),
            uniform=lambda pair, *, transforms: choices(pair, pair),
        )
        searched = choices(*WINNER.pairs)
        outcome = SearchOutcome(
            asked="3bit",
            configuration=searched,
            measured_kl=0.0,
            fits=lambda baseline: baseline.mean_bits <= 4,
            uniform_kl={},
            study=StudyResult(searched, 0.0, (), None),
        )
        return BaselineComparison(cast("Any", run), outcome, cast("Any", None))

    return call


@pytest.mark.parametrize(
    ("excess", "wins"),
    [
        ([0.1] * LEAST_UNITS, True),
        ([0.1] * (LEAST_UNITS - 1), False),  # of one sign by chance
        ([0.1, -0.1] * LEAST_UNITS, False),
        ([0.9, -0.1] + [-0.05] * 6, False),  # above in the mean, by one sequence alone
        ([-0.1] * LEAST_UNITS, False),
    ],
)
def test_a_uniform_takes_the_winners_place_where_the_winner_is_surely_above_it(
    compare: Compare, excess: Sequence[float], wins: bool
) -> None:
    uniform = scheme("K4V4")
    found = compare({WINNER: [1 + more for more in excess], uniform: [1.0] * len(excess)})
    assert found.best_uniform is uniform
    assert (found.outcome.uniform_name == "K4V4") == (found.winner is uniform) == wins
    assert found.outcome.configuration == choices(*(uniform if wins else WINNER).pairs)


def test_a_family_stays_nested(compare: Compare) -> None:
    found = compare({WINNER: [1.1] * LEAST_UNITS, scheme("K4V4"): [1.0] * LEAST_UNITS}, nested=True)
    assert found.winner is WINNER


@pytest.mark.parametrize(
    ("kept", "best"), [({}, "K4V4"), ({0: "K4V2"}, "K4V2"), ({0: "K4V2", 1: "K4V4"}, None), ({1: "K8V8"}, None)]
)
def test_the_rival_is_the_least_uniform_inside_the_budget_that_keeps_what_is_kept(
    compare: Compare, kept: Mapping[int, str], best: str | None
) -> None:
    kls = {WINNER: 1.0, FP8: 0.1, scheme("K8V8"): 0.2, MIXED: 0.3, scheme("K4V4"): 0.4, scheme("K4V2"): 0.5}
    found = compare({baseline: [kl] * LEAST_UNITS for baseline, kl in kls.items()}, kept)
    assert (found.best_uniform and found.best_uniform.name) == best
    assert found.winner is (found.best_uniform or WINNER)
