"""A profile as text for a terminal, as facts for a program, and as a page. Knows nothing of files."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtuner.exported_configs.profile.profile import NO_TAIL_PAGES
from kvtuner.precision import tokens_per_gib
from kvtuner.report.evaluation_report import evaluation_context
from kvtuner.report.formatting import interval, printable
from kvtuner.report.layer_strip import profile_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evaluation_record import Evaluation
    from kvtuner.exported_configs.profile.layer_storage import KeyDefaults, ValueDefaults
    from kvtuner.exported_configs.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class ShownProfile:
    """A profile, the name of its file without folders, and the evaluations that stand beside it on a page."""

    name: str
    profile: Profile
    evaluations: tuple[Evaluation, ...] = ()


def summary(profile: Profile) -> dict[str, Any]:
    """The facts that a program reads."""
    stored = profile.bytes_per_token()
    return {
        "digest": profile.digest,
        "model": profile.model.id,
        "asked": profile.budget.asked,
        "mean_bits": float(profile.mean_bits),
        "effective_bits": round(float(profile.effective_bits), 6),
        "bytes_per_token": stored,
        "k_granularity": profile.defaults.k.granularity,
        "bf16_bytes_per_token": profile.to_geometry().bf16_bytes_per_token(),
        "tokens_per_gib": tokens_per_gib(stored),
        "layers": [
            asdict(row) | {"k_transform": profile.transform_name(row.layer, "k")} for row in profile_layers(profile)
        ],
        "quality": None if profile.quality is None else profile.quality.model_dump(mode="json"),
    }


def describe(profile: Profile) -> str:
    """Some lines about a profile; its layers are shown by the strip."""
    facts = summary(profile)
    lines = [
        f"model     {printable(profile.model.id)} ({printable(profile.model.architecture)})",
        f"digest    {profile.digest}",
        f"budget    {printable(profile.budget.asked)}: {facts['mean_bits']:.4g} mean bits,"
        f" {facts['effective_bits']:.4g} effective, {facts['bytes_per_token']:,} bytes per token",
        f"capacity  {facts['tokens_per_gib']:,} tokens per GiB, {ratio_to_bf16(profile):.2f}x of bf16",
        f"keys      {grid_text(profile.defaults.k)}",
        f"values    {grid_text(profile.defaults.v)}",
    ]
    if (quality := profile.quality) is not None:
        lines.append(
            f"quality   KL {interval(quality.measured_kl)} nats per token, top-1 {quality.top1_agreement:.2%},"
            f" perplexity {quality.perplexity:.4g} (bf16 {quality.reference_perplexity:.4g})"
        )
    return "\n".join(lines)


def profile_page(profiles: Sequence[ShownProfile]) -> str:
    """The page of one or several profiles, with an article for each."""
    from kvtuner.report.html_page import render  # brings matplotlib, which not every look needs

    return render(
        "profile.html",
        title=f"KV cache profile of {profiles[0].profile.model.id}",
        articles=[_article(shown) for shown in profiles],
        grid_text=grid_text,
        no_tail_pages=NO_TAIL_PAGES,
    )


def strip_html(profile: Profile) -> str:
    """The strip of layers with its legend and its style, as a notebook shows it."""
    from kvtuner.report.html_page import render

    return render("strip.html", layers=profile_layers(profile))


def ratio_to_bf16(profile: Profile) -> float:
    """The factor by which more tokens fit than in bf16."""
    return profile.to_geometry().bf16_bytes_per_token() / profile.bytes_per_token()


def grid_text(defaults: KeyDefaults | ValueDefaults) -> str:
    """The text on how quantized keys or values share scales."""
    unit = "tokens per scale of a channel" if defaults.granularity == "per_channel" else "channels per scale"
    text = f"{defaults.granularity.replace('_', ' ')}, {defaults.group_size} {unit}"
    return text + ", symmetric" * defaults.symmetric


def _article(shown: ShownProfile) -> dict[str, Any]:
    """The context of ``templates/profile.html`` for one profile, besides the profile itself."""
    from kvtuner.report.plots.kl_by_bits import profile_picture, profile_points

    profile, points = shown.profile, profile_points(shown.profile, "this profile")
    return {
        "name": shown.name,
        "profile": profile,
        "facts": summary(profile),
        "ratio": f"{ratio_to_bf16(profile):.2f}x",
        "layers": profile_layers(profile),
        "picture": profile_picture(points, {"first": "this profile"}) if points else None,
        "evaluations": [evaluation_context(evaluation, profile) for evaluation in shown.evaluations],
        "command": _serve_command(shown),
    }


def _serve_command(shown: ShownProfile) -> str:
    model = shown.profile.model
    revision = ["--revision", model.revision] if model.revision else []
    return shlex.join(["sglang", "serve", "--model-path", model.id, *revision, "--kvtuner-profile", shown.name])
