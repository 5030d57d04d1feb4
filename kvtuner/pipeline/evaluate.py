"""An evaluation: is the answer still right, beside the unquantized model and what else its bytes could be."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.model_loading import load_model
from kvtuner.calibration.workbench import CalibrationOptions, Workbench
from kvtuner.errors import CorpusError, EndpointError, RunFolderError
from kvtuner.evaluation.backends.base import TextTokenizer
from kvtuner.evaluation.backends.engine_backend import EngineBackend
from kvtuner.evaluation.backends.local_backend import LocalBackend
from kvtuner.evaluation.backends.server_backend import server_backends
from kvtuner.evaluation.tasks.likelihood import Scoring, local_likelihood_cells, server_likelihood_cells
from kvtuner.evaluation.tasks.question_sets import (
    QUESTION_LEVELS,
    DrawOptions,
    QuestionSet,
    draw_question_sets,
    question_cells,
)
from kvtuner.exported_configs.profile.evaluation_record import (
    PROFILE_SCHEME,
    DataRecord,
    Evaluation,
    SchemeRecord,
    dump_evaluation,
    evaluation_path,
)
from kvtuner.exported_configs.scheme_names import REFERENCE
from kvtuner.exported_configs.signing.profile_signature import signature_path
from kvtuner.pipeline.eval_bench_options import AGAINST, EvalOptions
from kvtuner.pipeline.profile_lookup import profile_of
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.provenance import result_command, result_provenance
from kvtuner.pipeline.published_files import copy_fetched
from kvtuner.pipeline.sources import ProfiledModel
from kvtuner.progress.bar import ProgressBar
from kvtuner.report.evaluation_report import evaluation_page, sample_lines
from kvtuner.report.table import RecordTable, record_table
from kvtuner.run_folder import sha256_of, write_atomically
from kvtuner.runtime_loader.window_attention import has_sinks
from kvtuner.supported_models import has_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.model_loading import LoadedModel
    from kvtuner.evaluation.backends.base import Backend
    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.exported_configs.profile.evaluation_record import Cell, Level
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.sharing.reference import ResolvedProfile
    from kvtuner.read_plan_names import ReadPlanName

LENGTHS: Final = (128, 256, 512, 2048, 8192)
SAMPLES_FILE: Final = "samples.md"
SAMPLE_PROMPT: Final = 128
SAMPLE_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, repr=False)
class EvaluationResult:
    """A finished evaluation, its file and page beside the profile's file, and the samples if those were asked for."""

    profile: Profile
    profile_file: Path
    evaluation: Evaluation
    file: Path
    page: Path
    samples: Path | None

    def __repr__(self) -> str:
        return f"EvaluationResult({str(self.file)!r}, {len(self.evaluation.cells)} cells, {self.profile!r})"

    @property
    def cells(self) -> RecordTable:
        """The results of every cell, a row for each scheme."""
        return record_table(
            {
                **cell.model_dump(mode="json", exclude={"results", "differences"}),
                **result.model_dump(mode="json"),
            }
            for cell in self.evaluation.cells
            for result in cell.results
        )


def run_evaluation(options: EvalOptions) -> EvaluationResult:
    """Evaluate a profile beside other schemes, and write the result beside it."""
    command = result_command("eval", options)
    resolved = profile_of(options.profile)
    check_writable(resolved)
    if not options.levels and options.lacks_likelihood:
        say(f"OpenAI's API gives no likelihoods without --endpoint {REFERENCE}=URL: the level likelihood is left out")
    if options.endpoint and PROFILE_SCHEME not in dict(options.endpoint):
        raise EndpointError(f"none of the endpoints serves the profile; give --endpoint {PROFILE_SCHEME}=URL")
    others = AGAINST if options.against is None else options.against
    model = ProfiledModel(options, resolved, names=[REFERENCE, PROFILE_SCHEME, *others], folder_prefix="eval")
    session = _EvaluationSession(model)
    model.folder.create()
    backends, cells = session.cells()
    path = resolved.path
    if not resolved.is_own:  # the catalogue's and the cache's are as they came: a copy gets the evaluation
        path = model.folder.file(path.name)
        copy_fetched(resolved, path, signature_path(path))
    evaluation = _evaluation(model, backends, cells, command)
    file = evaluation_path(path, evaluation)
    write_atomically(file, dump_evaluation(evaluation))
    page = file.with_suffix(".html")
    write_atomically(page, evaluation_page(evaluation, resolved.profile, path.name).encode(errors="replace"))
    samples = model.folder.file(SAMPLES_FILE) if "samples" in options.asked_levels else None
    if samples is not None:
        write_atomically(samples, "\n".join(session.samples(backends)))
    return EvaluationResult(resolved.profile, path, evaluation, file, page, samples)


