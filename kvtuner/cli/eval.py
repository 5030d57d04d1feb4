"""``kvtuner eval``: is the answer still right, beside the unquantized model and what else its bytes could be."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tqdm import tqdm

from kvtuner import __version__
from kvtuner.calibration.calibrate import CalibrationOptions, Workbench
from kvtuner.calibration.corpus import load_corpus
from kvtuner.calibration.model import DEMO, load_model, read_shape
from kvtuner.cli.session import corpus_source, model_source, run_folder, say
from kvtuner.cli.show import profile_files
from kvtuner.errors import CorpusError, ProfileError
from kvtuner.evaluation.answers import Examiner, accuracy_cell, make_exams
from kvtuner.evaluation.evaluation_text import evaluation_lines
from kvtuner.evaluation.likelihood import likelihood_cells
from kvtuner.evaluation.offline import Offline
from kvtuner.evaluation.subjects import REFERENCE, named, of_profile
from kvtuner.evaluation.validation import OFFSETS, Validator
from kvtuner.exported_configs.evaluation import (
    Data,
    Evaluation,
    Host,
    Making,
    Output,
    Sample,
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

    from kvtuner.evaluation.subjects import Subject
    from kvtuner.exported_configs.evaluation import Cell
    from kvtuner.exported_configs.profile import Profile

PROFILE: Final = "profile"
IDENTITY_FILE: Final = "evaluation.json"
LENGTHS: Final = (128, 256, 512, 2048, 8192)
SAMPLE_PROMPT: Final = 128
SAMPLE_TOKENS: Final = 64
MIN_PROBLEMS: Final = 2


def run(args: Namespace) -> int:
    """Run the sub-command."""
    files = profile_files(Path(args.profile))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ProfileError(f"{args.profile} holds several profiles; name one of {names}")
    profile = load_profile(files[0])
    _defaults_of(profile, args)
    shape = read_shape(model_source(args))
    check_model(profile, shape.config)
    subjects = [named(REFERENCE, shape), of_profile(PROFILE, profile), *(named(each, shape) for each in args.against)]
    loaded = load_model(model_source(args), shape)
    corpus = load_corpus(corpus_source(args, shape), loaded.tokenizer)
    options = CalibrationOptions(read_plan=args.read_plan, batch_size=args.batch_size, seed=args.seed)
    bench = Workbench.prepare(loaded, corpus, options)
    folder = run_folder(args, f"eval-{profile.digest.removeprefix('sha256:')[:12]}-{args.read_plan}")
    folder.create()
    identity = bench.identity()
    folder.check_identity(IDENTITY_FILE, identity, "answers")
    cells: list[Cell] = []
    if "likelihood" in args.levels:
        cells += _likelihood(args, bench, Validator(bench, folder, sha256_of(identity)), subjects)
    host = Offline(loaded, args.read_plan)
    filler = "".join(loaded.tokenizer.batch_decode(corpus.splits["report"].tolist(), skip_special_tokens=True))
    cells += _questions(args, host, Examiner(host, folder, sha256_of(identity)), subjects, filler, shape.context_length)
    evaluation = Evaluation(
        evaluation_version=1,
        profile_digest=profile.digest,
        model=ModelIdentity(
            id=model_source(args).name,
            revision=args.revision,
            config_sha256=shape.config_sha256,
            architecture=shape.architecture,
            dtype=loaded.dtype_name,  # type: ignore[arg-type]  # checked by the section itself
        ),
        host=Host(kind="transformers", read_plan=args.read_plan),
        data=Data(
            corpus=corpus_source(args, shape).name,
            token_ids_sha256=corpus.hashes()["report"],
            is_unseen=_is_unseen(profile, corpus.hashes()),
        ),
        subjects=tuple(SubjectRecord(name=each.name, bytes_per_token=each.bytes_per_token) for each in subjects),
        cells=tuple(cells),
        samples=_samples(args, host, bench, subjects),
        making=_making(args),
    )
    path = evaluation_path(files[0], evaluation.host)
    write_atomically(path, dump_evaluation(evaluation))
    if args.json:
        print(json.dumps({"evaluation": str(path), **evaluation.model_dump(mode="json")}, indent=1))
    else:
        print("\n".join(evaluation_lines(evaluation)))
        say(f"\nwritten to {path}; `kvtuner show {args.profile}` shows it again")
    return 0


def _defaults_of(profile: Profile, args: Namespace) -> None:
    """What was not said is as the search had it: the model, the corpus's cut and so its unseen part, the read plan."""
    args.model = args.model or profile.model.id
    args.read_plan = args.read_plan or (profile.quality.read_plan if profile.quality else "decode")
    record = profile.provenance.calibration
    args.seed = args.seed if args.seed is not None else record.seed if record else 0
    if record is None:
        return
    counts = record.num_sequences
    args.sequence_length = args.sequence_length or record.sequence_length
    args.sequences = args.sequences or (counts.calibrate, counts.select, counts.report)
    if args.context_length is None and args.model != DEMO:
        args.context_length = record.position_range[1] + 1
    if args.data is None and record.corpus != DEMO:
        say(f"the search read {record.corpus}; without --data the shipped demo corpus is evaluated on")


