"""What was measured of a profile beside other ways to store the cache: the file that stands beside it.

It names the profile by its digest, so that it can be neither lost nor taken for another's. Knows nothing of how figures
were made.
"""

import json
from glob import escape
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.document import (
    DocumentKind,
    check_lengths,
    naming,
    read_document,
    short,
    validated,
)
from kvtuner.exported_configs.profile.evidence import ModelIdentity, ReadPlan
from kvtuner.exported_configs.profile.fields import Command, Figure, Name, Seed, Sha256, StrictModel, Text, TokenCount
from kvtuner.run_folder import sha256_of

EVALUATION_VERSION: Final = 1
SUFFIX: Final = ".evaluation-"
PROFILE: Final = "profile"
"""What the profile is called among the subjects."""
EVALUATION: Final = DocumentKind("evaluation", "evaluate again", 2**20)
MAX_LIST: Final = 256

Level = Literal["likelihood", "recall", "needle", "arithmetic", "task"]
Measure = Literal[
    "kl_nats_per_token",
    "truncated_kl_nats_per_token",
    "top1_agreement",
    "nll_nats_per_token",
    "accuracy",
    "score",
    "bleu",
    "chrf",
    "ter",
]
LIMITS: Final[dict[Measure, tuple[float, float]]] = {
    "kl_nats_per_token": (0, 1e4),
    "truncated_kl_nats_per_token": (0, 1e4),
    "top1_agreement": (0, 1),
    "nll_nats_per_token": (0, 1e4),
    "accuracy": (0, 1),
    "score": (-1e9, 1e9),
    "bleu": (0, 100),
    "chrf": (0, 100),
    "ter": (0, 1e9),
}
"""Between which a measure lies. A truncated KL tells a few tokens apart and all others not: at most the KL."""
Flag = Literal["floor", "ceiling", "unread"]
Share = Annotated[Figure, Field(ge=0, le=1)]


class PairedDifference(StrictModel):
    """The profile minus another way, on the same questions or sequences.

    Attributes:
        other: name of the other way.
        mean: with its interval from `low` to `high`.
        p_value: that neither is better: sequences', or contexts', differences with their signs flipped.
        mcnemar: exact, of answers that are right or wrong, taken for independent; None of other measures.
    """

    other: Text
    mean: Figure
    low: Figure
    high: Figure
    p_value: Share
    mcnemar: Share | None


class Result(StrictModel):
    """One way to store the cache in one cell.

    Attributes:
        mean: with its interval from `low` to `high`.
        failures: answers that never came; they count as wrong, or as empty where a text is scored. A token's likelihood
            that never came is left out of every way's mean.
    """

    subject: Text
    mean: Figure
    low: Figure
    high: Figure
    failures: TokenCount


