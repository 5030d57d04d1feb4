"""The evaluation of a profile beside other schemes: the file that stands beside the profile's.

The file names the profile by its digest. Its JSON, and so the constructors, have older names for three things: subjects
for schemes, host for the backend, and making for the provenance. Knows nothing of how figures are measured.
"""

import json
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.document import DocumentKind, naming, read_document, short, validated
from kvtuner.exported_configs.profile.field_types import (
    CommandText,
    Figure,
    Name,
    Seed,
    Sha256,
    Share,
    StrictModel,
    Text,
    TokenCount,
)
from kvtuner.exported_configs.profile.records import ModelIdentity
from kvtuner.read_plan_names import ReadPlanName
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile

EVALUATION_VERSION: Final = 1
EVALUATION_SUFFIX: Final = ".evaluation-"
PROFILE_SCHEME: Final = "profile"
"""The name of the profile among the subjects."""
SIGNIFICANT: Final = 0.05
"""The p-value below which a difference is called clear."""


def _check_version(document: dict[str, Any]) -> None:
    version = document.get("evaluation_version")
    if type(version) is not int or version != EVALUATION_VERSION:
        raise ProfileError(
            f"evaluation_version must be {EVALUATION_VERSION}, not {short(version)}; upgrade kvtuner, or evaluate again"
        )


EVALUATION: Final = DocumentKind("evaluation", "evaluate again", 2**20, check_version=_check_version)

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
LIKELIHOOD_TITLES: Final[dict[str, str]] = {
    "kl_nats_per_token": "KL nats/token",
    "truncated_kl_nats_per_token": "truncated KL nats/token",
    "top1_agreement": "top-1 as bf16",
    "nll_nats_per_token": "perplexity",
}
"""The measures of likelihoods as a person reads them; a perplexity is shown in place of its logarithm."""
LIMITS: Final[dict[Measure, tuple[float, float]]] = {
    **dict.fromkeys(("kl_nats_per_token", "truncated_kl_nats_per_token", "nll_nats_per_token"), (0, 1e4)),
    **dict.fromkeys(("top1_agreement", "accuracy"), (0, 1)),
    **dict.fromkeys(("bleu", "chrf"), (0, 100)),
    "score": (-1e9, 1e9),
    "ter": (0, 1e9),
}
"""The least and the largest value of each measure. A truncated KL merges all but a few tokens: at most the KL."""
Flag = Literal["floor", "ceiling", "unread"]
Records = Field(strict=False, max_length=256)


class PairedDifference(StrictModel):
    """The mean of the profile minus another scheme, on the same questions or sequences, with its interval.

    Attributes:
        p_value: The p-value of no difference, by flipping the signs of sequences' or contexts' differences.
        mcnemar: The exact p-value of right and wrong answers as if independent; None for other measures.
    """

    other: Text
    mean: Figure
    low: Figure
    high: Figure
    p_value: Share
    mcnemar: Share | None


class CellResult(StrictModel):
    """The mean of one scheme in one cell, with its interval, and the number of answers that never came.

    They count as wrong, or as empty where a text is scored; such a likelihood is left out of every scheme's mean.
    """

    scheme: Text = Field(alias="subject")
    mean: Figure
    low: Figure
    high: Figure
    failures: TokenCount


class Cell(StrictModel):
    """One measure of one task at one length and position, for all schemes.

    Attributes:
        num_tokens: The length of sequences, or about that of contexts; None where each context has its own.
        units: The number of contexts or sequences, which are independent.
        count: The number of questions asked after them, or of tokens scored.
        flag: The reason why the cell tells no schemes apart: the unquantized model's result is at the floor or at the
            ceiling, or a server hardly read its quantized cache, or does not say that it did.
        skipped: The schemes that were not asked, as no answer of theirs could show a loss.
    """

    level: Level
    measure: Measure
    task: Text | None
    num_tokens: TokenCount | None
    position: TokenCount
    units: TokenCount
    count: TokenCount
    flag: Flag | None
    results: Annotated[tuple[CellResult, ...], Records]
    differences: Annotated[tuple[PairedDifference, ...], Records]
    skipped: Annotated[tuple[Text, ...], Records] = ()

    @property
    def title(self) -> str:
        """The one name of a cell: its measure or task, and the length and position that tell it from others."""
        position = f"at {self.position:,}"
        if self.level == "likelihood":
            return f"{LIKELIHOOD_TITLES.get(self.measure, self.measure)} {position}"
        name = self.task if self.task and self.level == "task" else " ".join(filter(None, (self.level, self.task)))
        length = f"{self.num_tokens:,} tokens" if self.num_tokens else ""
        return " ".join(filter(None, (name, length, position if self.position else "")))

    @model_validator(mode="after")
    def _check(self) -> Self:
        least, most = LIMITS[self.measure]
        for result in self.results:
            if not least <= result.low <= result.mean <= result.high <= most:
                raise ValueError(f"{self.measure} of {result.scheme!a} must ascend within {least} and {most}")
        for difference in self.differences:
            if not difference.low <= difference.mean <= difference.high:
                raise ValueError(f"the difference from {difference.other!a} must ascend")
        return self


