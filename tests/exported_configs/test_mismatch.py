"""The table of what a profile is checked against: every row, its severity, its flag and its words."""

from __future__ import annotations

from typing import Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.evidence import ModelIdentity
from kvtuner.exported_configs.mismatch import (
    DERIVED,
    TABLE,
    Mismatch,
    Policy,
    compare,
    is_same_configuration,
    refuse,
)

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
SERVER = {"strict_flag": "--kvtuner-strict", "allow_flag": "--kvtuner-allow-derived"}

Outcome = tuple[str, str] | None
"""Kind and severity of the only mismatch, or none."""

ROWS: list[tuple[str, dict[str, Any], Outcome, Outcome, Outcome]] = [
    # what is found, by default, --strict, --allow-derived
    ("architecture", {"architecture": "LlamaForCausalLM"}, *[("architecture", "error")] * 3),
    ("no architecture", {"architecture": "Qwen2Config"}, None, None, None),
    (
        "configuration",
        {"config_sha256": B},
        *[("configuration", "error")] * 2,
        ("configuration", "warning"),
    ),
    (
        "fine-tune",
        {"id": "Other/Name-Chat"},
        *[("fine-tune", "error")] * 2,
        ("fine-tune", "warning"),
    ),
    ("another owner", {"id": "Other/Name"}, *[("fine-tune", "error")] * 2, ("fine-tune", "warning")),
    ("case", {"id": "owner/NAME"}, None, None, None),
    ("folder", {"id": "name", "revision": None}, None, None, None),
    ("other folder", {"id": "chat", "revision": None}, ("name", "warning"), ("name", "error"), ("name", "warning")),
    ("the demo", {"id": "demo", "revision": None}, None, None, None),
    ("made for what is served", {"id": "model", "revision": None}, None, None, None),
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
    found = other(**changes)
    assert only(compare(WANTED, found, Policy())) == usual
    assert only(compare(WANTED, found, Policy(strict=True))) == strict
    assert only(compare(WANTED, found, Policy(allow_derived=True))) == derived
    refuse(compare(WANTED, found, Policy(allow_derived=True))) if derived != ("architecture", "error") else None


def test_every_row_of_the_table_is_reached() -> None:
    rows = {outcome[0] for row in ROWS for outcome in row[2:] if outcome}
    assert rows | {"context", "older", "unrecorded", "checkpoint"} == set(TABLE)
    assert set(DERIVED) == {"configuration", "fine-tune", "checkpoint"}


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "Other/Name-Chat", "revision": None},
        {"id": "chat"},
        {"id": "demo"},
        {"revision": "decade0decade0"},
        {},
    ],
)
def test_the_same_weights_are_the_same_model_whatever_it_is_called(changes: dict[str, Any]) -> None:
    assert compare(other(**KNOWN), other(**KNOWN, **changes), Policy(strict=True)) == []


@pytest.mark.parametrize(
    ("changes", "kind", "severity"),
    [
        ({"id": "chat"}, "checkpoint", "error"),
        ({"id": "demo"}, "checkpoint", "error"),
        ({"id": "Other/Name-Chat"}, "fine-tune", "error"),
        ({"id": "name"}, "revision", "warning"),
        ({"revision": None}, "revision", "warning"),
        ({"weight_quantization": "awq"}, "weights", "warning"),
    ],
)
def test_other_weights_of_one_configuration_show(changes: dict[str, Any], kind: str, severity: str) -> None:
    found = other(checkpoint_sha256=B, **changes)
    assert only(compare(other(**KNOWN), found, Policy())) == (kind, severity)
    (line,) = compare(other(**KNOWN), found, Policy(allow_derived=True))
    assert line.severity == "warning"
    if kind in ("checkpoint", "revision"):
        assert A[:19] in line.text and B[:19] in line.text
    only_recorded_here = compare(WANTED, other(**KNOWN, **changes), Policy())
    assert all(each.kind != "checkpoint" for each in only_recorded_here)


@pytest.mark.parametrize("changes", [row[1] for row in ROWS if row[2]], ids=[row[0] for row in ROWS if row[2]])
def test_a_line_names_both_values_and_the_way_out(changes: dict[str, Any]) -> None:
    (line,) = (each.text for each in compare(WANTED, other(**changes), Policy(**SERVER)))
    for name, value in changes.items():
        if name != "revision" or value is not None:
            for shown in (str(value), str(getattr(WANTED, name))):
                assert (shown[:15] if shown.startswith("sha256:") else shown) in line
    assert "{" not in line
    assert "\n" not in line
    assert "; " in line or TABLE[compare(WANTED, other(**changes), Policy())[0].kind].severity == "info"


