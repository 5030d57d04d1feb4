"""``kvtuner eval``: is the answer still right, beside the unquantized model and what else its bytes could be."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tqdm import tqdm

from kvtuner.calibration.corpus import load_corpus
from kvtuner.calibration.model_loading import load_model, load_tokenizer, read_shape
from kvtuner.calibration.workbench import CalibrationOptions, Workbench
from kvtuner.cli.parser import LEVELS
from kvtuner.cli.profile_command import command_said
from kvtuner.errors import CorpusError, EndpointError, PrecisionError, RunFolderError
from kvtuner.evaluation.backends.endpoint import Endpoint
from kvtuner.evaluation.backends.hosts import OfflineHost, ServedHost
from kvtuner.evaluation.backends.server_likelihood import Scoring
from kvtuner.evaluation.scheme import REFERENCE, named_schemes
from kvtuner.evaluation.tasks.answers import Examiner, accuracy_cell, make_exams
from kvtuner.evaluation.token_text import Text
from kvtuner.exported_configs.profile.evaluation_record import (
    PROFILE,
    DataRecord,
    Evaluation,
    SchemeRecord,
    dump_evaluation,
    evaluation_path,
)
from kvtuner.pipeline.defaults import EVALUATION
from kvtuner.pipeline.inputs import making, model_record, profile_of, take_from_profile, warn_of_mismatches
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.session import corpus_source, model_source, run_folder
from kvtuner.report.evaluation_report import evaluation_lines, sample_lines
from kvtuner.run_folder import sha256_of, write_atomically
from kvtuner.runtime_loader.model_check import check_model

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from kvtuner.calibration.corpus import Corpus
    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.evaluation.backends.hosts import EvaluationHost
    from kvtuner.evaluation.scheme import CacheScheme
    from kvtuner.evaluation.tasks.answers import Exam
    from kvtuner.exported_configs.profile.evaluation_record import Cell
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.run_folder import RunFolder

LENGTHS: Final = (128, 256, 512, 2048, 8192)
SAMPLES_FILE: Final = "samples.md"
SAMPLE_PROMPT: Final = 128
SAMPLE_TOKENS: Final = 64
_OF_SERVERS: Final = ("positions", "scored_sequences", "top_logprobs", "timeout")
_OF_TASKS: Final = ("include_path", "limit", "num_fewshot", "apply_chat_template")
_OF_LEVELS: Final[dict[str, tuple[str, ...]]] = {
    "problems": ("recall", "needle", "arithmetic"),
    "questions": ("recall", "needle", "arithmetic"),
    "samples": ("samples",),
    "batch_size": ("likelihood",),
    "positions": ("likelihood",),
    "scored_sequences": ("likelihood",),
    "top_logprobs": ("likelihood",),
}


def run(args: Namespace) -> int:
    """Run the sub-command."""
    made = evaluate(args)
    if args.json:
        print(json.dumps({"evaluation": str(made.file), **made.evaluation.model_dump(mode="json")}, indent=1))
        return 0
    print("\n".join(evaluation_lines(made.evaluation, made.profile)))
    say(f"\nwritten to {made.file}; `kvtuner show {made.file.parent}` shows it again")
    if made.samples is not None:
        say(f"what every way says after the same beginnings, side by side: {made.samples}")
    return 0


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What was made.

    Attributes:
        profile: that was evaluated.
        evaluation: of it.
        file: of the evaluation, beside the profile's.
        samples: file of what every way says, if that was asked for.
    """

    profile: Profile
    evaluation: Evaluation
    file: Path
    samples: Path | None


