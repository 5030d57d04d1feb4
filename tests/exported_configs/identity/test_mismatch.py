"""The table of what a profile is checked against: every row, its severity, its flag and its words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.mismatch import (
    DERIVED,
    IDENTITY_RULES,
    NAMELESS,
    Mismatch,
    Policy,
    compare_models,
    is_same_configuration,
    refuse,
)
from kvtuner.exported_configs.profile.records import ModelIdentity

A, B = ("sha256:" + letter * 64 for letter in "ab")
WANTED = ModelIdentity(
    id="Owner/Name",
    revision="c0ffee0c0ffee0",
    config_sha256=A,
    architecture="Qwen2ForCausalLM",
    dtype="bfloat16",
    rope_sha256=A,
    weight_quantization="none",
    tokenizer_sha256=A,
    max_positions=4096,
    checkpoint_sha256=None,
)
KNOWN = {"checkpoint_sha256": A}
OLDER = {"rope_sha256": None, "weight_quantization": None, "tokenizer_sha256": None, "max_positions": None}
DOCUMENTED = Path(__file__).parents[3] / "docs" / "serving.md"
SERVER = {"strict_flag": "--kvtuner-strict", "allow_flag": "--kvtuner-allow-derived"}

Outcome = tuple[str, str] | None
"""Kind and severity of the only mismatch, or none."""

ROWS: list[tuple[str, dict[str, Any], Outcome, Outcome, Outcome]] = [
    # what is found, by default, --strict, --allow-derived
    ("architecture", {"architecture": "LlamaForCausalLM"}, *[("architecture", "error")] * 3),
    ("no architecture", {"architecture": "Qwen2Config"}, None, None, None),
    ("configuration", {"config_sha256": B}, *[("configuration", "error")] * 2, ("configuration", "warning")),
    ("fine-tune", {"id": "Other/Name-Chat"}, *[("fine-tune", "error")] * 2, ("fine-tune", "warning")),
    ("another owner", {"id": "Other/Name"}, *[("fine-tune", "error")] * 2, ("fine-tune", "warning")),
    ("case", {"id": "owner/NAME"}, None, None, None),
    ("folder", {"id": "name", "revision": None}, None, None, None),
    ("other folder", {"id": "chat", "revision": None}, ("name", "warning"), ("name", "error"), ("name", "warning")),
    ("the demo", {"id": "demo", "revision": None}, ("name", "warning"), ("name", "error"), ("name", "warning")),
    ("a folder called model", {"id": "Model"}, ("name", "warning"), ("name", "error"), ("name", "warning")),
    (
        "revision",
        {"revision": "decade0decade0"},
        ("revision", "warning"),
        ("revision", "error"),
        ("revision", "warning"),
    ),
    ("a shorter commit", {"revision": "c0ffee0c"}, None, None, None),
    ("a branch", {"revision": "main"}, None, None, None),
    ("no revision", {"revision": None}, None, None, None),
    ("rope", {"rope_sha256": B}, ("rope", "warning"), ("rope", "error"), ("rope", "warning")),
    ("weights", {"weight_quantization": "awq"}, ("weights", "warning"), ("weights", "error"), ("weights", "warning")),
    ("tokenizer", {"tokenizer_sha256": B}, ("tokenizer", "warning"), ("tokenizer", "error"), ("tokenizer", "warning")),
    ("no tokenizer at hand", {"tokenizer_sha256": None}, None, None, None),
    ("dtype", {"dtype": "float32"}, *[("dtype", "info")] * 3),
    ("positions", {"max_positions": 8192}, *[("positions", "info")] * 3),
    ("the same", {}, None, None, None),
]


def other(identity: ModelIdentity = WANTED, **changes: Any) -> ModelIdentity:
    return ModelIdentity.model_validate({**identity.model_dump(), **changes})


def only(mismatches: list[Mismatch]) -> Outcome:
    assert len(mismatches) <= 1, mismatches
    return (mismatches[0].kind, mismatches[0].severity) if mismatches else None


@pytest.mark.parametrize(
    ("changes", "usual", "strict", "derived"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_a_row(changes: dict[str, Any], usual: Outcome, strict: Outcome, derived: Outcome) -> None:
    actual = other(**changes)
    assert only(compare_models(WANTED, actual, Policy())) == usual
    assert only(compare_models(WANTED, actual, Policy(strict=True))) == strict
    assert only(compare_models(WANTED, actual, Policy(allow_derived=True))) == derived
    refuse(compare_models(WANTED, actual, Policy(allow_derived=True))) if derived != ("architecture", "error") else None


def test_every_row_of_the_table_is_reached() -> None:
    rows = {outcome[0] for row in ROWS for outcome in row[2:] if outcome}
    assert rows | {"context", "older", "unrecorded", "checkpoint", "unread"} == set(IDENTITY_RULES)
    assert set(DERIVED) == {"configuration", "fine-tune", "checkpoint"}


@pytest.mark.parametrize(
    "changes",
    [{"id": "Other/Name-Chat", "revision": None}, {"id": "chat"}, {"id": "demo"}, {"revision": "decade0decade0"}, {}],
)
def test_the_same_weights_are_the_same_model_whatever_it_is_called(changes: dict[str, Any]) -> None:
    assert compare_models(other(**KNOWN), other(**KNOWN, **changes), Policy(strict=True)) == []


@pytest.mark.parametrize(
    ("changes", "kind", "severity"),
    [
        ({"id": "chat"}, "checkpoint", "error"),
        ({"id": "demo"}, "checkpoint", "error"),
        ({"id": "Other/Name-Chat"}, "fine-tune", "error"),
        ({"id": "name"}, "checkpoint", "error"),
        ({"id": "name", "revision": None}, "checkpoint", "error"),
        ({"revision": None}, "revision", "warning"),
        ({"id": "OWNER/name", "revision": "decade0decade0"}, "revision", "warning"),
        ({"weight_quantization": "awq"}, "weights", "warning"),
    ],
)
def test_other_weights_of_one_configuration_show(changes: dict[str, Any], kind: str, severity: str) -> None:
    actual = other(checkpoint_sha256=B, **changes)
    assert only(compare_models(other(**KNOWN), actual, Policy())) == (kind, severity)
    (line,) = compare_models(other(**KNOWN), actual, Policy(allow_derived=True))
    assert line.severity == "warning"
    if kind in ("checkpoint", "revision"):
        assert A[:19] in line.text and B[:19] in line.text
    only_recorded_here = compare_models(WANTED, other(**KNOWN, **changes), Policy())
    assert {mismatch.kind for mismatch in only_recorded_here}.isdisjoint(("checkpoint", "unread"))
    assert compare_models(other(actual, id="name"), other(**KNOWN, id="name"), Policy())[0].kind in (
        "checkpoint",
        "weights",
    )


@pytest.mark.parametrize("changes", [row[1] for row in ROWS if row[2]], ids=[row[0] for row in ROWS if row[2]])
def test_a_line_names_both_values_and_the_way_out(changes: dict[str, Any]) -> None:
    (line,) = (mismatch.text for mismatch in compare_models(WANTED, other(**changes), Policy(**SERVER)))
    for name, value in changes.items():
        if name != "revision" or value is not None:
            for shown in (str(value), str(getattr(WANTED, name))):
                assert (shown[:15] if shown.startswith("sha256:") else shown) in line
    assert "{" not in line
    assert "\n" not in line
    assert "; " in line or IDENTITY_RULES[compare_models(WANTED, other(**changes), Policy())[0].kind].severity == "info"


def test_errors_name_the_flag_that_allows_and_warnings_what_tells_the_cost() -> None:
    actual = other(id="Other/Chat")
    (error,) = compare_models(WANTED, actual, Policy(**SERVER))
    assert error.text == (
        "the profile is for Owner/Name, but this model is Other/Chat, of the same configuration; use a profile that was"
        " searched for this model, or allow a derived one by --kvtuner-allow-derived"
    )
    with pytest.raises(ProfileError, match="allow a derived one by --kvtuner-allow-derived"):
        refuse([error])
    (warning,) = compare_models(WANTED, actual, Policy(allow_derived=True))
    assert warning.text.endswith("; allowed: kvtuner eval PROFILE --model Other/Chat tells what that costs")
    refuse([warning])
    (here,) = compare_models(WANTED, actual, Policy(allow_derived=True, rescore="this evaluation"))
    assert here.text.endswith("; allowed: this evaluation tells what that costs")


def test_a_strict_error_says_which_flag_makes_it_one() -> None:
    (error,) = compare_models(WANTED, other(rope_sha256=B), Policy(strict=True, **SERVER))  # type: ignore[arg-type]
    assert error.text.endswith("or search for the model as it is served, or drop --kvtuner-strict")


def test_strict_and_allowing_exclude_each_other() -> None:
    with pytest.raises(ProfileError, match="--kvtuner-strict and --kvtuner-allow-derived exclude each other"):
        Policy(strict=True, allow_derived=True, **SERVER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("positions", "context", "is_warned"),
    [(256, 257, True), (256, 256, False), (256, 1, False), (None, 9999, False), (256, None, False)],
)
def test_a_context_beyond_the_calibration_is_warned_of(
    positions: int | None, context: int | None, is_warned: bool
) -> None:
    for policy, severity in ((Policy(), "warning"), (Policy(strict=True), "error")):
        mismatches = compare_models(WANTED, WANTED, policy, positions=positions, context_length=context)
        assert only(mismatches) == (("context", severity) if is_warned else None)
        assert not mismatches or "calibrated over 256 positions, but the context here is 257" in mismatches[0].text


def test_another_configuration_says_nothing_of_names_and_comes_first() -> None:
    actual = other(config_sha256=B, id="Other/Chat", revision="decade0decade0", rope_sha256=B, dtype="float16")
    kinds = [mismatch[:2] for mismatch in compare_models(WANTED, actual, Policy())]
    assert kinds == [("configuration", "error"), ("rope", "warning"), ("dtype", "info")]
    later = compare_models(WANTED, other(dtype="float16"), Policy(), positions=1, context_length=2)
    assert [mismatch.kind for mismatch in later] == ["context", "dtype"]
    architecture = compare_models(WANTED, other(actual, architecture="LlamaForCausalLM"), Policy(allow_derived=True))
    assert [mismatch.kind for mismatch in architecture][:2] == ["architecture", "configuration"]
    with pytest.raises(ProfileError, match="is for Qwen2ForCausalLM, but this model is LlamaForCausalLM"):
        refuse(architecture)


def test_a_fine_tune_has_revisions_of_its_own() -> None:
    actual = other(id="Other/Chat", revision="decade0decade0")
    assert only(compare_models(WANTED, actual, Policy(allow_derived=True))) == ("fine-tune", "warning")
    moved = other(id="name", revision="decade0decade0")
    (line,) = compare_models(WANTED, moved, Policy())
    assert line.kind == "name"  # a folder has no revisions of its own
    assert "is for Owner/Name@c0ffee0c0ffee0, but this model is called name@decade0decade0, and nothing" in line.text


@pytest.mark.parametrize("recorded", [{}, KNOWN])
def test_a_quantized_checkpoint_s_own_name_is_no_fine_tune(recorded: dict[str, Any]) -> None:
    awq = other(id="Owner/Name-AWQ", revision="decade0decade0", weight_quantization="awq", checkpoint_sha256=B)
    plain = other(**recorded)
    for wanted, actual in ((plain, awq), (awq, other(**KNOWN))):
        mismatches = compare_models(wanted, actual, Policy())
        assert [mismatch[:2] for mismatch in mismatches] == [("name", "warning"), ("weights", "warning")]
        refuse(mismatches)
        assert [mismatch.severity for mismatch in compare_models(wanted, actual, Policy(strict=True))] == ["error"] * 2
    folder = compare_models(plain, other(awq, id="name-awq"), Policy())
    assert [mismatch.kind for mismatch in folder] == ["name", "weights"]
    wider = compare_models(plain, other(awq, config_sha256=B), Policy())
    assert [mismatch[:2] for mismatch in wider] == [("configuration", "error"), ("weights", "warning")]


@pytest.mark.parametrize("unknown", [{"weight_quantization": None}, OLDER, {"weight_quantization": "none"}])
def test_another_name_is_a_fine_tune_where_no_other_quantization_is_known(unknown: dict[str, Any]) -> None:
    actual = other(id="Owner/Name-AWQ", weight_quantization=unknown.get("weight_quantization") or "awq")
    assert compare_models(other(**unknown), actual, Policy())[0][:2] == ("fine-tune", "error")
    half_older = other(rope_sha256=None)
    assert (
        compare_models(half_older, other(id="Owner/Name-AWQ", weight_quantization="awq"), Policy())[0].kind
        == "fine-tune"
    )


@pytest.mark.parametrize("changes", [{}, {"id": "name"}, {"revision": None}])
def test_weights_that_nobody_compared_are_said(changes: dict[str, Any]) -> None:
    wanted, actual = other(**KNOWN), other(**changes)
    (line,) = compare_models(wanted, actual, Policy())
    assert line[:2] == ("unread", "info")
    assert (
        "weights were not compared with those of the profile" in line.text
        and f"checkpoint_sha256 {A[:19]}" in line.text
    )
    assert line.text.endswith("; download the model first to have them compared")
    (strict,) = compare_models(wanted, actual, Policy(strict=True, **SERVER))  # type: ignore[arg-type]
    assert (strict.severity, strict.text) == ("error", f"{line.text}, or drop --kvtuner-strict")
    assert only(compare_models(wanted, actual, Policy(allow_derived=True))) == ("unread", "info")
    kinds = [
        mismatch.kind for mismatch in compare_models(wanted, other(id="chat", weight_quantization="awq"), Policy())
    ]
    assert kinds == ["name", "weights", "unread"]


@pytest.mark.parametrize("nameless", NAMELESS)
def test_a_name_that_says_nothing_is_warned_of_where_weights_say_nothing_either(nameless: str) -> None:
    for a, b in ((WANTED, other(id=nameless)), (other(id=nameless), WANTED), (other(id=nameless), other(id="folder"))):
        assert only(compare_models(a, b, Policy())) == ("name", "warning")
        assert only(compare_models(a, b, Policy(strict=True))) == ("name", "error")
        assert compare_models(other(a, **KNOWN), other(b, **KNOWN), Policy(strict=True)) == []
    for both in NAMELESS:
        assert compare_models(other(id=nameless), other(id=both), Policy(strict=True)) == []
    (line,) = compare_models(other(id=nameless, **OLDER), WANTED, Policy())
    assert line.kind == "older"  # which says that nothing is known


Cells = tuple[str, str, str]


def documented() -> dict[str, Cells]:
    """What the page's table says of each kind: by default, allowed and strict."""
    rows = re.findall(r"^\| `([a-z-]+)`: [^|]+\| (\w+) \| (\w+) \| (\w+) \|$", DOCUMENTED.read_text(), re.MULTILINE)
    assert len({row[0] for row in rows}) == len(rows)
    return {kind: cells for kind, *cells in ((row[0], *row[1:]) for row in rows)}  # type: ignore[misc]


REACHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{outcome[0]: ({}, changes) for _, changes, outcome, *_ in ROWS if outcome},
    "checkpoint": (KNOWN, {"id": "name", "checkpoint_sha256": B}),
    "context": ({}, {}),
    "older": (OLDER, {}),
    "unrecorded": ({"max_positions": None}, {}),
    "unread": (KNOWN, {}),
}


def test_the_documented_table_is_what_happens() -> None:
    words = {"error": "refused", "warning": "warning", "info": "logged"}
    happens = {"geometry": ["refused"] * 3}  # before anything here is asked
    for kind, (wanted, actual) in REACHED.items():
        served = {"positions": 1, "context_length": 2} if kind == "context" else {}
        policies = (Policy(), Policy(allow_derived=True), Policy(strict=True))
        lines = [compare_models(other(**wanted), other(**actual), policy, **served) for policy in policies]
        assert [line.kind for group in lines for line in group] == [kind] * 3
        happens[kind] = [words[line.severity] for group in lines for line in group]
    assert set(happens) == {"geometry", *IDENTITY_RULES}
    assert documented() == happens


def test_what_an_older_profile_does_not_record_is_one_line() -> None:
    older = other(config_sha256=B, **OLDER)
    (line,) = compare_models(older, WANTED, Policy())
    assert (line.kind, line.severity) == ("older", "info")
    assert "rope_sha256, weight_quantization, tokenizer_sha256, max_positions not recorded" in line.text
    assert only(compare_models(older, WANTED, Policy(strict=True))) == ("older", "error")
    assert only(compare_models(older, other(**OLDER, config_sha256=A), Policy())) is None
    assert compare_models(older, other(id="Other/Chat"), Policy())[0].kind == "fine-tune"
    assert compare_models(older, other(architecture="LlamaForCausalLM"), Policy())[0].severity == "error"


