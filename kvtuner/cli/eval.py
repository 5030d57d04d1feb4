"""``kvtuner eval``: is the answer still right, beside the unquantized model and what else its bytes could be."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tqdm import tqdm

from kvtuner import __version__
from kvtuner.calibration.calibrate import CalibrationOptions, Workbench
from kvtuner.calibration.corpus import load_corpus
from kvtuner.calibration.model import load_model, load_tokenizer, read_shape
from kvtuner.calibration.naming import public_name
from kvtuner.cli.parser import LEVELS, build_parser
from kvtuner.cli.session import corpus_source, model_source, run_folder, say
from kvtuner.cli.show import profile_files
from kvtuner.errors import CorpusError, EndpointError, PrecisionError, ProfileError, RunFolderError
from kvtuner.evaluation.answers import Examiner, accuracy_cell, make_exams
from kvtuner.evaluation.endpoint import Endpoint
from kvtuner.evaluation.evaluation_text import evaluation_lines, sample_lines
from kvtuner.evaluation.hosts import OfflineHost, ServedHost
from kvtuner.evaluation.offline import Offline
from kvtuner.evaluation.subjects import REFERENCE, named, of_profile
from kvtuner.evaluation.text import Text
from kvtuner.exported_configs.evaluation import (
    PROFILE,
    Data,
    Evaluation,
    Making,
    dump_evaluation,
    evaluation_path,
)
from kvtuner.exported_configs.evaluation import Subject as SubjectRecord
from kvtuner.exported_configs.evidence import ModelIdentity
from kvtuner.exported_configs.load import load_profile
from kvtuner.run_folder import sha256_of, write_atomically
from kvtuner.runtime_loader.model_check import check_model

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from kvtuner.calibration.corpus import Corpus
    from kvtuner.calibration.model import ModelShape
    from kvtuner.evaluation.answers import Exam
    from kvtuner.evaluation.hosts import EvaluationHost
    from kvtuner.evaluation.subjects import Subject
    from kvtuner.exported_configs.evaluation import Cell
    from kvtuner.exported_configs.profile import Profile
    from kvtuner.run_folder import RunFolder

LENGTHS: Final = (128, 256, 512, 2048, 8192)
SAMPLES_FILE: Final = "samples.md"
SAMPLE_PROMPT: Final = 128
SAMPLE_TOKENS: Final = 64
MAX_SEED: Final = 2**31
_PATHS: Final = ("profile", "model", "data", "include_path")
_UNSAID: Final = ("command", "json", "debug", "out", "endpoint")


def run(args: Namespace) -> int:
    """Run the sub-command."""
    given = _said(args)
    path, profile = _profile_of(args)
    _check_flags(args)
    _take_from_profile(args, profile)
    shape = read_shape(model_source(args))
    check_model(profile, shape.config, context_length=shape.context_length)
    subjects = _subjects(args, profile, shape)
    for subject in subjects:
        subject.cache(shape.config, args.read_plan, shape.context_length)  # refuses before anything is loaded
    tokenizer = load_tokenizer(model_source(args))
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
        model=_model_record(args, shape, host.dtype or profile.model.dtype),
        host=host.record(),
        data=Data(
            corpus=corpus_source(args, shape).name,
            token_ids_sha256=corpus.hashes()["report"],
            is_unseen=_is_unseen(profile, corpus.hashes()),
        ),
        subjects=tuple(SubjectRecord(name=each.name, bytes_per_token=each.bytes_per_token) for each in subjects),
        cells=tuple(cells),
        making=_making(given, args),
    )
    file = evaluation_path(path, evaluation)
    write_atomically(file, dump_evaluation(evaluation))
    samples = folder.file(SAMPLES_FILE)
    if "samples" in args.levels:
        write_atomically(samples, "\n".join(_samples(args, host, text, corpus.splits["report"])))
    if args.json:
        print(json.dumps({"evaluation": str(file), **evaluation.model_dump(mode="json")}, indent=1))
    else:
        print("\n".join(evaluation_lines(evaluation, profile)))
        say(f"\nwritten to {file}; `kvtuner show {args.profile}` shows it again")
        if "samples" in args.levels:
            say(f"what every way says after the same beginnings, side by side: {samples}")
    return 0


def _profile_of(args: Namespace) -> tuple[Path, Profile]:
    files = profile_files(Path(args.profile))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ProfileError(f"{args.profile} holds several profiles; name one of {names}")
    if not os.access(files[0].parent, os.W_OK):
        raise RunFolderError(f"{files[0].parent} cannot be written, where the evaluation will stand; copy the profile")
    return files[0], load_profile(files[0])


def _check_flags(args: Namespace) -> None:
    """Flags of the one host say nothing to the other."""
    if args.endpoint is None:
        if args.api is not None:
            raise EndpointError("--api is how servers are spoken to; give --endpoint too")
        args.levels = args.levels or LEVELS
        args.against = args.against or ("fp8", "K8V8")
        return
    for flag in ("read_plan", "against"):
        if getattr(args, flag) is not None:
            raise EndpointError(
                f"--{flag.replace('_', '-')} is for a model loaded here; what servers read was said when they were"
                " started, and other ways are other endpoints, such as fp8=URL"
            )
    args.api = args.api or "sglang"
    args.levels = args.levels or tuple(level for level in LEVELS if level != "likelihood")


def _take_from_profile(args: Namespace, profile: Profile) -> None:
    """What was not said is as the search had it: the model, the corpus's cut and so its unseen part, the read plan."""
    if args.model is None:
        args.model, args.revision = profile.model.id, args.revision or profile.model.revision
        say(f"no --model given: evaluating {args.model}{f'@{args.revision}' if args.revision else ''}")
    args.read_plan = args.read_plan or (profile.quality.read_plan if profile.quality else "decode")
    record = profile.provenance.calibration
    if args.seed is None:
        args.seed = record.seed if record and record.seed < MAX_SEED else 0
    if record is None:
        return
    counts = record.num_sequences
    args.sequence_length = args.sequence_length or record.sequence_length
    if args.sequences is None and min(counts.calibrate, counts.select, counts.report - 1) > 0:
        args.sequences = (counts.calibrate, counts.select, counts.report)
    args.context_length = args.context_length or record.position_range[1] + 1
    if args.data is None and record.corpus != "demo":
        say(f"the search read {record.corpus}; without --data the shipped demo corpus is evaluated on")