def evaluate(args: Namespace) -> EvaluationResult:
    """Make what the flags ask for."""
    said = command_said(args)
    found = profile_of(args.profile)
    path, profile = found.path, found.profile
    if found.is_own and not os.access(path.parent, os.W_OK):
        raise RunFolderError(f"{path.parent} cannot be written, where the evaluation will stand; copy the profile")
    _check_flags(args)
    take_from_profile(args, profile)
    args.read_plan = args.read_plan or (profile.quality.read_plan if profile.quality else "decode")
    shape = read_shape(model_source(args))
    check_model(profile, shape.config, context_length=shape.context_length)
    subjects = _subjects(args, profile, shape)
    for subject in subjects:
        subject.cache(shape.config, args.read_plan, shape.context_length)  # refuses before anything is loaded
    tokenizer = load_tokenizer(model_source(args))
    warn_of_mismatches(profile, model_record(args, shape, profile.model.dtype, tokenizer), shape.context_length)
    text = Text(tokenizer)
    corpus = load_corpus(corpus_source(args, shape), tokenizer)
    filler = "\n".join(tokenizer.batch_decode(corpus.splits["report"].tolist(), skip_special_tokens=True))
    exams = _exams(args, text, filler, shape.context_length)
    _check_tasks(args)
    folder = run_folder(args, f"eval-{profile.digest.removeprefix('sha256:')[:12]}")
    folder.create()
    host = _host(args, profile, shape, corpus, subjects, text)
    cells = host.likelihood(folder) if "likelihood" in args.levels else []
    cells += _questions(args, exams, host, folder)
    if args.tasks:
        cells += _tasks(args, host, folder, text, tokenizer, shape.context_length)
    evaluation = Evaluation(
        evaluation_version=1,
        profile_digest=profile.digest,
        model=model_record(args, shape, host.dtype or profile.model.dtype, tokenizer),
        host=host.record(),
        data=DataRecord(
            corpus=corpus_source(args, shape).name,
            token_ids_sha256=corpus.hashes()["report"],
            is_unseen=_is_unseen(profile, corpus.hashes()),
        ),
        subjects=tuple(SchemeRecord(name=each.name, bytes_per_token=each.bytes_per_token or 0) for each in subjects),
        cells=tuple(cells),
        making=making(said, args),
    )
    if not found.is_own:  # the catalogue's and the cache's are as they came: a copy gets the evaluation
        path = folder.file(path.name)
        write_atomically(path, found.path.read_bytes())
    file = evaluation_path(path, evaluation)
    write_atomically(file, dump_evaluation(evaluation))
    if "samples" not in args.levels:
        return EvaluationResult(profile, evaluation, file, None)
    samples = folder.file(SAMPLES_FILE)
    write_atomically(samples, "\n".join(_samples(args, host, text, corpus.splits["report"])))
    return EvaluationResult(profile, evaluation, file, samples)


def _check_flags(args: Namespace) -> None:
    """No flag is ignored: one that nothing would read is refused; then those that say nothing get their defaults.

    Raises:
        EndpointError: of servers without any, or of a model loaded here beside them.
        CorpusError: of a level or of tasks that are not asked for.
    """
    if args.endpoint is None:
        if args.api is not None:
            raise EndpointError("--api is how servers are spoken to; give --endpoint too")
        if (name := _first_given(args, _OF_SERVERS)) is not None:
            raise EndpointError(f"{_flag(name)} is for servers; give --endpoint too")
        args.levels = args.levels or LEVELS
        args.against = args.against or ("fp8", "K8V8")
    else:
        _refuse_flags_of_models(args)
        args.api = args.api or "sglang"
        args.levels = args.levels or _levels_of_servers(args)
    if not args.tasks and (name := _first_given(args, _OF_TASKS)) is not None:
        raise CorpusError(f"{_flag(name)} is for tasks of lm-evaluation-harness; give --tasks too, or leave it out")
    # A host that begins a context at any position puts no text before additions.
    lengths = ("recall", "needle", "arithmetic") if args.endpoint else ("recall", "needle")
    for name, levels in {**_OF_LEVELS, "lengths": lengths}.items():
        if getattr(args, name) is not None and not set(levels) & set(args.levels):
            raise CorpusError(f"{_flag(name)} is for --levels {' or '.join(levels)}; ask for that too, or leave it out")
    for name, usual in EVALUATION.items():
        if getattr(args, name) is None:
            setattr(args, name, usual)


def _refuse_flags_of_models(args: Namespace) -> None:
    if (name := _first_given(args, ("read_plan", "against"))) is not None:
        raise EndpointError(
            f"{_flag(name)} is for a model loaded here; what servers read was said when they were started, and other"
            " ways are other endpoints, such as fp8=URL"
        )
    given = ["batch_size"] if args.batch_size is not None else []
    given += [name for name in ("device", "dtype") if getattr(args, name) != "auto"]
    if given:
        raise EndpointError(
            f"{_flag(given[0])} is for a model loaded here, not for servers; leave out {_flag(given[0])} or --endpoint"
        )


def _first_given(args: Namespace, names: Sequence[str]) -> str | None:
    """Of flags that say nothing where they are None, or a switch that is off."""
    values = ((name, getattr(args, name)) for name in names)
    return next((name for name, value in values if value is not None and value is not False), None)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _levels_of_servers(args: Namespace) -> tuple[str, ...]:
    if args.api == "sglang" or REFERENCE in dict(args.endpoint):
        return LEVELS
    say(f"OpenAI's API gives no likelihoods without --endpoint {REFERENCE}=URL: the level likelihood is left out")
    return tuple(level for level in LEVELS if level != "likelihood")


def _is_unseen(profile: Profile, hashes: dict[str, str]) -> bool:
    record = profile.provenance.calibration
    seen = record.token_ids_sha256 if record else None
    return seen is not None and (seen.calibrate, seen.select) == (hashes["calibrate"], hashes["select"])


