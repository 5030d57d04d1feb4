"""A benchmark: servers under load, one scheme to store the cache after another, and the ablation's quality."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvtuner.bench.ablation import ABLATION
from kvtuner.bench.client import serving_client
from kvtuner.bench.server import ServerFlags
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME, Evaluation
from kvtuner.exported_configs.scheme_names import BEST_UNIFORM, FP8, REFERENCE
from kvtuner.pipeline.bench_session import BenchSession
from kvtuner.pipeline.eval_bench_options import BenchOptions, EvalOptions
from kvtuner.pipeline.evaluate import check_writable, run_evaluation
from kvtuner.pipeline.local.benched_engine import LocalBenchSession
from kvtuner.pipeline.profile_lookup import profile_of
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.provenance import result_command
from kvtuner.pipeline.sources import ProfiledModel
from kvtuner.pipeline.stages.best_uniform import best_uniform_scheme
from kvtuner.report.bench_report import write_bench_report
from kvtuner.report.bench_result import BenchResult

if TYPE_CHECKING:
    from pathlib import Path

    from kvtuner.exported_configs.sharing.reference import ResolvedProfile

PROFILES: Final = "ways"
QUALITY_LEVELS: Final = ("likelihood", "recall")


def benchmark(options: BenchOptions) -> tuple[BenchResult, Path]:
    """Benchmark a profile beside other schemes; returns the figures and the page of their report."""
    command = result_command("bench", options)
    if not options.local:
        serving_client()  # refused here where it is not installed
    resolved = profile_of(options.profile)
    flags = ServerFlags.parse(options.server_args)
    if options.ablation:
        check_writable(resolved)
    names, no_uniform = _asked_schemes(options, resolved)
    model = ProfiledModel(options, resolved, names=names, folder_prefix="bench")
    folder = model.folder
    folder.create()
    with folder.lock("bench.lock", waiting="another benchmark runs in this folder"):
        session = (LocalBenchSession if options.local else BenchSession)(model, flags)
        # Before the first server starts, so that a full disk is met before hours of work.
        served = session.served(folder.file(PROFILES))
        result = BenchResult(
            profile=model.profile,
            model=model.identity,
            schemes=tuple(
                session.measure(scheme, scheme_flags, f"{number}/{len(served)}")
                for number, (scheme, scheme_flags) in enumerate(served, start=1)
            ),
            evaluation=None,
            provenance=session.provenance(command),
            server_args=flags.shareable(),
            best_uniform=None if model.best_uniform is None else model.best_uniform.name,
            no_best_uniform=no_uniform,
        )
        page = write_bench_report(result, folder.path)
        # The report of speed is there even where the evaluation is interrupted.
        if options.ablation:
            result = replace(result, evaluation=_quality(model, resolved))
            page = write_bench_report(result, folder.path)
    return result, page


def _asked_schemes(options: BenchOptions, resolved: ResolvedProfile) -> tuple[list[str], str | None]:
    """The schemes to serve by name; and why the best uniform is not among them, where it would be by default."""
    if options.endpoint or options.against:
        return [REFERENCE, PROFILE_SCHEME, *(options.against or ())], None
    names = [PROFILE_SCHEME, *ABLATION] if options.ablation else [REFERENCE, PROFILE_SCHEME]
    names += [] if options.ablation or options.local else [FP8]  # the local engine stores no fp8
    try:
        best_uniform_scheme(resolved)
    except ProfileError as error:
        say(f"the best uniform of the search is not served: {error}")
        return names, str(error)
    return [*names, BEST_UNIFORM], None


def _quality(model: ProfiledModel[BenchOptions], resolved: ResolvedProfile) -> Evaluation:
    options = model.options
    others = tuple(
        BEST_UNIFORM if scheme is model.best_uniform else scheme.name
        for scheme in model.schemes
        if scheme.name not in (PROFILE_SCHEME, REFERENCE)
    )
    quality_options = EvalOptions(
        profile=str(resolved.path) if resolved.is_own else resolved.name,
        model=options.model,
        data=options.data,
        against=others,
        levels=options.levels or QUALITY_LEVELS,
        out=str(model.folder.file("quality")),
    )
    return run_evaluation(quality_options).evaluation
