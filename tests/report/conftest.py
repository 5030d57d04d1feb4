"""Plausible data of a search, profiles of all kinds, and readers of strips and pages that know the format alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kvtuner.cli import main
from kvtuner.evaluation.statistics import Interval
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, build_profile, dump_profile
from kvtuner.exported_configs.profile.evaluation_record import Evaluation
from kvtuner.exported_configs.profile.evidence import ModelIdentity, Provenance, QualityRecord
from kvtuner.geometry import ModelGeometry
from kvtuner.quant import Transform
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
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtuner.exported_configs.profile.profile import Profile

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
    return OffsetQuality(offsets, positions, 5.41, winner, tuple(baselines))


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


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process; returns exit status, stdout, stderr."""

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(arg) for arg in args])
        return status, *capsys.readouterr()

    return call


HASH = "sha256:" + 64 * "a"
OTHER_HASH = "sha256:" + 64 * "b"
HEADS = 2
CHANNELS = 16
KINDS = ("none", "hadamard", "balanced", "balanced+hadamard", "centered", "centered+hadamard")
KINDS += ("centered+balanced", "centered+balanced+hadamard")
# Written down once more, to be read back with.
BITS = {"2": 2, "4": 4, "8": 8, "F": 16}
LETTERS = dict(zip(".HbBcCxX", KINDS, strict=True))
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = "\x1b]0;x\x07\x1b[31m\r\n\u202e\"'><script src=//evil.example/x.js>alert(1)</script><img onerror=x>"
QUALITY: dict[str, Any] = {
    "metric": "kl_nats_per_token",
    "read_plan": "decode",
    "split_tokens": 4096,
    "predicted_kl": None,
    "measured_kl": {"mean": 0.0125, "low": 0.011, "high": 0.014},
    "kl_p99": 0.2,
    "top1_agreement": 0.97,
    "perplexity": 12.5,
    "reference_perplexity": 12.25,
    "baselines": [
        {"name": name, "mean_bits": 4.0, "effective_bits": bits, "kl_mean": kl, "kl_low": kl / 2, "kl_high": 2 * kl}
        for name, bits, kl in (("K4V4", 5.0, 0.05), ("K4V4 + transforms", 5.0, 0.02), ("fp8", 8.0, 0.001))
    ],
}
PROVENANCE: dict[str, Any] = {
    "kvtuner_version": "0.1.0",
    "calibration": {
        "corpus": "demo",
        "token_ids_sha256": {"calibrate": HASH, "select": HASH, "report": HASH},
        "num_sequences": {"calibrate": 8, "select": 4, "report": 16},
        "sequence_length": 512,
        "position_range": [0, 8191],
        "seed": 7,
        "score": "kl",
    },
    "search": {"sampler": "nsga2", "trials": 100, "seed": 7},
    "libraries": {"torch": "2", "transformers": "5", "optuna": "5"},
}
MODEL: dict[str, Any] = {
    "id": "owner/tiny",
    "revision": None,
    "config_sha256": HASH,
    "architecture": "Tiny",
    "dtype": "bfloat16",
}


def transform(name: str, seed: int = 0, heads: int = HEADS) -> Transform:
    kind, generator = TransformKind.parse(name), torch.Generator().manual_seed(seed)
    mu, lam = torch.rand(2, heads, CHANNELS, generator=generator).add(0.5).to(torch.float16)
    return Transform(kind, mu if kind.centered else None, lam if kind.balanced else None)


def choice(pair: tuple[int, int] = (4, 4), k: str = "none", v: str = "none", seed: int = 0) -> LayerQuantization:
    return LayerQuantization(*pair, transform(k, seed), transform(v))


def layers_of(count: int) -> list[LayerQuantization]:
    """Every width and every transform, in an order that no period of ten hides."""
    widths = (2, 4, 8, 16)
    chosen = []
    for layer in range(count):
        k_bits, v_bits = widths[layer * 7 % 11 % 4], widths[layer * 5 % 13 % 4]
        k, v = KINDS[layer * 3 % 17 % 8], KINDS[layer * 5 % 7 % 2]
        chosen.append(choice((k_bits, v_bits), "none" if k_bits == 16 else k, "none" if v_bits == 16 else v))
    return chosen


def make(layers: Sequence[LayerQuantization], *, heads: int = HEADS, **changes: Any) -> Profile:
    arguments: dict[str, Any] = {
        "geometry": ModelGeometry(len(layers), 4, heads, CHANNELS, CHANNELS),
        "layers": layers,
        "k_group_size": CHANNELS,
        "v_group_size": CHANNELS,
        "symmetric": False,
        "model": ModelIdentity.model_validate(MODEL),
        "budget": AskedBudget("4bit"),
        "quality": QualityRecord.model_validate(QUALITY),
        "provenance": Provenance.model_validate(PROVENANCE),
    }
    return build_profile(**{**arguments, **changes})