def check_writable(resolved: ResolvedProfile) -> None:
    """Refuse a profile of the user's own with `RunFolderError` where no evaluation can be written beside it."""
    folder = resolved.path.parent
    if resolved.is_own and not os.access(folder, os.W_OK):
        raise RunFolderError(f"{folder} cannot be written, where the evaluation will stand; copy the profile")


def _evaluation(
    model: ProfiledModel[EvalOptions], backends: Sequence[Backend], cells: Sequence[Cell], command: Sequence[str]
) -> Evaluation:
    # Hashes stand in for the text: a result may be shared, the text may be private.
    hashes = model.corpus.hashes()
    record = model.profile.provenance.calibration
    # Two equal hashes mean the same text, cut alike: its report split took no part in the search.
    seen = record.token_ids_sha256 if record else None
    is_unseen = seen is not None and (seen.calibrate, seen.select) == (hashes["calibrate"], hashes["select"])
    return Evaluation(
        evaluation_version=1,
        profile_digest=model.profile.digest,
        model=model.shape.identity(model.source, backends[0].dtype or model.profile.model.dtype, model.tokenizer),
        host=next(backend.record() for backend in backends if backend.name == PROFILE_SCHEME),
        data=DataRecord(corpus=model.corpus_source.name, token_ids_sha256=hashes["report"], is_unseen=is_unseen),
        subjects=tuple(
            SchemeRecord(name=scheme.name, bytes_per_token=scheme.bytes_per_token or 0) for scheme in model.schemes
        ),
        cells=tuple(cells),
        making=result_provenance(command, model.options),
    )


class _EvaluationSession:
    """All that an evaluation needs before a backend answers; there is no read plan where servers have theirs."""

    def __init__(self, model: ProfiledModel[EvalOptions]) -> None:
        self._model, options, quality = model, model.options, model.profile.quality
        searched: ReadPlanName = quality.read_plan if quality else "decode"
        self._read_plan = None if model.urls else options.read_plan or searched
        for scheme in model.schemes:  # refuses what it cannot
            scheme.cache(model.shape.config, self._read_plan or "decode", model.shape.context_length)
        if model.urls:
            model.corpus.refuse_images("servers")
        if set(options.asked_levels) != {"likelihood"}:
            model.corpus.refuse_images("levels other than likelihood", "--levels likelihood, or --data of text")
        self._text = TextTokenizer(model.tokenizer)
        self._question_sets = _question_sets(model, self._text)
        _check_tasks(options)

    def cells(self) -> tuple[Sequence[Backend], list[Cell]]:
        """The backends, and all cells but samples."""
        model = self._model
        backends, facts, cells = self._servers() if model.urls else self._loaded()
        identity = sha256_of(facts)
        asks_all = model.options.all_questions
        cells += question_cells(
            self._question_sets, backends, model.folder, identity, asks_all=asks_all, seed=model.seed
        )
        if model.options.tasks:
            cells += self._task_cells(backends, identity)
        return backends, cells

    def samples(self, backends: Sequence[Backend]) -> list[str]:
        """The continuations of some sequences by every scheme; the run folder keeps them, for they quote the text."""
        lines: list[str] = []
        prompts = self._model.corpus.splits["report"][: self._model.options.number("samples"), :SAMPLE_PROMPT].tolist()
        for backend in backends:
            backend.prepare("continuation", [(prompt, SAMPLE_TOKENS) for prompt in prompts])
        for prompt in ProgressBar(prompts, desc="samples"):
            texts = {backend.name: backend.continuation(prompt, SAMPLE_TOKENS) for backend in backends}
            lines += sample_lines(self._text.of(prompt), texts)
        return lines

    def _loaded(self) -> tuple[Sequence[Backend], dict[str, Any], list[Cell]]:
        """The backends, what decides their answers besides questions and schemes, and their likelihoods."""
        model, options = self._model, self._model.options
        assert self._read_plan is not None
        batch_size = options.number("batch_size")
        settings = CalibrationOptions(read_plan=self._read_plan, batch_size=batch_size, seed=model.seed)
        bench = Workbench.prepare(load_model(model.source, model.shape), model.corpus, settings)
        backends = [_local_backend(bench.loaded, scheme, self._read_plan, options) for scheme in model.schemes]
        is_asked = "likelihood" in options.asked_levels
        cells = local_likelihood_cells(bench, model.schemes, model.folder) if is_asked else []
        return backends, bench.identity(), cells

    def _servers(self) -> tuple[Sequence[Backend], dict[str, Any], list[Cell]]:
        model, options = self._model, self._model.options
        backends = server_backends(
            model.schemes, model.urls, options.api or "sglang", self._text, options.number("timeout")
        )
        facts = {"model_config": model.shape.settings_sha256, "report_tokens": model.corpus.hashes()["report"]}
        if "likelihood" not in options.asked_levels:
            return backends, facts, []
        sequences = model.corpus.splits["report"][: options.number("scored_sequences")].tolist()
        scoring = Scoring(sequences, options.number("positions"), options.number("top_logprobs"), model.seed)
        return backends, facts, server_likelihood_cells(backends, scoring, model.folder, sha256_of(facts))

    def _task_cells(self, backends: Sequence[Backend], identity: str) -> list[Cell]:
        from kvtuner.evaluation.tasks.harness_model import HarnessModel
        from kvtuner.evaluation.tasks.harness_tasks import task_cells

        model, options = self._model, self._model.options
        models = {
            backend.name: HarnessModel(backend, self._text, model.shape.context_length, model.folder, identity)
            for backend in backends
        }
        return task_cells(
            models,
            backends,
            tasks=options.tasks or (),
            include_path=options.include_path,
            seed=model.seed,
            limit=options.limit,
            num_fewshot=options.num_fewshot,
            apply_chat_template=options.apply_chat_template,
        )