def _is_unseen(profile: Profile, hashes: dict[str, str]) -> bool:
    record = profile.provenance.calibration
    seen = record.token_ids_sha256 if record else None
    return seen is not None and (seen.calibrate, seen.select) == (hashes["calibrate"], hashes["select"])


def _likelihood(args: Namespace, bench: Workbench, validator: Validator, subjects: list[Subject]) -> list[Cell]:
    tokens = bench.corpus.splits["report"].shape[1]
    last = max(0, bench.loaded.shape.context_length - tokens)
    cells = []
    with tqdm(desc="likelihood", total=len(OFFSETS) * len(subjects), disable=None) as bar:
        for offsets, position in zip(OFFSETS, (0, last), strict=True):
            measured = {}
            for subject in subjects:
                measured[subject.name] = validator.measure(subject.contestant, offsets)
                bar.update()
            cells += likelihood_cells(measured, REFERENCE, num_tokens=tokens, position=position, seed=args.seed)
    return cells


def _questions(
    args: Namespace, host: Offline, examiner: Examiner, subjects: list[Subject], filler: str, context_length: int
) -> list[Cell]:
    longest = context_length - 64  # for the question, the answer and what a length is about
    lengths = args.lengths or tuple(length for length in LENGTHS if length <= longest)
    if too_long := [length for length in lengths if length > longest]:
        raise CorpusError(f"--lengths {too_long[0]} does not fit the context of {context_length} tokens")
    exams = make_exams(
        [level for level in args.levels if level not in ("likelihood", "samples")],
        lengths,
        sorted({0, context_length // 2, max(0, context_length - 256)}),
        count_tokens=host.count_tokens,
        filler=filler,
        num_problems=args.problems,
        num_questions=args.questions,
        seed=args.seed,
    )
    cells = []
    with tqdm(desc="questions", total=len(exams) * len(subjects) * args.problems, unit="problem", disable=None) as bar:
        for exam in exams:
            marked = {each.name: examiner.marks(exam, each, bar.update) for each in subjects}
            cells.append(accuracy_cell(exam, marked, REFERENCE, args.seed))
    return cells


def _samples(args: Namespace, host: Offline, bench: Workbench, subjects: list[Subject]) -> tuple[Sample, ...]:
    """What every way says after the beginnings of some sequences, for a person to read side by side."""
    if "samples" not in args.levels:
        return ()
    tokenizer = bench.loaded.tokenizer
    prompts = bench.corpus.splits["report"][: args.samples, :SAMPLE_PROMPT].tolist()
    samples = []
    for prompt in tqdm(prompts, desc="samples", disable=None):
        said = [(each.name, host.continuation(each, prompt, SAMPLE_TOKENS)) for each in subjects]
        outputs = tuple(Output(subject=name, text=_text(tokenizer, ids)) for name, ids in said)
        samples.append(Sample(prompt=_text(tokenizer, prompt), outputs=outputs))
    return tuple(samples)


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))[:20_000]


def _making(args: Namespace) -> Making:
    import torch
    import transformers

    words = [Path(word).name if Path(word).is_absolute() else word for word in args.argv]
    return Making(
        kvtuner_version=__version__,
        command=shlex.join(["kvtuner", *words])[:2000],
        machine=_machine(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        seed=args.seed,
    )


def _machine() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
