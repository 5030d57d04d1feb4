"""An evaluation: is the answer still right, beside the unquantized model and what else its bytes could be."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tqdm import tqdm

from kvtuner.calibration.corpus import Corpus, load_corpus
from kvtuner.calibration.model_loading import ModelShape, load_model, load_tokenizer, read_shape
from kvtuner.calibration.workbench import CalibrationOptions, Workbench
from kvtuner.errors import CorpusError, EndpointError, PrecisionError, RunFolderError
from kvtuner.evaluation.backends.local_backend import LocalBackend
from kvtuner.evaluation.backends.server_backend import server_backends
from kvtuner.evaluation.cache_scheme import REFERENCE, CacheScheme
from kvtuner.evaluation.scheme_registry import named_schemes
from kvtuner.evaluation.tasks.likelihood import Scoring, local_likelihood_cells, server_likelihood_cells
from kvtuner.evaluation.tasks.question_sets import (
    QUESTION_LEVELS,
    DrawOptions,
    QuestionSet,
    draw_question_sets,
    question_cells,
)
from kvtuner.evaluation.text_tokenizer import TextTokenizer
from kvtuner.exported_configs.profile.evaluation_record import (
    PROFILE_SCHEME,
    DataRecord,
    Evaluation,
    SchemeRecord,
    dump_evaluation,
    evaluation_path,
)
from kvtuner.pipeline.evaluation_options import AGAINST, EvalOptions
from kvtuner.pipeline.profile_files.model_fit import warn_of_mismatches
from kvtuner.pipeline.profile_lookup import profile_of, with_profile_defaults
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.provenance import result_command, result_provenance
from kvtuner.pipeline.sources import corpus_source, model_source, run_folder
from kvtuner.report.evaluation_report import sample_lines
from kvtuner.report.notebook_table import RecordTable, record_table
from kvtuner.run_folder import RunFolder, sha256_of, write_atomically
from kvtuner.runtime_loader.model_check import check_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvtuner.evaluation.backends.base import Backend
    from kvtuner.exported_configs.profile.evaluation_record import Cell, Level
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.sharing.profile_resolution import ResolvedProfile
    from kvtuner.read_plan_names import ReadPlanName

LENGTHS: Final = (128, 256, 512, 2048, 8192)
SAMPLES_FILE: Final = "samples.md"
SAMPLE_PROMPT: Final = 128
SAMPLE_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, repr=False)
class EvaluationResult:
    """A finished evaluation, its file beside the profile's, and the file of samples, if they were asked for."""

    profile: Profile
    evaluation: Evaluation
    file: Path
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
    """Evaluate a profile beside other schemes, and write the result beside it.

    Raises:
        KVTunerError: Options that do not fit the profile, its model or the servers.
    """
    command = result_command("eval", options)
    resolved = profile_of(options.profile)
    profile = resolved.profile
    check_writable(resolved)
    if not options.levels and options.lacks_likelihood:
        say(f"OpenAI's API gives no likelihoods without --endpoint {REFERENCE}=URL: the level likelihood is left out")
    work = _Work.prepare(with_profile_defaults(options, profile), profile)
    options = work.options
    folder = run_folder(options.model, options.out, f"eval-{profile.digest.removeprefix('sha256:')[:12]}")
    folder.create()
    backends, identity, cells = work.servers(folder) if work.urls else work.local(folder)
    cells += question_cells(work.question_sets, backends, folder, sha256_of(identity), work.seed)
    if options.tasks:
        cells += work.task_cells(backends, folder, sha256_of(identity))
    # Hashes stand in for the text: a result may be shared, the text may be private.
    hashes = work.corpus.hashes()
    evaluation = Evaluation(
        evaluation_version=1,
        profile_digest=profile.digest,
        model=work.shape.identity(
            model_source(options.model), backends[0].dtype or profile.model.dtype, work.tokenizer
        ),
        host=next(backend.record() for backend in backends if backend.name == PROFILE_SCHEME),
        data=DataRecord(
            corpus=corpus_source(options.data, options.model, work.shape, seed=work.seed).name,
            token_ids_sha256=hashes["report"],
            is_unseen=_is_unseen(profile, hashes),
        ),
        subjects=tuple(
            SchemeRecord(name=scheme.name, bytes_per_token=scheme.bytes_per_token or 0) for scheme in work.schemes
        ),
        cells=tuple(cells),
        making=result_provenance(command, options),
    )
    path = resolved.path
    if not resolved.is_own:  # the catalogue's and the cache's are as they came: a copy gets the evaluation
        path = folder.file(path.name)
        write_atomically(path, resolved.path.read_bytes())
    file = evaluation_path(path, evaluation)
    write_atomically(file, dump_evaluation(evaluation))
    samples = folder.file(SAMPLES_FILE) if "samples" in options.asked_levels else None
    if samples is not None:
        write_atomically(samples, "\n".join(work.samples(backends)))
    return EvaluationResult(profile, evaluation, file, samples)