def _local_backend(loaded: LoadedModel, scheme: CacheScheme, read_plan: ReadPlanName, options: EvalOptions) -> Backend:
    """The engine, which stores a profile's rows or unquantized ones, or a transformers cache."""
    is_stored = scheme.profile is not None or scheme.name == REFERENCE
    if options.oracle or not is_stored:
        return LocalBackend(loaded, scheme, read_plan)
    if len({parameter.device for parameter in loaded.model.parameters()}) > 1:
        say(f"{scheme.name} answers by a transformers cache: the model lies on several devices")
        return LocalBackend(loaded, scheme, read_plan)
    geometry = loaded.shape.geometry
    is_full = geometry.layer_ids is None and not geometry.is_latent and not has_states(loaded.shape.config)
    is_text = loaded.shape.config.get_text_config(decoder=True) is loaded.shape.config
    if not is_full or not is_text or has_sinks(loaded.model):
        say(f"{scheme.name} answers by a transformers cache: the engine takes full layers of models of text, no sinks")
        return LocalBackend(loaded, scheme, read_plan)
    return EngineBackend(loaded, scheme, read_plan)


def _question_sets(model: ProfiledModel[EvalOptions], text: TextTokenizer) -> list[QuestionSet]:
    options, context_length = model.options, model.shape.context_length
    levels: list[Level] = [level for level in options.asked_levels if level in QUESTION_LEVELS]  # type: ignore[misc]  # checked by the parser
    lengths = options.lengths or tuple(length for length in LENGTHS if length < context_length - 64)
    # Arithmetic needs no length of its own.
    if not lengths and set(levels) & {"recall", "needle"}:
        raise CorpusError(f"a context of {context_length} tokens is too short for recall and needles; leave them out")
    sequences = model.corpus.splits["report"].tolist()
    draw = DrawOptions(
        lengths=lengths,
        filler="\n".join(model.tokenizer.batch_decode(sequences, skip_special_tokens=True)),
        context_length=context_length,
        counts_positions=not options.endpoint,
        num_problems=options.number("problems"),
        num_questions=options.number("questions"),
        seed=model.seed,
    )
    return draw_question_sets(levels, text, draw)


def _check_tasks(options: EvalOptions) -> None:
    """Check that tasks can be asked, before anything is loaded."""
    if not options.tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise CorpusError("--tasks needs lm-evaluation-harness; pip install 'kvtuner[eval]'")
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise CorpusError(f"--include-path {options.include_path} is no folder")