class Cell(StrictModel):
    """One measure at one place.

    Attributes:
        task: name of a task, for level ``task``.
        num_tokens: length of the contexts, about, or of the sequences; None where contexts have one of their own.
        position: of their first token.
        units: contexts, or sequences: what is independent.
        count: questions asked after them, or tokens scored.
        flag: why the cell cannot tell ways apart: the unquantized model's result is at the floor or at the ceiling, or
            a server that was asked about a quantized cache hardly read any of it, or does not say that it did.
    """

    level: Level
    measure: Measure
    task: Text | None
    num_tokens: TokenCount | None
    position: TokenCount
    units: TokenCount
    count: TokenCount
    flag: Flag | None
    results: Annotated[tuple[Result, ...], Field(strict=False, max_length=MAX_LIST)]
    differences: Annotated[tuple[PairedDifference, ...], Field(strict=False, max_length=MAX_LIST)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        least, most = LIMITS[self.measure]
        for result in self.results:
            if not least <= result.low <= result.mean <= result.high <= most:
                raise ValueError(f"{self.measure} of {result.subject!a} must ascend within {least} and {most}")
        for difference in self.differences:
            if not difference.low <= difference.mean <= difference.high:
                raise ValueError(f"the difference from {difference.other!a} must ascend")
        return self


class SchemeRecord(StrictModel):
    """A way to store the cache.

    Attributes:
        name: `PROFILE`, ``bf16``, ``fp8``, or a uniform pair without transforms.
        bytes_per_token: all layers, on one rank that holds all heads; bf16's for the unquantized cache.
    """

    name: Text
    bytes_per_token: TokenCount


class BackendRecord(StrictModel):
    """Where answers came from.

    Attributes:
        kind: ``transformers``: this process; a server that speaks SGLang's own or OpenAI's completions.
        read_plan: what read quantized keys and values; None of a server.
        reads: what a server that serves a profile says that a chunk reads of itself.
        version: of SGLang.
        hit_share: of the prompt tokens of questions, how many the server found in its cache, as it says: only those,
            and what it generates itself, it read as they are stored.
    """

    kind: Literal["transformers", "sglang", "openai"]
    read_plan: ReadPlan | None
    reads: Literal["fresh", "cache", "below"] | None
    version: Text | None
    hit_share: Share | None


class DataRecord(StrictModel):
    """Text that likelihoods were scored on, and needles were hidden in; never the text itself.

    Attributes:
        corpus: its name.
        token_ids_sha256: of the scored tokens.
        is_unseen: whether it is known that neither calibration nor selection saw it: the same corpus, cut the same way.
            The search's own report did, after which a uniform may take the winner's place.
    """

    corpus: Name
    token_ids_sha256: Sha256
    is_unseen: bool


class ResultProvenance(StrictModel):
    """How the file was made.

    Attributes:
        command: with the last parts of paths only.
        machine: processor or GPU that the model ran on, or that asked the servers.
        torch: its version.
        transformers: its version.
        seed: of whatever was drawn.
    """

    kvtuner_version: Text
    command: Command
    machine: Text
    torch: Text
    transformers: Text
    seed: Seed


class Evaluation(StrictModel):
    """See the module."""

    evaluation_version: Literal[1]
    profile_digest: Sha256
    model: ModelIdentity
    host: BackendRecord
    data: DataRecord
    subjects: Annotated[tuple[SchemeRecord, ...], Field(strict=False, max_length=MAX_LIST)]
    cells: Annotated[tuple[Cell, ...], Field(strict=False, max_length=MAX_LIST)]
    making: ResultProvenance

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [subject.name for subject in self.subjects]
        if PROFILE not in names or len(set(names)) < len(names):
            raise ValueError(f"subjects must be different, and {PROFILE!r} one of them, not {names!a:.99}")
        for cell in self.cells:
            said = [result.subject for result in cell.results]
            if len(set(said)) < len(said):
                raise ValueError("a subject has two results in one cell")
            for name in (*said, *(difference.other for difference in cell.differences)):
                if name not in names:
                    raise ValueError(f"results of {name!a}, which is none of the subjects")
        return self


def evaluation_path(profile: Path, evaluation: Evaluation) -> Path:
    """Where an evaluation stands beside a profile's file: another place for whatever was asked otherwise."""
    host = evaluation.host
    kind = host.kind if host.read_plan is None else f"{host.kind}-{host.read_plan}"
    asked = [
        evaluation.model.model_dump(mode="json"),
        evaluation.data.model_dump(mode="json"),
        [subject.name for subject in evaluation.subjects],
        [[cell.level, cell.task, cell.num_tokens, cell.position, cell.units, cell.count] for cell in evaluation.cells],
        evaluation.making.seed,
    ]
    digits = sha256_of(asked).removeprefix("sha256:")[:8]
    return profile.with_name(f"{profile.stem}{SUFFIX}{kind}-{digits}.json")


def evaluation_files(profile: Path) -> list[Path]:
    """Files beside a profile's that are called its evaluations."""
    return sorted(profile.parent.glob(f"{escape(profile.stem)}{SUFFIX}*.json"))


def load_evaluation(path: Path) -> Evaluation:
    """Read and check an evaluation, which may be anybody's.

    Raises:
        ProfileError: whatever is wrong with it.
    """
    with naming(path, EVALUATION):
        return parse_evaluation(path)


def parse_evaluation(source: Path | bytes) -> Evaluation:
    """The same of a file's content, without its name in errors.

    Raises:
        ProfileError: whatever is wrong with it.
    """
    document = read_document(source, EVALUATION)
    version = document.get("evaluation_version")
    if type(version) is not int or version != EVALUATION_VERSION:
        raise ProfileError(
            f"evaluation_version must be {EVALUATION_VERSION}, not {short(version)}; upgrade kvtuner, or"
            f" {EVALUATION.again}"
        )
    check_lengths(document, EVALUATION)
    return validated(Evaluation, document, way_out=EVALUATION.again)


def dump_evaluation(evaluation: Evaluation) -> bytes:
    """The file's bytes.

    Raises:
        ProfileError: more than `load_evaluation` reads.
    """
    data = (json.dumps(evaluation.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n").encode()
    if len(data) > EVALUATION.max_bytes:
        raise ProfileError(f"the evaluation has {len(data)} bytes, above {EVALUATION.max_bytes}; ask for less at once")
    return data
