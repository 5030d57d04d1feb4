"""The comparison of a profile's model with another one, by one table of rules. Knows nothing of files or servers.

Another geometry is refused before, by `Profile.check_model`: no flag allows it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.model_identity import DEMO, is_hub_id
from kvtuner.exported_configs.profile.records import ModelIdentity

Severity = Literal["info", "warning", "error"]
Difference = tuple[str, str, str]
"""The kind of a mismatch, the profile's value and the other one."""
NAMELESS: Final = (DEMO, "model", "unnamed")
"""The names that identify no model: the shipped one's, and those of profiles for any model."""
_COMMIT: Final = re.compile(r"[0-9a-f]{7,40}")
_FIELDS: Final = {
    "rope": "rope_sha256",
    "weights": "weight_quantization",
    "tokenizer": "tokenizer_sha256",
    "dtype": "dtype",
    "positions": "max_positions",
}


class IdentityRule(NamedTuple):
    """The consequence of one kind of mismatch; an error refuses the profile. The text has both values."""

    severity: Severity
    text: str
    advice: str = ""


_ANOTHER: Final = "use a profile that was searched for this model"
_ALLOW: Final = f"{_ANOTHER}, or allow a derived one by {{allow}}"
IDENTITY_RULES: Final[dict[str, IdentityRule]] = {
    "architecture": IdentityRule("error", "the profile of {id} is for {wanted}, but this model is {actual}", _ANOTHER),
    "configuration": IdentityRule(
        "error", "the profile of {id} is for configuration {wanted}, but {served} has {actual}", _ALLOW
    ),
    "fine-tune": IdentityRule(
        "error", "the profile is for {wanted}, but this model is {actual}, of the same configuration", _ALLOW
    ),
    "checkpoint": IdentityRule(
        "error",
        "the profile is for {wanted}, but this model's weights are others, {actual}, of the same configuration",
        _ALLOW,
    ),
    "name": IdentityRule(
        "warning",
        "the profile is for {wanted}, but this model is called {actual}, and nothing here tells whether it is the same",
        "make sure that it is, or measure it by {rescore}",
    ),
    "revision": IdentityRule(
        "warning",
        "the profile was searched on revision {wanted} of {id}, but this is {actual}",
        "take that revision, or measure this one by {rescore}",
    ),
    "rope": IdentityRule(
        "warning",
        "the profile's keys were measured under other rotations: by rotary parameters {wanted}, and this model has"
        " {actual}",
        "serve with those of the search, or search for the model as it is served",
    ),
    "context": IdentityRule(
        "warning",
        "the profile was calibrated over {wanted} positions, but the context here is {actual}: longer requests may"
        " lose accuracy",
        "search with --context-length {actual}, or serve with --context-length {wanted}",
    ),
    "weights": IdentityRule(
        "warning",
        "the profile was measured on weights with quantization {wanted}, but this model's have {actual}",
        "measure it on these by {rescore}, or search on them",
    ),
    "tokenizer": IdentityRule(
        "warning",
        "the profile was measured with tokenizer and chat template {wanted}, but this model has {actual}",
        "take the tokenizer of the search if scores are to be compared with the profile's",
    ),
    "dtype": IdentityRule("info", "the profile was measured in {wanted}, this model runs in {actual}"),
    "positions": IdentityRule("info", "the model had {wanted} positions when it was measured, and has {actual}"),
    "older": IdentityRule(
        "info",
        "the profile does not say in today's words which configuration it is for ({wanted} not recorded): made by hand"
        " or by an older kvtuner, it is compared by geometry and name alone",
        "search again for a profile that can be compared",
    ),
    "unrecorded": IdentityRule("info", "not recorded in the profile, and so not compared: {wanted}"),
    "unread": IdentityRule(
        "info",
        "this model's weights were not compared with those of the profile (checkpoint_sha256 {wanted}): no whole"
        " set of its safetensors files was found, or nobody has looked",
        "download the model first to have them compared",
    ),
}

DERIVED: Final = ("configuration", "fine-tune", "checkpoint")
"""The kinds of mismatch that are warnings where a derived model is allowed."""
_STRICT: Final = ("older", "unread")
"""The kinds that are errors where nothing may differ, as warnings are."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The strictness of the comparison, and the names of its flags and of the command that measures, for messages.

    A strict one makes every warning an error. A derived model is a fine-tune, or another configuration of one geometry.
    """

    strict: bool = False
    allow_derived: bool = False
    strict_flag: str = "--strict"
    allow_flag: str = "--allow-derived"
    rescore: str = "kvtuner eval PROFILE --model {served}"

    def __post_init__(self) -> None:
        if self.strict and self.allow_derived:
            raise ProfileError(
                f"{self.strict_flag} and {self.allow_flag} exclude each other: the one refuses what the other allows;"
                " drop one of them"
            )


class Mismatch(NamedTuple):
    """A difference of a kind in the table; its text is one line with both values and the advice."""

    kind: str
    severity: Severity
    text: str


def compare_models(
    wanted: ModelIdentity,
    actual: ModelIdentity,
    policy: Policy,
    *,
    positions: int | None = None,
    context_length: int | None = None,
) -> list[Mismatch]:
    """Compare the `wanted` model of a profile with one of its geometry; give the differences, the worst first.

    The context is compared where the profile was calibrated over some positions and the served length is known.
    """
    differences = list(_differences(wanted, actual))
    if positions is not None and context_length is not None and context_length > positions:
        differences.append(("context", f"{positions:d}", f"{context_length:d}"))
    rescore = policy.rescore.format(served=actual.id)
    names = {"id": wanted.id, "served": actual.id, "rescore": rescore, "allow": policy.allow_flag}
    mismatches = [_judged(kind, {"wanted": a, "actual": b, **names}, policy) for kind, a, b in differences]
    return sorted(mismatches, key=lambda mismatch: ("error", "warning", "info").index(mismatch.severity))