def check_writable(resolved: ResolvedProfile) -> None:
    """Refuse a profile of the user's own with `RunFolderError` where no evaluation can be written beside it."""
    folder = resolved.path.parent
    if resolved.is_own and not os.access(folder, os.W_OK):
        raise RunFolderError(f"{folder} cannot be written, where the evaluation will stand; copy the profile")


def _is_unseen(profile: Profile, hashes: dict[str, str]) -> bool:
    record = profile.provenance.calibration
    # Two equal hashes mean the same text, cut alike: its report split took no part in the search.
    seen = record.token_ids_sha256 if record else None
    return seen is not None and (seen.calibrate, seen.select) == (hashes["calibrate"], hashes["select"])


@dataclass(frozen=True, slots=True)
class _Work:
    """All that an evaluation needs before a backend answers; the options with what the profile's search fills in.

    The unquantized scheme is first, where it is asked at all, then the profile. URLs of servers are by the name of
    the scheme; there are none for a model loaded here.
    """

    options: EvalOptions
    seed: int
    shape: ModelShape
    schemes: list[CacheScheme]
    urls: dict[str, str]
    tokenizer: PreTrainedTokenizerBase
    text: TextTokenizer
    corpus: Corpus
    question_sets: list[QuestionSet]

    @classmethod
    def prepare(cls, options: EvalOptions, profile: Profile) -> _Work:
        """Refuse what cannot be evaluated, before anything is loaded; then load tokenizer and text."""
        seed = options.seed or 0
        source = model_source(options.model)
        shape = read_shape(source)
        check_model(profile, shape.config, context_length=shape.context_length)
        schemes, urls = _schemes(options, profile, shape)
        searched: ReadPlanName = profile.quality.read_plan if profile.quality else "decode"
        options = replace(options, read_plan=None if urls else options.read_plan or searched)
        for scheme in schemes:
            scheme.cache(shape.config, options.read_plan or "decode", shape.context_length)  # refuses what it cannot
        tokenizer = load_tokenizer(source)
        model = shape.identity(source, profile.model.dtype, tokenizer)
        warn_of_mismatches(profile, model, shape.context_length)
        text = TextTokenizer(tokenizer)
        corpus = load_corpus(corpus_source(options.data, options.model, shape, seed=seed), tokenizer)
        filler = "\n".join(tokenizer.batch_decode(corpus.splits["report"].tolist(), skip_special_tokens=True))
        question_sets = _question_sets(options, text, filler, shape.context_length, seed)
        _check_tasks(options)
        return cls(options, seed, shape, schemes, urls, tokenizer, text, corpus, question_sets)

    def local(self, folder: RunFolder) -> tuple[Sequence[Backend], dict[str, Any], list[Cell]]:
        """The backends, what decides their answers besides questions and schemes, and their likelihoods."""
        options = self.options
        assert options.read_plan is not None
        how = CalibrationOptions(read_plan=options.read_plan, batch_size=options.number("batch_size"), seed=self.seed)
        bench = Workbench.prepare(load_model(model_source(options.model), self.shape), self.corpus, how)
        backends = [LocalBackend(bench.loaded, scheme, options.read_plan) for scheme in self.schemes]
        is_asked = "likelihood" in options.asked_levels
        return backends, bench.identity(), local_likelihood_cells(bench, self.schemes, folder) if is_asked else []

    def servers(self, folder: RunFolder) -> tuple[Sequence[Backend], dict[str, Any], list[Cell]]:
        options = self.options
        timeout = options.number("timeout")
        backends = server_backends(self.schemes, self.urls, options.api or "sglang", self.text, timeout)
        identity = {"model_config": self.shape.settings_sha256, "report_tokens": self.corpus.hashes()["report"]}
        if "likelihood" not in options.asked_levels:
            return backends, identity, []
        sequences = self.corpus.splits["report"][: options.number("scored_sequences")].tolist()
        scoring = Scoring(sequences, options.number("positions"), options.number("top_logprobs"), self.seed)
        return backends, identity, server_likelihood_cells(backends, scoring, folder, sha256_of(identity))

    def task_cells(self, backends: Sequence[Backend], folder: RunFolder, identity: str) -> list[Cell]:
        from kvtuner.evaluation.tasks.harness_model import HarnessModel
        from kvtuner.evaluation.tasks.harness_tasks import task_cells

        options, context_length = self.options, self.shape.context_length
        models = {
            backend.name: HarnessModel(backend, self.text, self.tokenizer, context_length, folder, identity)
            for backend in backends
        }
        return task_cells(
            models,
            backends,
            tasks=options.tasks or (),
            include_path=options.include_path,
            seed=self.seed,
            limit=options.limit,
            num_fewshot=options.num_fewshot,
            apply_chat_template=options.apply_chat_template,
        )

    def samples(self, backends: Sequence[Backend]) -> list[str]:
        """The continuations of some sequences by every scheme; the run folder keeps them, for they quote the text."""
        lines: list[str] = []
        prompts = self.corpus.splits["report"][: self.options.number("samples"), :SAMPLE_PROMPT].tolist()
        for prompt in tqdm(prompts, desc="samples", disable=None):
            texts = {backend.name: backend.continuation(prompt, SAMPLE_TOKENS) for backend in backends}
            lines += sample_lines(self.text.of(prompt), texts)
        return lines