def test_errors_name_the_flag_that_allows_and_warnings_what_tells_the_cost() -> None:
    found = other(id="Other/Chat")
    (error,) = compare(WANTED, found, Policy(**SERVER))
    assert error.text == (
        "the profile is for Owner/Name, but this model is Other/Chat, of the same configuration; use a profile that was"
        " searched for this model, or allow a derived one by --kvtuner-allow-derived"
    )
    with pytest.raises(ProfileError, match="allow a derived one by --kvtuner-allow-derived"):
        refuse([error])
    (warning,) = compare(WANTED, found, Policy(allow_derived=True))
    assert warning.text.endswith("; allowed: `kvtuner eval PROFILE --model Other/Chat` tells what that costs")
    refuse([warning])
    (here,) = compare(WANTED, found, Policy(allow_derived=True, rescore="this evaluation"))
    assert here.text.endswith("; allowed: this evaluation tells what that costs")


def test_a_strict_error_says_which_flag_makes_it_one() -> None:
    (error,) = compare(WANTED, other(rope_sha256=B), Policy(strict=True, **SERVER))  # type: ignore[arg-type]
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
        found = compare(WANTED, WANTED, policy, positions=positions, context_length=context)
        assert only(found) == (("context", severity) if is_warned else None)
        assert not found or "calibrated over 256 positions, but the context here is 257" in found[0].text


def test_another_configuration_says_nothing_of_names_and_comes_first() -> None:
    found = other(config_sha256=B, id="Other/Chat", revision="decade0decade0", rope_sha256=B, dtype="float16")
    kinds = [(each.kind, each.severity) for each in compare(WANTED, found, Policy())]
    assert kinds == [("configuration", "error"), ("rope", "warning"), ("dtype", "info")]
    later = compare(WANTED, other(dtype="float16"), Policy(), positions=1, context_length=2)
    assert [each.kind for each in later] == ["context", "dtype"]
    architecture = compare(WANTED, other(found, architecture="LlamaForCausalLM"), Policy(allow_derived=True))
    assert [each.kind for each in architecture][:2] == ["architecture", "configuration"]
    with pytest.raises(ProfileError, match="is for Qwen2ForCausalLM, but this model is LlamaForCausalLM"):
        refuse(architecture)


def test_a_fine_tune_has_revisions_of_its_own() -> None:
    found = other(id="Other/Chat", revision="decade0decade0")
    assert only(compare(WANTED, found, Policy(allow_derived=True))) == ("fine-tune", "warning")
    moved = other(id="name", revision="decade0decade0")
    assert only(compare(WANTED, moved, Policy())) == ("revision", "warning")


def test_what_an_older_profile_does_not_record_is_one_line() -> None:
    older = other(config_sha256=B, **OLDER)
    (line,) = compare(older, WANTED, Policy())
    assert (line.kind, line.severity) == ("older", "info")
    assert "rope_sha256, weight_quantization, tokenizer_sha256, max_positions not recorded" in line.text
    assert only(compare(older, WANTED, Policy(strict=True))) == ("older", "error")
    assert only(compare(older, other(**OLDER, config_sha256=A), Policy())) is None
    assert compare(older, other(id="Other/Chat"), Policy())[0].kind == "fine-tune"
    assert compare(older, other(architecture="LlamaForCausalLM"), Policy())[0].severity == "error"


def test_one_field_that_is_not_recorded_is_no_error() -> None:
    partial = other(tokenizer_sha256=None, max_positions=None)
    for policy in (Policy(), Policy(strict=True)):
        (line,) = compare(partial, WANTED, policy)
        assert line == (
            "unrecorded",
            "info",
            "not recorded in the profile, and so not compared: tokenizer_sha256, max_positions",
        )
    assert compare(partial, other(tokenizer_sha256=None, max_positions=None), Policy()) == []


def test_braces_in_names_are_no_fields() -> None:
    (line,) = compare(other(id="{allow}/x{0}"), other(id="y{wanted}"), Policy())
    assert "{allow}/x{0}" in line.text
    assert "y{wanted}" in line.text


def test_whether_a_configuration_is_the_same_may_be_unknown() -> None:
    assert is_same_configuration(WANTED, other(id="x", dtype="float16")) is True
    assert is_same_configuration(WANTED, other(config_sha256=B)) is False
    assert is_same_configuration(WANTED, other(rope_sha256=B)) is False
    assert is_same_configuration(WANTED, other(config_sha256=B, **OLDER)) is None
    assert is_same_configuration(other(**OLDER), other(**OLDER)) is True
    assert is_same_configuration(other(**OLDER), other(**OLDER, config_sha256=B)) is False
