"""The verdict on a profile: each recommendation where its rule holds, in words that hold the figures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, build_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.profile.records import ModelIdentity, Provenance, QualityRecord
from kvtuner.exported_configs.verdict import EQUAL_SHARE, HARMLESS_KL, MAX_SEQUENCES, Verdict, verdict_of
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_geometry import CacheGeometry, LayerGeometry, LayerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

HASH = "sha256:" + "0" * 64
MIXED: list[tuple[int, int | None]] = [(4, 2), (2, 2), (4, 4), (2, 2), (2, 2), (8, 2)]
UNIFORM: list[tuple[int, int | None]] = [(4, 2)] * 6
HEADS = ModelGeometry(6, 2, 2, 64, 64)


def profile_of(
    kl: float,
    *,
    difference: tuple[float, float] | None = (-0.004, -0.002),
    uniform_kl: float | None = None,
    plain_kl: float = 0.05,
    fp8_kl: float | None = 0.008,
    pairs: Sequence[tuple[int, int | None]] = MIXED,
    num_sequences: int = 12,
    geometry: ModelGeometry | CacheGeometry = HEADS,
    **quality: Any,
) -> Profile:
    """A profile of layers beside K4V2 with transforms, whose KL it exceeds by an interval, K4V2 and fp8.

    Without a KL of the uniform the profile's exceeds that by the interval's middle.
    """
    if uniform_kl is None:
        uniform_kl = kl - sum(difference) / 2 if difference else 0.01

    def baseline(name: str, bits: float, mean: float) -> dict[str, Any]:
        bounds = {"kl_mean": mean, "kl_low": mean / 2, "kl_high": mean * 2}
        return {"name": name, "mean_bits": bits, "effective_bits": bits + 0.5, **bounds}

    rivals = [baseline("K4V2 + transforms", 3.0, uniform_kl), baseline("K4V2", 3.0, plain_kl)]
    rivals += [] if fp8_kl is None else [baseline("fp8", 8.0, fp8_kl)]
    best = None
    if difference is not None:
        interval = {"mean": kl - uniform_kl, "low": difference[0], "high": difference[1]}
        best = {"name": "K4V2 + transforms", "difference": interval}
    record = {
        **{"metric": "kl_nats_per_token", "read_plan": "decode", "split_tokens": 4096, "predicted_kl": kl / 2},
        "measured_kl": {"mean": kl, "low": kl / 2, "high": kl * 2},
        **{"kl_p99": 1.0, "top1_agreement": 0.9, "perplexity": 12.0, "reference_perplexity": 11.0},
        **{"baselines": rivals, "best_uniform": best, **quality},
    }
    calibration = {
        "corpus": "corpus",
        "token_ids_sha256": {"calibrate": HASH, "select": HASH, "report": HASH},
        "num_sequences": {"calibrate": 4, "select": 12, "report": num_sequences},
        **{"sequence_length": 512, "position_range": [0, 8191], "seed": 0, "score": "kl"},
    }
    provenance = {
        **{"kvtuner_version": "0", "calibration": calibration, "search": {"sampler": "none", "trials": 1, "seed": 0}},
        "libraries": {"torch": torch.__version__, "transformers": "5", "optuna": "5"},
    }
    identity = {"id": "owner/model", "revision": None, "config_sha256": HASH, "architecture": "A", "dtype": "float32"}
    return build_profile(
        geometry=geometry,
        layers=[LayerQuantization(*pair) for pair in pairs],
        symmetric=False,
        fit="least_squares",
        model=ModelIdentity.model_validate(identity),
        budget=AskedBudget("3bit"),
        quality=QualityRecord.model_validate(record),
        provenance=Provenance.model_validate(provenance),
    )


def verdict(*args: Any, **settings: Any) -> Verdict:
    found = verdict_of(profile_of(*args, **settings))
    assert found is not None
    return found


def test_a_search_that_gained_says_by_how_much_and_where_its_bits_went() -> None:
    found = verdict(0.007)
    assert found.recommendation == "use" and found.advice == "Use it."
    profile = profile_of(0.007)
    ratio = profile.bf16_bytes_per_token() / profile.bytes_per_token()
    assert found.findings == (
        f"{ratio:.2f}x the tokens of bf16, {ratio / 2:.2f}x of fp8.",
        "KL 0.00700 nats per token, 0.88 times fp8's (0.00800).",
        "That is 30% below the best uniform in the budget, K4V2 with transforms (0.0100; paired difference,"
        " negative where the profile is lower, -0.00300 [-0.00400, -0.00200]).",
        "Stored widest are keys of layers 0, 2, 5 and values of layer 2.",
    )
    assert str(found) == " ".join((*found.findings, "Use it."))


def test_keys_of_indexes_are_counted_beside_what_is_compared() -> None:
    """A latent of 256 and 64 channels has 640 bytes in bf16, and 128 + 16 + 128 where the first have 4 bits.

    A key of 128 channels of the index has one byte for each, and a float32 scale.
    """
    latent = LayerGeometry(LayerKind("latent"), 8, 1, 256, 0, rope_dim=64, index_dim=128)
    geometry = CacheGeometry((latent, replace(latent, index_dim=0)) * 3)
    found = verdict(0.007, pairs=[(4, None)] * 6, geometry=geometry, difference=None)
    keys, stored, bf16 = 3 * (128 + 4), 6 * (128 + 16 + 128), 6 * 2 * (256 + 64)
    ratios = [(size + keys) / (stored + keys) for size in (bf16, bf16 / 2)]
    assert found.findings[0] == f"{ratios[0]:.2f}x the tokens of bf16, {ratios[1]:.2f}x of fp8."


def test_a_search_that_gained_nothing_recommends_the_uniform_and_says_what_did_gain() -> None:
    margin = EQUAL_SHARE * 0.01
    found = verdict(0.0105, uniform_kl=0.01, difference=(-margin, margin))
    assert found.recommendation == "use the uniform"
    assert found.advice.startswith("Use uniform K4V2 with transforms, by a search with --layers 0-5:K4V2: ")
    assert found.findings[2] == (
        "It is as good as the best uniform in the budget, K4V2 with transforms (0.0100; paired difference,"
        " negative where the profile is lower, +0.000500 [-0.00250, +0.00250]: within a quarter of the uniform's KL)."
    )
    assert found.findings[3] == "Bits by layer gained nothing. The transforms did: without them K4V2 has 0.0500."
    assert "transforms did" not in str(verdict(0.0105, uniform_kl=0.01, difference=(-margin, margin), plain_kl=0.01))


@pytest.mark.parametrize(("high", "recommendation"), [(0.00099, "use the uniform"), (0.00101, "more text")])
def test_a_difference_that_no_one_would_notice_needs_no_more_text(high: float, recommendation: str) -> None:
    found = verdict(4e-5, uniform_kl=5e-5, difference=(-3e-5, high))
    assert found.recommendation == recommendation
    assert ("not within the 0.001 nats that are taken for equal)" in found.findings[2]) == (
        recommendation == "more text"
    )
    assert "within the 0.001 nats that are taken for equal)" in found.findings[2]


def test_a_winner_that_is_the_uniform_is_called_so() -> None:
    found = verdict(0.01, difference=(0.0, 0.0), pairs=UNIFORM)
    assert found.recommendation == "use"
    assert "Bits by layer gained nothing: this is uniform K4V2 with transforms." in found.findings[2]


@pytest.mark.parametrize(
    ("pairs", "difference"),
    [
        ([(8, 2)] * 6, (0.001, 0.002)),
        ([(8, 2)] * 6, (0.0, 0.0)),
        ([*UNIFORM[:5], (2, 2)], (0.0, 0.0)),
        (UNIFORM, (0.0, 0.001)),  # of the uniform's pair, with other transforms
    ],
)
def test_what_is_not_the_best_uniform_is_not_called_so(
    pairs: Sequence[tuple[int, int]], difference: tuple[float, float]
) -> None:
    found = verdict(0.0105, difference=difference, pairs=pairs)
    assert found.recommendation == "use the uniform"
    assert found.findings[2].startswith("It is as good as ") and "this is uniform" not in str(found)


def test_a_profile_that_is_surely_worse_than_the_uniform_recommends_that() -> None:
    found = verdict(0.015, difference=(0.003, 0.007), pairs=[(2, 8)] * 6)
    assert found.recommendation == "use the uniform"
    assert found.findings[2] == (
        "That is 1.5 times that of the best uniform in the budget, K4V2 with transforms (0.0100; paired difference,"
        " negative where the profile is lower, +0.00500 [+0.00300, +0.00700])."
    )
    assert found.advice == (
        "Use uniform K4V2 with transforms, by a search with --layers 0-5:K4V2: it is simpler, and better."
    )
    assert "this is uniform" not in str(found)


def test_a_kl_that_harms_asks_for_a_budget_unless_a_uniform_inside_does_not_harm() -> None:
    worse = {"difference": (0.03, 0.05), "larger_budgets": BUDGETS}
    found = verdict(0.05, **worse)
    assert found.recommendation == "use the uniform" and "would have" not in str(found)
    assert verdict(0.07, uniform_kl=0.03, **worse).recommendation == "another budget"
    assert verdict(0.05, uniform_kl=0.02, difference=(-0.001, 0.06)).recommendation == "another budget"


def test_a_uniform_without_transforms_is_searched_without_them() -> None:
    record = {"name": "K4V2", "difference": {"mean": 0.01, "low": 0.008, "high": 0.012}}
    found = verdict(0.015, plain_kl=0.005, best_uniform=record)
    assert found.advice.startswith("Use uniform K4V2, by a search with --layers 0-5:K4V2 --transforms none: ")


def test_a_difference_whose_interval_holds_zero_is_not_told_apart() -> None:
    found = verdict(0.007, difference=(-0.01, 0.003))
    assert found.recommendation == "more text" and "below" not in found.findings[2]


@pytest.mark.parametrize(("half_width", "wanted"), [(0.0026, 24), (0.005, 48), (0.01, 192)])
def test_a_difference_that_is_not_told_apart_asks_for_as_much_text_as_would(half_width: float, wanted: int) -> None:
    found = verdict(0.0105, uniform_kl=0.01, difference=(-half_width, half_width))
    assert found.recommendation == "more text"
    # An interval narrows as the square root: a quarter of the uniform's KL is wanted, and at least twice the text.
    assert found.advice == (
        f"Measure more text: --sequences 4,12,{wanted} reports on {wanted} sequences in place of 12."
        " Until then use uniform K4V2 with transforms, by a search with --layers 0-5:K4V2: it is simpler."
    )
    assert (
        "too little to tell whether the profile is as good as the best uniform in the budget, K4V2" in found.findings[2]
    )
    assert "not within a quarter of the uniform's KL" in found.findings[2]


def test_a_difference_that_no_text_would_tell_leaves_the_choice() -> None:
    found = verdict(0.0105, difference=(-0.06, 0.06))
    assert found.recommendation == "more text"
    assert f"takes more than {MAX_SEQUENCES:,} report sequences" in found.advice and "Use it or K4V2" in found.advice


@pytest.mark.parametrize(("num_sequences", "wanted"), [(2, 8), (3, 8), (4, 8), (5, 12)])
@pytest.mark.parametrize("difference", [(-0.004, -0.002), (0.002, 0.004), (-0.001, 0.001)])
def test_a_difference_of_few_sequences_asks_for_more_whatever_its_interval(
    num_sequences: int, wanted: int, difference: tuple[float, float]
) -> None:
    found = verdict(0.007, difference=difference, num_sequences=num_sequences)
    assert found.recommendation == "more text"
    assert "The text is too little to tell" in found.findings[2] and "of fewer than 6 sequences)" in found.findings[2]
    assert found.advice == (
        f"Measure more text: --sequences 4,12,{wanted} reports on {wanted} sequences in place of {num_sequences}, and"
        " fewer than 6 tell nothing apart. Until then use uniform K4V2 with transforms, by a search with --layers"
        " 0-5:K4V2: it is simpler."
    )
    assert verdict(0.007, difference=difference, num_sequences=6).recommendation != "more text"


@pytest.mark.parametrize("rival", [{"difference": None}, {"difference": (0.0, 0.0), "pairs": UNIFORM}])
def test_few_sequences_recommend_nothing_without_another_rival_either(rival: dict[str, Any]) -> None:
    found = verdict(0.01, num_sequences=5, **rival)
    assert found.recommendation == "more text" and found.advice.endswith(" tell nothing apart.")
    assert verdict(0.01, num_sequences=6, **rival).recommendation == "use"


def test_a_kl_that_harms_asks_for_a_budget_on_few_sequences_too() -> None:
    assert verdict(0.05, uniform_kl=0.01, difference=(0.03, 0.05), num_sequences=2).recommendation == "another budget"


BUDGETS = [
    {"mean_bits": 3.5, "effective_bits": 4.0, "predicted_kl": 0.016},
    {"mean_bits": 4.0, "effective_bits": 5.0, "predicted_kl": 0.009},
    {"mean_bits": 6.0, "effective_bits": 7.0, "predicted_kl": 0.001},
]


def test_a_kl_that_harms_asks_for_the_smallest_budget_that_does_not() -> None:
    found = verdict(0.05, larger_budgets=BUDGETS)  # twice what was predicted: 4 bits have 0.018
    assert found.recommendation == "another budget"
    stored = float(profile_of(0.05).effective_bits)
    assert found.advice == (
        "Use --budget 4bit: this one's KL is above 0.0200, the most that is taken for harmless, that would have about"
        f" 0.0180 in {5.0 / stored - 1:.0%} more bytes."
    )
    assert verdict(0.05).advice.startswith("Use another budget: this one's KL is above 0.0200")
    assert "--budget 6bit" in verdict(0.05, larger_budgets=BUDGETS, predicted_kl=0.01).advice  # 4 bits have 0.045
    assert "Use another budget:" in verdict(0.05, larger_budgets=BUDGETS, predicted_kl=None).advice


def test_what_is_harmless_is_measured_by_fp8_where_that_loses_more() -> None:
    assert verdict(HARMLESS_KL).recommendation == "use"
    assert verdict(HARMLESS_KL * 1.01).recommendation == "another budget"
    assert verdict(0.037, fp8_kl=0.019).recommendation == "use"
    assert "above 0.0380, twice fp8's" in verdict(0.039, fp8_kl=0.019).advice
    assert "fp8's" not in verdict(0.007, fp8_kl=None).findings[1]
    assert "2.5 times fp8's" in verdict(0.02, fp8_kl=0.008).findings[1]


def test_no_kl_above_twice_the_harmless_one_is_harmless_however_bad_fp8_is() -> None:
    assert verdict(0.04, fp8_kl=2.0).recommendation == "use"
    found = verdict(0.041, fp8_kl=2.0)
    assert found.recommendation == "another budget"
    assert found.advice == "Use another budget: this one's KL is above 0.0400, the most that is taken for harmless."


def test_a_verdict_says_what_a_bit_more_would_have() -> None:
    assert verdict(0.007, larger_budgets=BUDGETS).findings[-1].startswith("By prediction 4bit would have 0.0180, in ")
    assert "would have" not in str(verdict(0.007))


ONE_HEAD_OF_80 = ModelGeometry(3, 2, 1, 80, 80)


def last_finding(
    pairs: Sequence[tuple[int, int | None]],
    *,
    kl: float = 0.007,
    asked: str = "3.5bit",
    geometry: Any = ONE_HEAD_OF_80,
    high: float = 0.006,
) -> str:
    """The last finding on layers beside a K4V4 of KL 0.005 in 288 bytes; their own interval begins at half their KL."""
    rival = {"name": "K4V4", "mean_bits": 4.0, "effective_bits": 4.8, "kl_mean": 0.005, "kl_low": 0, "kl_high": high}
    profile = profile_of(kl, pairs=pairs, geometry=geometry, difference=None, baselines=[rival])
    budget = profile.budget.model_copy(update={"asked": asked})
    found = verdict_of(profile.model_copy(update={"budget": budget}))
    assert found is not None
    return found.findings[-1]


def test_rows_that_padding_makes_as_long_as_wider_ones_are_named_with_their_bytes() -> None:
    mixed: list[tuple[int, int | None]] = [(4, 3), (3, 3), (3, 4)]
    counts = (  # 3 bits of 80 channels take 34 bytes, and 4 bits 44: with padding both take 48
        "Rows are padded to 16 bytes, and keys of layers 1-2 and values of layers 0-1 would take no more with more"
        " bits: a budget of 288B/token counts bytes."
    )
    assert last_finding(mixed, kl=0.014) == f"{counts} In no more bytes K4V4 has 0.00500."
    assert last_finding(mixed, kl=0.014, high=0.0071).endswith("K4V4 has 0.00500, which may be chance.")
    assert last_finding(mixed, kl=0.004) == counts
    assert "Rows are padded" not in last_finding([(4, 4), (2, 4), (8, 2)])
    assert "Rows are padded" not in last_finding(mixed, asked="288B/token")
    shorter = last_finding([(3, 2), (3, 2), (4, 4)])
    assert "a budget of 256B/token" in shorter and "In no more bytes" not in shorter
    narrow = last_finding([(2, 2)] * 3, geometry=ModelGeometry(3, 2, 1, 24, 24))  # which 3 bits cannot hold
    assert "keys of layers 0-2 and values of layers 0-2 would" in narrow and "a budget of 96B/token" in narrow


def test_rows_of_latents_that_could_have_more_bits_are_called_so() -> None:
    latent = LayerGeometry(LayerKind("latent"), 8, 1, 48, 0, rope_dim=16)
    found = last_finding([(3, None)] * 2, geometry=CacheGeometry((latent,) * 2))
    # 18 bytes and a word of 4, or 24 and 4, are 32; the rotary channels take 32 more
    assert "and latents of layers 0-1 would" in found and "a budget of 128B/token" in found


def test_a_profile_without_measurements_has_no_verdict_and_one_without_a_rival_a_short_one() -> None:
    profile = profile_of(0.007)
    assert verdict_of(profile.model_copy(update={"quality": None})) is None
    found = verdict(0.007, difference=None)
    assert (found.recommendation, len(found.findings)) == ("use", 2)
    assert found.to_json()["text"] == str(found)


def test_a_rival_must_be_a_baseline_of_a_pair() -> None:
    with pytest.raises(ValueError, match="best_uniform must be one of the baselines, but is 'K4V4'"):
        profile_of(0.007, best_uniform={"name": "K4V4", "difference": {"mean": 0.0, "low": 0.0, "high": 0.0}})
    with pytest.raises(ValueError, match=r"best_uniform\.name"):
        profile_of(0.007, best_uniform={"name": "fp8", "difference": {"mean": 0.0, "low": 0.0, "high": 0.0}})


@pytest.mark.parametrize(
    ("kl", "uniform_kl", "stated", "is_refused"),
    [
        (3.0, 3.5, -0.004, True),
        (0.00118, 0.0, -0.00415, True),
        (0.0, 0.0, 1e-9, True),
        (0.0, 0.0, 0.0, False),
        (0.00118, 0.00533, -0.00415, False),
        (0.00118, 0.00533, -0.00418, False),  # of KL 0.0011751 and 0.0053549: three digits
        (0.00118, 0.00533, -0.00425, True),
    ],
)
def test_the_difference_from_the_rival_is_that_of_both_kl(
    kl: float, uniform_kl: float, stated: float, is_refused: bool
) -> None:
    record = {"name": "K4V2 + transforms", "difference": {"mean": stated, "low": stated - 0.01, "high": 0.0}}
    if is_refused:
        with pytest.raises(ValueError, match=r"difference\.mean must be the profile's KL less that of K4V2"):
            profile_of(kl, uniform_kl=uniform_kl, best_uniform=record)
    else:
        profile_of(kl, uniform_kl=uniform_kl, best_uniform=record)


def test_a_rival_without_a_kl_has_no_share() -> None:
    assert "is above that" in verdict(0.01, uniform_kl=0.0, difference=(0.005, 0.015)).findings[2]


def test_an_interval_must_hold_its_mean() -> None:
    with pytest.raises(ValueError, match=r"must lie in its interval, but 0.005 is not in \[-0.004, -0.002\]"):
        profile_of(0.01, uniform_kl=0.005, difference=(-0.004, -0.002))


def beside_wider(name: str, kl: float, high: float, **settings: Any) -> Verdict:
    """The verdict on a profile by bits of KL 0.007 [0.0035, 0.014] beside one of more bits in no more bytes."""
    rows: Any = {"pairs": [(8, 2)] * 3, "geometry": ModelGeometry(3, 2, 1, 24, 24), "difference": None}
    effective = float(profile_of(0.007, **rows).budget.effective_bits)
    wider = {"name": name, "mean_bits": 8.0, "effective_bits": effective, "kl_mean": kl, "kl_low": 0, "kl_high": high}
    profile = profile_of(0.007, baselines=[wider], **rows, **settings)
    bits = profile.budget.model_copy(update={"asked": "5bit"})
    found = verdict_of(profile.model_copy(update={"budget": bits}))
    assert found is not None
    return found


def test_a_better_cache_in_no_more_bytes_is_advised() -> None:
    found = beside_wider("fp8", 0.001, 0.0034)
    assert found.recommendation == "another budget"
    assert found.advice == "Search by bytes: --budget 144B/token."
    assert found.findings[-1].endswith("In no more bytes fp8 has 0.00100.")


@pytest.mark.parametrize(("kl", "high"), [(0.007 - 1e-6, 0.014), (0.001, 0.0036)])
def test_a_cache_that_may_be_better_by_chance_is_named_and_overrides_nothing(kl: float, high: float) -> None:
    found = beside_wider("fp8", kl, high)
    assert (found.recommendation, found.advice) == ("use", "Use it.")
    assert found.findings[-1].endswith(", which may be chance.")


@pytest.mark.parametrize(("low", "is_sure"), [(0.001, True), (-0.001, False)])
def test_the_fair_rival_in_no_more_bytes_is_judged_by_the_paired_interval(low: float, is_sure: bool) -> None:
    """The rival's own interval meets the profile's, since the same sequences are hard for both."""
    rival = {"name": "K4V4", "difference": {"mean": 0.002, "low": low, "high": 0.003}}
    found = beside_wider("K4V4", 0.005, 0.012, best_uniform=rival)
    assert (found.recommendation == "another budget") == is_sure
    few = beside_wider("K4V4", 0.005, 0.012, best_uniform=rival, num_sequences=5)
    assert few.recommendation == "more text" and few.findings[-1].endswith(", which may be chance.")


def test_a_profile_of_the_first_version_is_written_without_the_comparison() -> None:
    profile = profile_of(0.007)
    first = build_profile(
        geometry=ModelGeometry(6, 2, 2, 64, 64),
        layers=[LayerQuantization(4, 2)] * 6,
        symmetric=False,
        model=profile.model,
        budget=AskedBudget("3bit"),
        quality=profile.quality,
        provenance=profile.provenance,
    )
    assert first.schema_version == 1 and first.quality is not None and first.quality.best_uniform is None
    assert profile.quality is not None
    with pytest.raises(ProfileError, match=r"quality\.best_uniform: schema_version 1 has none"):
        Profile(**{**dict(first), "quality": profile.quality})
