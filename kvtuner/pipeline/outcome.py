"""What a finished search leaves behind: validation, the uniform override, and the order in which files are written."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.scheme import CacheScheme, Fp8Scheme, UnquantizedScheme
from kvtuner.evaluation.validation import OFFSETS, UNIFORM_PAIRS, Validator, kl_difference, pooled
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.run_profile import make_profile, stored_quality
from kvtuner.pipeline.run_report import make_report_data
from kvtuner.pipeline.session import ranks_of, row_shape, say_left_out
from kvtuner.pipeline.targets import bind_target
from kvtuner.report.search_data import DATA_FILE
from kvtuner.report.search_report import summary_json, write_report
from kvtuner.report.search_rows import Terms, quality_of
from kvtuner.run_folder import RunFolder, write_atomically
from kvtuner.search_spaces.space import uniform
from kvtuner.search_spaces.written_layers import parse_keep
from kvtuner.tuner.objective import describe, layer_specs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.calibration.batches import Offsets
    from kvtuner.pipeline.session import Measured, SearchOutcome, SearchRun
    from kvtuner.pipeline.targets import SearchTarget
    from kvtuner.report.search_data import OffsetQuality, ReportData
    from kvtuner.search_spaces.space import LayerChoice

HAND_WRITTEN = "hand-written"


def finish(
    run: SearchRun, target: SearchTarget, found: SearchOutcome, validator: Validator
) -> tuple[ReportData, dict[str, Any]]:
    """Validate, write the profile and the report.

    Args:
        run: the run.
        target: what was asked for.
        found: what the search found.
        validator: measures on the report split.
    """
    reference, *baselines = _schemes(run)
    measured = _measure_all(run, validator, [reference, _winner(run, found)], baselines)
    schemes = [reference, *(baseline for baseline in baselines if baseline.key in measured)]
    found = _overridden(run, found, schemes, measured)
    winner = _winner(run, found)
    measured.update(_measure_all(run, validator, [winner], []))
    quality = _quality(run, found, winner, schemes, measured)
    profile = make_profile(run, found, stored_quality(run, found, winner, schemes, measured, quality[0].baselines))
    folder = RunFolder(run.folder.file(f"report{target.suffix}")) if target.suffix else run.folder
    profile_file = run.folder.file(target.profile_file)
    bind_target(run.folder, target)
    write_atomically(profile_file, dump_profile(profile))
    data = make_report_data(run, found, profile, quality)
    folder.create()
    folder.write_checked(DATA_FILE, data.to_json())
    page = str(write_report(data, folder.path)) if run.args.report else None
    run.folder.log("profile", file=profile_file.name, digest=profile.digest, asked=found.asked)
    result = {
        "profile": str(profile_file),
        "report": page,
        "digest": profile.digest,
        "forward_passes": {phase: round(passes, 2) for phase, passes in run.phases.passes.items()},
        **summary_json(data),
    }
    return data, result


def _schemes(run: SearchRun) -> list[CacheScheme]:
    """The unquantized model, uniforms without and with transforms, fp8."""
    rows, score = row_shape(run.args, run.shape), run.args.score
    found: list[CacheScheme] = [UnquantizedScheme.of(run.shape.geometry)]
    for transforms in (False, True):
        for pair in UNIFORM_PAIRS:
            configuration = uniform(run.table, pair, score, rows, transforms=transforms)
            if transforms and all(c.k_transform == c.v_transform == "none" for c in configuration):
                continue
            found.append(_scheme(run, str(pair), configuration, transforms=transforms))
    return [*found, Fp8Scheme.of(run.shape.geometry)]


def _scheme(run: SearchRun, name: str, configuration: Sequence[LayerChoice], *, transforms: bool) -> CacheScheme:
    return CacheScheme(
        name=name,
        has_transforms=transforms,
        rows=row_shape(run.args, run.shape),
        pairs=tuple(choice.pair for choice in configuration),
        specs=layer_specs(configuration, run.table, run.bench.options.quant),
        key=describe(configuration),
    )


def _winner(run: SearchRun, found: SearchOutcome) -> CacheScheme:
    name = found.uniform_name or (HAND_WRITTEN if found.study is None else found.asked)
    transforms = found.uniform_name is not None and found.has_transforms
    return _scheme(run, name, found.configuration, transforms=transforms)


def _measure_all(
    run: SearchRun, validator: Validator, needed: Sequence[CacheScheme], others: Sequence[CacheScheme]
) -> dict[str, Measured]:
    """Results by key of scheme, without those of `others` whose KL is not finite, which it says."""
    measured: dict[str, Measured] = {scheme.key: {} for scheme in (*needed, *others)}
    jobs = [(scheme, offsets) for offsets in OFFSETS for scheme in (*needed, *others)]
    for scheme, offsets in tqdm(jobs, desc="validation", disable=None):
        if scheme.key in measured:
            try:
                measured[scheme.key][offsets] = validator.measure(scheme, offsets)
            except NonFiniteActivationError as error:
                if any(scheme.key == other.key for other in needed):
                    raise
                say_left_out(run, scheme.name, str(error))
                del measured[scheme.key]
    return measured


def _overridden(
    run: SearchRun, found: SearchOutcome, schemes: Sequence[CacheScheme], measured: Mapping[str, Measured]
) -> SearchOutcome:
    """The best uniform inside the budget instead of the winner, if the paired interval excludes zero.

    Layers that are kept stay as they are, and so does a nested family.
    """
    winner = _winner(run, found)
    ours = pooled(list(measured[winner.key].values()))
    keep = parse_keep(run.args.keep) if run.args.keep else {}
    uniforms = set(map(str, UNIFORM_PAIRS))
    allowed = [
        c
        for c in schemes
        if c.name in uniforms and found.fits(c) and all(c.pairs[layer] == pair for layer, pair in keep.items())
    ]
    if found.study is None or run.args.nested or not allowed:
        return found
    rival = min(allowed, key=lambda c: sum(pooled(list(measured[c.key].values())).kl))
    if kl_difference(ours, pooled(list(measured[rival.key].values())), run.args.seed).low <= 0:
        return found
    words = f"{rival.name} with transforms" if rival.has_transforms else rival.name
    say(f"uniform {words} beats the searched configuration on the report split and takes its place")
    run.folder.log("override", asked=found.asked, uniform=words)
    configuration = uniform(
        run.table, rival.pairs[0], run.args.score, row_shape(run.args, run.shape), transforms=rival.has_transforms
    )
    measured_kl = found.uniform_kl.get(rival.pairs[0]) if rival.has_transforms else None
    return replace(found, configuration=configuration, measured_kl=measured_kl, uniform_name=rival.name)


def _quality(
    run: SearchRun,
    found: SearchOutcome,
    winner: CacheScheme,
    schemes: Sequence[CacheScheme],
    measured: Mapping[str, Measured],
) -> tuple[OffsetQuality, ...]:
    tokens, context = run.bench.corpus.splits["report"].shape[1], run.shape.context_length
    reference, *baselines = schemes
    terms = Terms(ranks_of(run.args, run.shape), found.fits, run.args.seed)
    positions: dict[Offsets, str] = {
        "small": f"0 to {tokens - 1}",
        "large": f"{max(0, context - tokens)} to {max(context, tokens) - 1}",
    }
    return tuple(
        quality_of(
            offsets,
            positions[offsets],
            (winner, measured[winner.key][offsets]),
            [(baseline, measured[baseline.key][offsets]) for baseline in baselines],
            measured[reference.key][offsets],
            terms=terms,
        )
        for offsets in OFFSETS
    )
