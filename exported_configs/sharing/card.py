"""The card of a repository of profiles: metadata for the hub's search, and a summary for a person.

Knows nothing of hubs and files. All text of profiles goes through `_escape` or `_code`: a card is shown as HTML.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from kvtuner.errors import HubError
from kvtuner.exported_configs.profile.evaluation_record import PROFILE
from kvtuner.exported_configs.sharing.reference import PROFILE_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtuner.exported_configs.profile.evaluation_record import Cell, Evaluation
    from kvtuner.exported_configs.profile.profile import Profile

TAGS: Final = ("kv-cache", "kv-cache-quantization", "sglang", "kvtuner")
_SAFE: Final = str.maketrans({character: f"&#{ord(character)};" for character in "&<>|`[]*_"})
_LETTERS: Final = {2: "2", 4: "4", 8: "8", 16: "F"}


@dataclass(frozen=True, slots=True)
class CardProfile:
    """A profile of the repository.

    Attributes:
        file: The path of its file there.
        profile: The profile.
        evaluations: The evaluations of the profile.
    """

    file: str
    profile: Profile
    evaluations: Sequence[Evaluation] = ()


def card(repo: str, shown: Sequence[CardProfile], *, license_id: str, pictures: Sequence[str] = ()) -> str:
    """The README.md of a repository.

    Args:
        repo: The repository, ``owner/name``.
        shown: The profiles of the repository, all of one model.
        license_id: The license of the profiles, as the hub spells it.
        pictures: The paths of pictures in the repository.

    Raises:
        HubError: the profiles are of several models, or huggingface_hub is not installed.
    """
    models = {entry.profile.model.id for entry in shown}
    if len(models) != 1:
        raise HubError(f"one repository is for one model, not for {', '.join(sorted(models))}; push them one by one")
    parts = [_head(repo, shown[0].profile)]
    parts += [_profile(repo, entry) for entry in shown]
    if pictures:
        parts.append("## Pictures\n\n" + "\n\n".join(f"![{_escape(path)}]({quote(path)})" for path in pictures))
    return f"---\n{_metadata(shown, license_id)}---\n\n" + "\n\n".join(parts) + "\n"


def _metadata(shown: Sequence[CardProfile], license_id: str) -> str:
    try:
        from huggingface_hub import ModelCardData
    except ImportError as error:
        raise HubError("cards need huggingface_hub: pip install 'kvtuner[hub]'") from error
    model = shown[0].profile.model.id
    corpora = {entry.profile.provenance.calibration.corpus for entry in shown if entry.profile.provenance.calibration}
    datasets = sorted(name.partition("@")[0] for name in corpora if name.count("/") == 1)
    on_hub = "/" in model
    relation: dict[str, Any] = {"base_model_relation": "quantized"} if on_hub else {}
    data = ModelCardData(
        base_model=model if on_hub else None,
        library_name="kvtuner",
        license=license_id,
        tags=list(TAGS),
        datasets=datasets or None,
        **relation,
    )
    text: str = data.to_yaml(line_break="\n")
    return text if text.endswith("\n") else text + "\n"


def _head(repo: str, profile: Profile) -> str:
    return (
        f"# {_escape(repo)}\n\n"
        f"How the KV cache of {_code(profile.model.id)} is stored, layer by layer: profiles for"
        " [KVTuner](https://pypi.org/project/kvtuner/) and SGLang. There are no weights here; the license of the model"
        " is its own, and goes on to hold for it."
    )


def _profile(repo: str, shown: CardProfile) -> str:
    profile = shown.profile
    bf16 = profile.to_geometry().bf16_bytes_per_token()
    name = f"{repo}@COMMIT" + ("" if shown.file == PROFILE_FILE else f":{shown.file}")
    lines = [
        f"## {_code(shown.file)}",
        "",
        f"{profile.budget.mean_bits:.4g} bits per element ({profile.budget.effective_bits:.4g} with scales and"
        f" padding), {profile.bytes_per_token():,} bytes per token in place of {bf16:,} in 16 bit:"
        f" {bf16 / profile.bytes_per_token():.2f} times as many tokens.",
        "",
        f"    kvtuner pull {shlex.quote(name)}",
        f"    python -m sglang.launch_server --model-path {shlex.quote(profile.model.id)}"
        f" --kvtuner-profile {shlex.quote(name)}",
        "",
        f"Digest: {_code(profile.digest)}. Model revision: {_code(profile.model.revision or 'not recorded')}.",
        "",
        "Layers from the first to the last, bits of keys over bits of values (F: 16):",
        "",
        *strip(profile),
        "",
        *_quality(profile),
        *_origin(profile),
    ]
    for evaluation in shown.evaluations:
        lines += ["", *_evaluation(evaluation)]
    return "\n".join(lines)


def strip(profile: Profile, width: int = 64) -> list[str]:
    """Indented lines with one character for each layer, keys over values."""
    lines = []
    for first in range(0, len(profile.pairs), width):
        part = profile.pairs[first : first + width]
        lines.append(f"    K {''.join(_LETTERS[pair.k_bits] for pair in part)}  {first}-{first + len(part) - 1}")
        lines.append(f"    V {''.join(_LETTERS[pair.v_bits] for pair in part)}")
    return lines


def _quality(profile: Profile) -> list[str]:
    quality = profile.quality
    if quality is None:
        return ["Nothing was measured of this profile.", ""]
    kl, budget = quality.measured_kl, profile.budget
    rows = [("this profile", budget.mean_bits, budget.effective_bits, kl.mean, kl.low, kl.high)]
    rows += [(b.name, b.mean_bits, b.effective_bits, b.kl_mean, b.kl_low, b.kl_high) for b in quality.baselines]
    return [
        f"Measured on {quality.split_tokens:,} tokens that the search did not see, read plan {quality.read_plan};"
        f" the most likely token is the unquantized model's at {quality.top1_agreement:.2%} of them, perplexity"
        f" {quality.perplexity:.4g} against {quality.reference_perplexity:.4g}:",
        "",
        *_table(
            ("scheme", "bits", "with scales", "KL, nats per token", "95 % interval"),
            (
                (name, f"{bits:.4g}", f"{stored:.4g}", f"{mean:.3g}", f"{low:.3g} to {high:.3g}")
                for name, bits, stored, mean, low, high in rows
            ),
        ),
        "",
    ]


def _origin(profile: Profile) -> list[str]:
    provenance = profile.provenance
    if not provenance.command:
        return ["Written by hand, or imported: there was no search."]
    version, torch = _escape(provenance.kvtuner_version), _escape(provenance.libraries.torch)
    return [f"Made by kvtuner {version} with torch {torch}:", "", f"    {provenance.command}"]


def _evaluation(evaluation: Evaluation) -> list[str]:
    names = [subject.name for subject in evaluation.subjects]
    rows = [(_measure(cell), *_results(cell, names)) for cell in evaluation.cells]
    return [
        f"### Evaluated: {_escape(evaluation.host.kind)} on {_escape(evaluation.making.machine)}",
        "",
        f"    {evaluation.making.command}",
        "",
        *_table(("measure", *("this profile" if name == PROFILE else name for name in names)), rows),
    ]


def _measure(cell: Cell) -> str:
    place = cell.task or cell.level
    length = f", {cell.num_tokens:,} tokens" if cell.num_tokens else ""
    start = f" from position {cell.position:,}" if cell.position else ""
    flag = f" ({cell.flag}: tells schemes not apart)" if cell.flag else ""
    return f"{place}: {cell.measure.replace('_', ' ')}{length}{start}{flag}"


def _results(cell: Cell, names: Iterable[str]) -> list[str]:
    results: Mapping[str, str] = {
        result.subject: f"{result.mean:.4g} [{result.low:.3g}, {result.high:.3g}]" for result in cell.results
    }
    return [results.get(name, "") for name in names]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(_escape(cell) for cell in cells) + " |"

    return [line(head), "|" + " --- |" * len(head), *map(line, rows)]


def _escape(text: str) -> str:
    """Escape markup and the ends of cells."""
    return text.translate(_SAFE)


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`"
