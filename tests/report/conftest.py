"""Plausible data of a search."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtuner.evaluation.statistics import Interval
from kvtuner.report.layer_strip import LayerRow
from kvtuner.report.search_data import (
    SAMPLED,
    AdditivityRow,
    BudgetOutcome,
    FrontPoint,
    MeasuredPoint,
    OffsetQuality,
    QualityRow,
    RankCorrelation,
    ReportData,
    ScoreSet,
    SensitivityRow,
    TrialPoint,
    UniformKl,
)

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTHS = (2, 4, 8)
UNIFORM_KL = {"K8V8": 6e-5, "K8V4": 0.0021, "K4V4": 0.0188, "K4V2": 0.19, "K2V2": 4.7, "fp8": 3.1e-4}


def around(mean: float, share: float = 0.1) -> Interval:
    return Interval(mean, mean - share * abs(mean), mean + share * abs(mean))


def quality_row(name: str, bits: float, kl: float, *, transforms: bool = False, winner_kl: float = 0.0) -> QualityRow:
    overhead = 0.0 if name == "fp8" else 0.25
    return QualityRow(
        name=name,
        transforms=transforms,
        mean_bits=bits,
        effective_bits=bits + overhead,
        bytes_per_token=int(192 * (bits + overhead)),
        kl=around(kl),
        kl_p99=kl * 12,
        top1=1 - min(0.9, kl),
        perplexity=5.4 + kl,
        fits_budget=bits <= 4,
        difference=around(kl - winner_kl) if winner_kl else None,
    )


def offset_quality(offsets: str, positions: str) -> OffsetQuality:
    winner = quality_row("winner", 3.92, 0.0049)
    bits = {"K8V8": 8, "K8V4": 6, "K4V4": 4, "K4V2": 3, "K2V2": 2, "fp8": 8}
    baselines = [
        quality_row(name, bits[name], kl * (0.3 if transforms else 1), transforms=transforms, winner_kl=0.0049)
        for transforms in (False, True)
        for name, kl in UNIFORM_KL.items()
        if not (transforms and name == "fp8")
    ]
    return OffsetQuality(offsets, positions, 5.41, winner, tuple(baselines), num_sequences=24)


def sensitivity_rows(num_layers: int, rng: np.random.Generator) -> list[SensitivityRow]:
    rows = []
    for layer in range(num_layers):
        for side in ("k", "v"):
            for bits in WIDTHS:
                kl = float(10.0 ** (-0.6 * bits) * rng.lognormal(0, 1.2))
                best = ScoreSet(kl, kl * 1.1, kl**0.5)
                plain = ScoreSet(kl * 3 if bits == 2 else None, kl * 3, (3 * kl) ** 0.5)
                transform = "centered+balanced+hadamard" if side == "k" else "hadamard"
                rows.append(SensitivityRow(layer, side, bits, transform, best, plain))
    return rows


def trial_points(rng: np.random.Generator) -> list[TrialPoint]:
    points = [TrialPoint(0, 0.0062, True, "exact"), TrialPoint(1, 0.0188, True, "K4V4")]
    for number in range(2, 100):
        feasible = bool(rng.random() > 0.2)
        value = float(0.005 + 0.03 * rng.lognormal(-1, 1) / number**0.3) if feasible else None
        points.append(TrialPoint(number, value, feasible, "neighbour" if number < 9 else SAMPLED))
    return points


def layer_rows(num_layers: int, rng: np.random.Generator) -> tuple[LayerRow, ...]:
    widths = rng.choice((2, 4, 8, 16), (num_layers, 2), p=(0.3, 0.4, 0.2, 0.1)).tolist()
    return tuple(
        LayerRow(layer, k, v, "none" if k == 16 else "centered+hadamard", "none" if v == 16 else "hadamard")
        for layer, (k, v) in enumerate(widths)
    )


def front_points() -> tuple[FrontPoint, ...]:
    bits = np.linspace(2.25, 15.9, 120).tolist()
    return (*(FrontPoint(x, x - 0.25, 8 * 10 ** (1.6 - 0.72 * x)) for x in bits), FrontPoint(16.0, 16.0, 0.0))


def measured_points(rng: np.random.Generator) -> tuple[MeasuredPoint, ...]:
    bits = rng.uniform(3.4, 4.2, 80).tolist()
    return tuple(
        MeasuredPoint(x, x - 0.25, 0.5 * 10 ** (1.6 - 0.72 * x) * rng.lognormal(0, 0.6), SAMPLED) for x in bits
    )


def uniform_cells() -> tuple[UniformKl, ...]:
    widths = (2, 4, 8, 16)
    return tuple(
        UniformKl(k, v, 0.0 if k == v == 16 else 6.3 * 10 ** (-0.55 * k) + 10 ** (-0.6 * v))
        for k in widths
        for v in widths
    )


def build_report(num_layers: int = 6, **changes: Any) -> ReportData:
    rng = np.random.default_rng(num_layers)
    data = ReportData(
        model="Qwen/Qwen2.5-7B-Instruct",
        corpus="demo corpus",
        read_plan="decode",
        score="kl",
        budget=BudgetOutcome("4bit", 3.92, 4.17, 800, 3072),
        layers=layer_rows(num_layers, rng),
        quality=(offset_quality("large", "0 to 8,191"), offset_quality("small", "0 to 511")),
        sensitivity=tuple(sensitivity_rows(num_layers, rng)),
        front=front_points(),
        measured=measured_points(rng),
        trials=tuple(trial_points(rng)),
        rank_correlations=(
            RankCorrelation("fisher", "k", 0.991),
            RankCorrelation("fisher", "v", 0.997),
            RankCorrelation("e_a", "v", None),
        ),
        additivity=(AdditivityRow("exact", 0.0058, 0.0062), AdditivityRow("K2V2", 2.9, 4.7)),
        uniform_kl=uniform_cells(),
        forwards=(("calibration", 310), ("isolated KL", 144), ("trials", 84), ("validation", 1024)),
        provenance=(("kvtuner", "0.1.0"), ("seed", "0"), ("calibrate split", "sha256:" + "ab" * 32)),
    )
    return replace(data, **changes)


@pytest.fixture
def make_report() -> Callable[..., ReportData]:
    """Plausible data of a search: `make_report(num_layers, field=value, ...)`."""
    return build_report