def _is_unseen(profile: Profile, hashes: dict[str, str]) -> bool:
    record = profile.provenance.calibration
    seen = record.token_ids_sha256 if record else None
    return seen is not None and (seen.calibrate, seen.select) == (hashes["calibrate"], hashes["select"])


def _subjects(args: Namespace, profile: Profile, shape: ModelShape) -> list[Subject]:
    """Ways to store the cache: unquantized first, where it is asked at all, then the profile.

    Raises:
        EndpointError: no server of the profile.
        PrecisionError: the same way twice.
    """
    names = [name for name, _ in args.endpoint] if args.endpoint else [REFERENCE, PROFILE, *args.against]
    if PROFILE not in names:
        raise EndpointError(f"none of the endpoints serves the profile; give --endpoint {PROFILE}=URL")
    names.sort(key=lambda name: (name != REFERENCE, name != PROFILE))
    subjects = [of_profile(name, profile) if name == PROFILE else named(name, shape) for name in names]
    found = [subject.name for subject in subjects]
    if twice := [name for name in found if found.count(name) > 1]:
        raise PrecisionError(f"{twice[0]} is asked twice; name every way once, {REFERENCE} is there anyway")
    return subjects


def _host(
    args: Namespace, profile: Profile, shape: ModelShape, corpus: Corpus, subjects: Sequence[Subject], text: Text
) -> EvaluationHost:
    if args.endpoint:
        urls = dict(args.endpoint)
        endpoints = {
            subject.name: Endpoint(subject.name, urls[subject.name], args.api, text, args.timeout)
            for subject in subjects
        }
        identity = {"model_config": shape.config_sha256, "report_tokens": corpus.hashes()["report"]}
        return ServedHost(endpoints, profile, PROFILE, identity)
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
    examiner = Examiner(folder, sha256_of(host.identity()))
    cells = []
    total = sum(len(exam.problems) for exam in exams) * len(host.respondents)
    with tqdm(desc="questions", total=total, unit="problem", disable=None) as bar:
        for exam in exams:
            marked = {each.name: examiner.marks(exam, each, bar.update) for each in host.respondents}
            cells.append(accuracy_cell(exam, marked, REFERENCE, args.seed))
    return cells


def _check_tasks(args: Namespace) -> None:
    """Before anything is loaded.

    Raises:
        EndpointError: tasks of servers.
        CorpusError: tasks without the harness, or a folder of them that is not there.
    """
    if not args.tasks:
        return
    if args.endpoint:
        raise EndpointError("--tasks are answered by a model loaded here; leave out --endpoint")
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
    from kvtuner.evaluation.harness import HarnessModel, TaskOptions, task_cells

    include = None if args.include_path is None else Path(args.include_path)
    options = TaskOptions(args.tasks, include, args.limit, args.num_fewshot, args.apply_chat_template)
    identity = sha256_of(host.identity())
    models = {
        each.name: HarnessModel(each, text, tokenizer, context_length, folder, identity)
        for each in host.respondents
        if isinstance(each, Offline)
    }
    return task_cells(models, options, REFERENCE, args.seed)


def _samples(args: Namespace, host: EvaluationHost, text: Text, sequences: Tensor) -> list[str]:
    """What every way says after the beginnings of some sequences: kept in the run folder, for they are the user's."""
    lines: list[str] = []
    for prompt in tqdm(sequences[: args.samples, :SAMPLE_PROMPT].tolist(), desc="samples", disable=None):
        said = {each.name: each.continuation(prompt, SAMPLE_TOKENS) for each in host.respondents}
        lines += sample_lines(text.of(prompt), said)
    return lines


def _model_record(args: Namespace, shape: ModelShape, dtype: Any) -> ModelIdentity:
    return ModelIdentity(
        id=model_source(args).name,
        revision=args.revision,
        config_sha256=shape.config_sha256,
        architecture=shape.architecture,
        dtype=dtype,
    )


def _said(args: Namespace) -> list[str]:
    """The command with the last parts of paths only: the file is made to be shared."""
    words = ["kvtuner", "eval", public_name(str(args.profile))]
    usual = vars(build_parser().parse_args(["eval", "x"]))
    for name, value in sorted(vars(args).items()):
        if name in (*_UNSAID, "profile") or value == usual[name]:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        text = public_name(text) if name in _PATHS else text
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    return words + [word for way, _ in args.endpoint or () for word in ("--endpoint", f"{way}=URL")]


def _making(said: Sequence[str], args: Namespace) -> Making:
    import torch
    import transformers

    return Making(
        kvtuner_version=__version__,
        command=shlex.join(said)[:2000].strip(),
        machine=_machine(args),
        torch=torch.__version__,
        transformers=transformers.__version__,
        seed=args.seed,
    )


def _machine(args: Namespace) -> str:
    import torch

    if torch.cuda.is_available() and args.device != "cpu" and not args.endpoint:
        index = torch.device(args.device).index if args.device != "auto" else None
        count = torch.cuda.device_count() if args.device == "auto" else 1
        return f"{count} x {torch.cuda.get_device_name(index or 0)}"
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