def stored(profile: Profile) -> list[tuple[int, int, str, str]]:
    """Widths and transforms of the file, by the format alone."""
    document = json.loads(dump_profile(profile))
    rows = []
    for entry in document["layers"]:
        names = [
            "none"
            if entry[side]["bits"] == 16
            else entry[side].get("transform", document["defaults"][side]["transform"])
            for side in "kv"
        ]
        rows.append((entry["k"]["bits"], entry["v"]["bits"], *names))
    return rows


def read_strip(lines: Sequence[str], prefix: str = "") -> list[tuple[int, int, str, str]]:
    """A strip as a person reads it; checks that every number of the ruler stands at its layer."""
    tracks = {f"{prefix}{name}": "" for name in ("K bits", "V bits", "K kind", "V kind")}
    indent = len(prefix) + 7
    for line in lines:
        if re.match(r"layer +\|", line):
            indent = line.index("|")
            start = len(tracks[f"{prefix}K bits"])
            for mark in re.finditer(r"\|(\d+)", line):
                assert int(mark[1]) == start + mark.start() - indent
        for name in tracks:
            if line.startswith(name):
                tracks[name] += line[indent:]
    k_bits, v_bits, k_kinds, v_kinds = tracks.values()
    cells = zip(k_bits, v_bits, k_kinds, v_kinds, strict=True)
    return [(BITS[k], BITS[v], LETTERS[k_kind], LETTERS[v_kind]) for k, v, k_kind, v_kind in cells]


def evaluation_of(profile: Profile, **changes: Any) -> Evaluation:
    cell = {
        "level": "likelihood",
        "measure": "kl_nats_per_token",
        "task": None,
        "num_tokens": 512,
        "position": 0,
        "units": 12,
        "count": 6000,
        "flag": None,
        "results": [{"subject": "profile", "mean": 0.0321, "low": 0.03, "high": 0.04, "failures": 0}],
        "differences": [
            {"other": "fp8", "mean": 0.0123, "low": 0.01, "high": 0.02, "p_value": 0.001, "mcnemar": None},
            {"other": "bf16", "mean": 0.0777, "low": -0.1, "high": 0.2, "p_value": 0.5, "mcnemar": None},
        ],
    }
    fields: dict[str, Any] = {
        "evaluation_version": 1,
        "profile_digest": profile.digest,
        "model": MODEL,
        "host": {"kind": "sglang", "read_plan": None, "reads": "fresh", "version": "0", "hit_share": 0.5},
        "data": {"corpus": "demo", "token_ids_sha256": HASH, "is_unseen": True},
        "subjects": [{"name": name, "bytes_per_token": 64} for name in ("bf16", "profile", "fp8")],
        "cells": [cell],
        "making": {
            "kvtuner_version": "0",
            "command": "kvtuner eval run",
            "machine": "a machine",
            "torch": "2",
            "transformers": "5",
            "seed": 0,
        },
    }
    return Evaluation.model_validate({**fields, **changes})


def hostile(profile: Profile) -> Profile:
    """A copy with every outside string replaced, past the checks that would refuse it."""
    quality, made = profile.quality, profile.provenance
    assert quality is not None and made.calibration is not None and made.search is not None
    return profile.model_copy(
        update={
            "model": profile.model.model_copy(update={"id": HOSTILE, "architecture": HOSTILE, "revision": HOSTILE}),
            "budget": profile.budget.model_copy(update={"asked": HOSTILE}),
            "quality": quality.model_copy(
                update={"baselines": tuple(b.model_copy(update={"name": HOSTILE}) for b in quality.baselines)}
            ),
            "provenance": made.model_copy(
                update={
                    "kvtuner_version": HOSTILE,
                    "calibration": made.calibration.model_copy(update={"corpus": HOSTILE, "score": HOSTILE}),
                    "search": made.search.model_copy(update={"sampler": HOSTILE}),
                }
            ),
        }
    )


BASE = [choice((4, 4), "balanced"), choice((8, 2), "hadamard", "hadamard"), choice((16, 16)), choice((2, 4), "none")]


def swapped(layer: int, other: LayerQuantization) -> list[LayerQuantization]:
    return [other if number == layer else each for number, each in enumerate(BASE)]


def with_kl(profile: Profile, low: float, mean: float, high: float, **changes: Any) -> Profile:
    kl = {"mean": mean, "low": low, "high": high}
    quality = QualityRecord.model_validate({**QUALITY, "measured_kl": kl, **changes})
    return make(BASE, quality=quality, provenance=profile.provenance, model=profile.model)


def with_record(profile: Profile, **changes: Any) -> Profile:
    record = {**PROVENANCE["calibration"], **changes}
    return make(BASE, provenance=Provenance.model_validate({**PROVENANCE, "calibration": record}))


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """Everything of this file that tests of profiles use, by name."""
    return SimpleNamespace(**globals())