def is_same_configuration(a: ModelIdentity, b: ModelIdentity) -> bool | None:
    """Whether two recorded models have one network and the same rotations; None if only one is in today's words."""
    if (a.rope_sha256 is None) != (b.rope_sha256 is None):
        return None
    return (a.config_sha256, a.rope_sha256) == (b.config_sha256, b.rope_sha256)


def refuse(mismatches: Sequence[Mismatch]) -> None:
    """Raise the first error among mismatches as a `ProfileError`."""
    for mismatch in mismatches:
        if mismatch.severity == "error":
            raise ProfileError(mismatch.text)


def _judged(kind: str, values: dict[str, str], policy: Policy) -> Mismatch:
    severity, text, advice = IDENTITY_RULES[kind]
    if kind in DERIVED and policy.allow_derived:
        severity, advice = "warning", "allowed: {rescore} tells what that costs"
    elif policy.strict and (kind in _STRICT or severity == "warning"):
        severity, advice = "error", f"{advice}, or drop {policy.strict_flag}"
    return Mismatch(kind, severity, (f"{text}; {advice}" if advice else text).format_map(values))


def _differences(wanted: ModelIdentity, actual: ModelIdentity) -> Iterator[Difference]:
    is_comparable = wanted.rope_sha256 is not None and actual.rope_sha256 is not None
    if wanted.architecture != actual.architecture and not actual.architecture.endswith("Config"):
        yield "architecture", wanted.architecture, actual.architecture
    if is_comparable and wanted.config_sha256 != actual.config_sha256:
        yield "configuration", _short(wanted.config_sha256), _short(actual.config_sha256)
    elif difference := _name_difference(wanted, actual, is_comparable=is_comparable):
        yield difference
    missing = []
    for kind, field in _FIELDS.items():
        a, b = getattr(wanted, field), getattr(actual, field)
        if a is None and b is not None:
            missing.append(field)
        elif a is not None and b is not None and a != b:
            yield kind, _short(a), _short(b)
    if missing:
        yield "unrecorded" if is_comparable else "older", ", ".join(missing), ""
    if wanted.checkpoint_sha256 is not None and actual.checkpoint_sha256 is None:
        yield "unread", _short(wanted.checkpoint_sha256), ""


def _name_difference(wanted: ModelIdentity, actual: ModelIdentity, *, is_comparable: bool) -> Difference | None:
    is_same_checkpoint = _is_same_checkpoint(wanted, actual)
    if is_same_checkpoint:
        return None  # whatever it is called
    a, b = wanted.id.casefold(), actual.id.casefold()
    is_on_hub = is_hub_id(a) and is_hub_id(b)
    if is_on_hub and a != b:
        quantized = wanted.weight_quantization, actual.weight_quantization
        # Quantized checkpoints of a model have names of their own, and weights that tell nothing.
        is_quantized_apart = is_comparable and None not in quantized and quantized[0] != quantized[1]
        return "name" if is_quantized_apart else "fine-tune", wanted.id, actual.id
    if is_same_checkpoint is False and is_on_hub:
        a, b = (_with_weights(model.revision or "not recorded", model, "weights ") for model in (wanted, actual))
        return "revision", a, b
    if is_same_checkpoint is False:
        return "checkpoint", _with_weights(wanted.id, wanted), _with_weights(actual.id, actual)
    if a in NAMELESS or b in NAMELESS:
        # Without a recorded configuration, the line on older profiles covers the name too.
        is_unknown = not is_comparable or (a in NAMELESS and b in NAMELESS)
        return None if is_unknown else ("name", wanted.id, actual.id)
    if a.rpartition("/")[2] != b.rpartition("/")[2]:
        return "name", wanted.id, actual.id
    if not _is_other_revision(wanted, actual):
        return None
    if is_on_hub:
        return "revision", str(wanted.revision), str(actual.revision)
    return "name", f"{wanted.id}@{wanted.revision}", f"{actual.id}@{actual.revision}"


def _is_same_checkpoint(wanted: ModelIdentity, actual: ModelIdentity) -> bool | None:
    """Whether the weights are the same; None where nobody can tell: not recorded, or quantized on one side."""
    recorded = wanted.checkpoint_sha256, actual.checkpoint_sha256
    if None in recorded or wanted.weight_quantization != actual.weight_quantization:
        return None
    return recorded[0] == recorded[1]


def _with_weights(name: str, model: ModelIdentity, noun: str = "") -> str:
    return f"{name} ({noun}{_short(model.checkpoint_sha256 or '')})"


def _is_other_revision(wanted: ModelIdentity, actual: ModelIdentity) -> bool:
    """Whether revisions are recorded and differ; a branch beside a commit may be the same one."""
    a, b = wanted.revision, actual.revision
    if not a or not b:
        return False
    are_commits = [_COMMIT.fullmatch(revision) is not None for revision in (a, b)]
    if all(are_commits):
        return not (a.startswith(b) or b.startswith(a))
    return not any(are_commits) and a != b


def _short(value: str | int) -> str:
    text = str(value)
    return text[: len("sha256:") + 12] if text.startswith("sha256:") else text
