from __future__ import annotations

from typing import TYPE_CHECKING, Any

from profile_samples import BASE, evaluation_of, make_profile

from kvtuner.exported_configs.evaluation_verdict import answer_differences, evaluation_verdict

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.evaluation_record import Evaluation


def cell(task: str, low: float, mean: float, high: float, p_value: float = 0.5, **changes: Any) -> dict[str, Any]:
    means = {"bf16": 0.6, "profile": 0.6 + mean, "fp8": 0.59}
    return {
        "level": "task",
        "measure": "accuracy",
        "task": task,
        "num_tokens": None,
        "position": 0,
        "units": 100,
        "count": 100,
        "flag": None,
        "results": [
            {"subject": name, "mean": value, "low": value, "high": value, "failures": 0}
            for name, value in means.items()
        ],
        "differences": [
            {"other": "bf16", "mean": mean, "low": low, "high": high, "p_value": p_value, "mcnemar": None},
            {"other": "fp8", "mean": -0.3, "low": -0.4, "high": -0.2, "p_value": 0.001, "mcnemar": None},
        ],
        **changes,
    }


def asked(*cells: dict[str, Any]) -> Evaluation:
    return evaluation_of(make_profile(BASE), cells=list(cells))


LOST, KEPT = cell("gsm8k", -0.08, -0.05, -0.02, p_value=0.01), cell("arc", -0.03, 0.01, 0.05)
BLIND = {"flag": "floor"}


def test_tasks_that_lose_answers_beyond_their_interval_are_named_with_fp8_beside() -> None:
    verdict = evaluation_verdict(asked(LOST, KEPT))
    assert verdict.findings == (
        "1 of 2 tasks loses answers beyond the interval, beside bf16: gsm8k -5.0 points [-8.0, -2.0], fp8 -1.0.",
    )
    assert verdict.advice == "Use a larger budget for such tasks."


def test_without_a_loss_the_widest_that_remains_open_is_named() -> None:
    verdict = evaluation_verdict(asked(KEPT, cell("drop", -0.06, 0.0, 0.06), cell("none", -0.5, 0.0, 0.5, **BLIND)))
    assert " ".join(verdict.findings) == (
        "2 tasks can show a loss, and none is shown. 1 more hardly can."
        " A loss of 6.0 points is not excluded: drop +0.0 points [-6.0, +6.0], fp8 -1.0."
    )
    assert verdict.advice.startswith("Use it")


def test_tasks_that_cannot_show_a_loss_are_no_reason_to_use_a_profile() -> None:
    verdict = evaluation_verdict(asked(cell("a", -0.1, 0.0, 0.1, **BLIND), cell("b", -0.1, 0.0, 0.1, flag="unread")))
    assert verdict.findings == (
        "No task that was asked can show a loss: the unquantized model is right too rarely; a server may not have read"
        " what it stored.",
    )
    assert not verdict.advice.startswith("Use it")


def test_a_loss_must_be_clear_by_the_test_of_signs_too() -> None:
    verdict = evaluation_verdict(asked(cell("gsm8k", -0.437, -0.25, -0.017, p_value=0.0625)))
    assert "none is shown" in verdict.findings[0] and "43.7 points is not excluded" in verdict.findings[1]


def test_losses_that_chance_would_show_are_counted() -> None:
    cells = [cell(f"task{index}", -0.03, 0.01, 0.05) for index in range(39)]
    assert "By chance 1 of 40 would look so." in evaluation_verdict(asked(LOST, *cells)).findings


def test_gains_alone_leave_no_loss_open() -> None:
    verdict = evaluation_verdict(asked(cell("recall", 0.02, 0.2, 0.38)))
    assert verdict.findings == ("1 task can show a loss, and none is shown.",) and verdict.advice == "Use it."


def test_what_was_skipped_or_has_no_direction_is_named() -> None:
    skipped = cell("gsm8k", 0.0, 0.0, 0.0, skipped=["profile", "fp8"], differences=[], flag="floor")
    skipped["results"] = skipped["results"][:1]
    verdict = evaluation_verdict(asked(skipped))
    assert verdict.findings[1] == "Skipped, as the unquantized model is right too rarely: gsm8k."
    assert "shorter --lengths" in verdict.advice
    verdict = evaluation_verdict(asked(KEPT, cell("perplexity", -0.1, 0.0, 0.1, measure="score")))
    assert verdict.findings[-1] == "Left out, as nothing says whether more is better: perplexity."


def test_likelihoods_alone_say_nothing_of_answers() -> None:
    verdict = evaluation_verdict(evaluation_of(make_profile(BASE)))
    assert "No task was asked" in verdict.findings[0] and "--levels recall,needle" in verdict.advice


def test_an_error_rate_that_rises_is_a_loss() -> None:
    (row,) = answer_differences(asked(cell("wmt", 1.0, 2.0, 3.0, p_value=0.01, measure="ter")))
    assert (row.mean, row.low, row.high) == (-2.0, -3.0, -1.0) and row.is_loss