def _schemes(options: EvalOptions, profile: Profile, shape: ModelShape) -> tuple[list[CacheScheme], dict[str, str]]:
    """The schemes in their order, and the URLs of their servers by name."""
    others = AGAINST if options.against is None else options.against
    names = [name for name, _ in options.endpoint] if options.endpoint else [REFERENCE, PROFILE_SCHEME, *others]
    if PROFILE_SCHEME not in names:
        raise EndpointError(f"none of the endpoints serves the profile; give --endpoint {PROFILE_SCHEME}=URL")
    names.sort(key=lambda name: (name != REFERENCE, name != PROFILE_SCHEME))
    schemes = named_schemes(names, shape, profile)
    if unstored := [scheme.name for scheme in schemes if not scheme.is_local]:
        raise PrecisionError(f"{unstored[0]} is no scheme to evaluate, such as fp8 or K8V8: nothing here stores it")
    urls = dict(options.endpoint or ())
    return schemes, {scheme.name: urls[name] for scheme, name in zip(schemes, names, strict=True) if urls}


def _question_sets(
    options: EvalOptions, text: TextTokenizer, filler: str, context_length: int, seed: int
) -> list[QuestionSet]:
    levels: list[Level] = [level for level in options.asked_levels if level in QUESTION_LEVELS]  # type: ignore[misc]  # checked by the parser
    lengths = options.lengths or tuple(length for length in LENGTHS if length < context_length - 64)
    # Arithmetic needs no length of its own.
    if not lengths and set(levels) & {"recall", "needle"}:
        raise CorpusError(f"a context of {context_length} tokens is too short for recall and needles; leave them out")
    how = DrawOptions(
        lengths=lengths,
        filler=filler,
        context_length=context_length,
        counts_positions=not options.endpoint,
        num_problems=options.number("problems"),
        num_questions=options.number("questions"),
        seed=seed,
    )
    return draw_question_sets(levels, text, how)


def _check_tasks(options: EvalOptions) -> None:
    """Check that tasks can be asked, before anything is loaded."""
    if not options.tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise CorpusError("--tasks needs lm-evaluation-harness; pip install 'kvtuner[eval]'")
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise CorpusError(f"--include-path {options.include_path} is no folder")