class SchemeRecord(StrictModel):
    """A scheme of the evaluation: `PROFILE_SCHEME`, ``bf16``, ``fp8``, or a uniform pair without transforms.

    Its bytes are those of all layers on one rank that holds all heads; bf16's for the unquantized cache.
    """

    name: Text
    bytes_per_token: TokenCount


class BackendRecord(StrictModel):
    """The backend that answered.

    Attributes:
        kind: ``engine`` for the local engine and ``transformers`` for a transformers cache, both in this process;
            otherwise the protocol of the server, SGLang's own or OpenAI's.
        read_plan: The read plan of this process; None for a server.
        reads: The cache that a chunk reads of itself, as a server that serves a profile reports it.
        hit_share: The share of the questions' prompt tokens that the server found in its cache, as it reports. Only
            those tokens, and those that it generated, did it read as they are stored.
    """

    kind: Literal["engine", "transformers", "sglang", "openai"]
    read_plan: ReadPlanName | None
    reads: Literal["fresh", "cache", "below"] | None
    version: Text | None
    hit_share: Share | None


class DataRecord(StrictModel):
    """The text that likelihoods were scored on and needles were hidden in, without its content.

    It is unseen if neither calibration nor selection saw it: the same corpus, cut the same way. The search's own report
    saw it, after which a uniform may take the winner's place.
    """

    corpus: Name
    token_ids_sha256: Sha256
    is_unseen: bool


class ResultProvenance(StrictModel):
    """The origin of the results: the command, with the last parts of paths only, and the versions of libraries.

    The machine is the processor or GPU that the model ran on, or that sent requests to the servers.
    """

    kvtuner_version: Text
    command: CommandText
    machine: Text
    torch: Text
    transformers: Text
    seed: Seed


class Evaluation(StrictModel):
    """The content of the file."""

    evaluation_version: Literal[1]
    profile_digest: Sha256
    model: ModelIdentity
    backend: BackendRecord = Field(alias="host")
    data: DataRecord
    schemes: Annotated[tuple[SchemeRecord, ...], Records] = Field(alias="subjects")
    cells: Annotated[tuple[Cell, ...], Records]
    provenance: ResultProvenance = Field(alias="making")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [scheme.name for scheme in self.schemes]
        if PROFILE_SCHEME not in names or len(set(names)) < len(names):
            raise ValueError(f"subjects must be different, and {PROFILE_SCHEME!r} one of them, not {names!a:.99}")
        for cell in self.cells:
            results = [result.scheme for result in cell.results]
            if len(set(results)) < len(results):
                raise ValueError("a subject has two results in one cell")
            if both := set(results) & set(cell.skipped):
                raise ValueError(f"results of {min(both)!a}, which was skipped")
            for name in (*results, *cell.skipped, *(difference.other for difference in cell.differences)):
                if name not in names:
                    raise ValueError(f"results of {name!a}, which is none of the subjects")
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as in the file."""
        return self.model_dump(mode="json", by_alias=True)


@dataclass(frozen=True, slots=True)
class EvaluatedProfile:
    """A profile by the name of its file, with the evaluations that stand beside it.

    The reference is what a server reads it by: a path as it was given, or a name of the hub or of the catalogue.
    """

    name: str
    reference: str
    profile: "Profile"
    evaluations: tuple[Evaluation, ...] = ()
    has_relative_path: bool = False
    """Whether the reference is a path that begins in the folder where the command ran."""


def evaluation_path(profile: Path, evaluation: Evaluation) -> Path:
    """The file of an evaluation beside a profile's: another one for other models, data, schemes, cells or seeds."""
    backend = evaluation.backend
    kind = backend.kind if backend.read_plan is None else f"{backend.kind}-{backend.read_plan}"
    content = [
        evaluation.model.model_dump(mode="json"),
        evaluation.data.model_dump(mode="json"),
        [scheme.name for scheme in evaluation.schemes],
        [[cell.level, cell.task, cell.num_tokens, cell.position, cell.units, cell.count] for cell in evaluation.cells],
        evaluation.provenance.seed,
    ]
    digits = sha256_of(content).removeprefix("sha256:")[:8]
    return profile.with_name(f"{profile.stem}{EVALUATION_SUFFIX}{kind}-{digits}.json")


def evaluation_files(profile: Path) -> list[Path]:
    """The files beside a profile's whose names say that they are its evaluations."""
    return sorted(profile.parent.glob(f"{escape(profile.stem)}{EVALUATION_SUFFIX}*.json"))


def load_evaluation(path: Path) -> Evaluation:
    """Read and check the file of an evaluation, which may be hostile; a `ProfileError` begins with its name."""
    with naming(path, EVALUATION):
        return parse_evaluation(path)


def parse_evaluation(source: Path | bytes) -> Evaluation:
    """Read and check the content of an evaluation's file; a `ProfileError` is without its name."""
    return validated(Evaluation, read_document(source, EVALUATION), way_out=EVALUATION.again)


def dump_evaluation(evaluation: Evaluation) -> bytes:
    """The bytes of an evaluation's file; `ProfileError` where it would be larger than `load_evaluation` reads."""
    data = (json.dumps(evaluation.to_json(), indent=1, ensure_ascii=False) + "\n").encode()
    if len(data) > EVALUATION.max_bytes:
        raise ProfileError(f"the evaluation has {len(data)} bytes, above {EVALUATION.max_bytes}; ask for less at once")
    return data