def test_one_field_that_is_not_recorded_is_no_error() -> None:
    partial = other(tokenizer_sha256=None, max_positions=None)
    for policy in (Policy(), Policy(strict=True)):
        (line,) = compare_models(partial, WANTED, policy)
        assert line == (
            "unrecorded",
            "info",
            "not recorded in the profile, and so not compared: tokenizer_sha256, max_positions",
        )
    assert compare_models(partial, other(tokenizer_sha256=None, max_positions=None), Policy()) == []


def test_braces_in_names_are_no_fields() -> None:
    (line,) = compare_models(other(id="{allow}/x{0}"), other(id="y{wanted}"), Policy())
    assert "{allow}/x{0}" in line.text
    assert "y{wanted}" in line.text


def test_whether_a_configuration_is_the_same_may_be_unknown() -> None:
    assert is_same_configuration(WANTED, other(id="x", dtype="float16")) is True
    assert is_same_configuration(WANTED, other(config_sha256=B)) is False
    assert is_same_configuration(WANTED, other(rope_sha256=B)) is False
    assert is_same_configuration(WANTED, other(config_sha256=B, **OLDER)) is None
    assert is_same_configuration(other(**OLDER), other(**OLDER)) is True
    assert is_same_configuration(other(**OLDER), other(**OLDER, config_sha256=B)) is False