def _subjects(args: Namespace, profile: Profile, shape: ModelShape) -> list[CacheScheme]:
    """Ways to store the cache: unquantized first, where it is asked at all, then the profile.

    Raises:
        EndpointError: no server of the profile.
        PrecisionError: the same way twice.
    """
    names = [name for name, _ in args.endpoint] if args.endpoint else [REFERENCE, PROFILE, *args.against]
    if PROFILE not in names:
        raise EndpointError(f"none of the endpoints serves the profile; give --endpoint {PROFILE}=URL")
    names.sort(key=lambda name: (name != REFERENCE, name != PROFILE))
    schemes = named_schemes(names, shape, profile)
    if unstored := [scheme.name for scheme in schemes if not scheme.is_local]:
        raise PrecisionError(f"{unstored[0]} is no scheme to evaluate, such as fp8 or K8V8: nothing here stores it")
    return schemes


def _host(
    args: Namespace, profile: Profile, shape: ModelShape, corpus: Corpus, subjects: Sequence[CacheScheme], text: Text
) -> EvaluationHost:
    if args.endpoint:
        urls = dict(args.endpoint)
        endpoints = {
            subject.name: Endpoint(subject.name, urls[subject.name], args.api, text, args.timeout)
            for subject in subjects
        }
        identity = {"model_config": shape.settings_sha256, "report_tokens": corpus.hashes()["report"]}
        sequences = corpus.splits["report"][: args.scored_sequences].tolist()
        scoring = Scoring(sequences, args.positions, args.top_logprobs, args.seed)
        return ServedHost(endpoints, subjects, identity=identity, scoring=scoring)
    options = CalibrationOptions(read_plan=args.read_plan, batch_size=args.batch_size, seed=args.seed)
    return OfflineHost(Workbench.prepare(load_model(model_source(args), shape), corpus, options), subjects)


def _exams(args: Namespace, text: Text, filler: str, context_length: int) -> list[Exam]:
    levels = [level for level in args.levels if level in ("recall", "needle", "arithmetic")]
    lengths = args.lengths or tuple(length for length in LENGTHS if length < context_length - 64)
    if not lengths and set(levels) & {"recall", "needle"}:
        raise CorpusError(f"a context of {context_length} tokens is too short for recall and needles; leave them out")
    return make_exams(
        levels,
        lengths,
        text,
        filler,
        context_length=context_length,
        counts_positions=not args.endpoint,
        num_problems=args.problems,
        num_questions=args.questions,
        seed=args.seed,
    )


def _questions(args: Namespace, exams: Sequence[Exam], host: EvaluationHost, folder: RunFolder) -> list[Cell]:
    examiner = Examiner(folder, sha256_of(host.identity()), host.meters)
    cells = []
    total = sum(len(exam.problems) for exam in exams) * len(host.respondents)
    with tqdm(desc="questions", total=total, unit="problem", disable=None) as bar:
        for exam in exams:
            marked = {each.name: examiner.marks(exam, each, bar.update) for each in host.respondents}
            is_unread = host.is_unread({name: each.hits for name, each in marked.items()})
            cells.append(accuracy_cell(exam, marked, REFERENCE, seed=args.seed, is_unread=is_unread))
    return cells


def _check_tasks(args: Namespace) -> None:
    """Before anything is loaded.

    Raises:
        CorpusError: tasks without the harness, or a folder of them that is not there.
    """
    if not args.tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise CorpusError("--tasks needs lm-evaluation-harness; pip install 'kvtuner[eval]'")
    if args.include_path is not None and not Path(args.include_path).is_dir():
        raise CorpusError(f"--include-path {args.include_path} is no folder")


def _tasks(
    args: Namespace,
    host: EvaluationHost,
    folder: RunFolder,
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
) -> list[Cell]:
    from kvtuner.evaluation.tasks.harness_model import HarnessModel
    from kvtuner.evaluation.tasks.harness_tasks import TaskOptions, task_cells

    include = None if args.include_path is None else Path(args.include_path)
    options = TaskOptions(args.tasks, include, args.limit, args.num_fewshot, args.apply_chat_template)
    identity = sha256_of(host.identity())
    models = {
        taker.name: HarnessModel(taker, text, tokenizer, context_length, folder, identity) for taker in host.takers
    }
    return task_cells(models, options, REFERENCE, seed=args.seed, is_unread=host.is_unread)


def _samples(args: Namespace, host: EvaluationHost, text: Text, sequences: Tensor) -> list[str]:
    """What every way says after the beginnings of some sequences: kept in the run folder, for they are the user's."""
    lines: list[str] = []
    for prompt in tqdm(sequences[: args.samples, :SAMPLE_PROMPT].tolist(), desc="samples", disable=None):
        said = {each.name: each.continuation(prompt, SAMPLE_TOKENS) for each in host.respondents}
        lines += sample_lines(text.of(prompt), said)
    return lines
