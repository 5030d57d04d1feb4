"""What was measured of a profile beside other ways to store the cache: the file that stands beside it.

It names the profile by its digest, so that it can be neither lost nor taken for another's. Knows nothing of how figures
were made.
"""

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.document import DocumentKind, check_lengths, naming, read_document, short
from kvtuner.exported_configs.evidence import ModelIdentity, ReadPlan
from kvtuner.exported_configs.fields import Figure, Name, Section, Seed, Sha256, Text, TokenCount
from kvtuner.exported_configs.profile import explain
from kvtuner.run_folder import canonical_json

EVALUATION_VERSION: Final = 1
SUFFIX: Final = ".evaluation-"
EVALUATION: Final = DocumentKind("evaluation", "evaluate again", 2**20)
MAX_LIST: Final = 256

Level = Literal["likelihood", "recall", "needle", "arithmetic", "task"]
Measure = Literal["kl_nats_per_token", "top1_agreement", "nll_nats_per_token", "accuracy"]
LongText = Annotated[str, Field(max_length=20_000)]
Share = Annotated[Figure, Field(ge=0, le=1)]


class Difference(Section):
    """This way minus another, on the same questions or tokens, with its interval.

    Attributes:
        other: name of the other way.
        p_value: exact McNemar, where answers are right or wrong.
    """

    other: Text
    mean: Figure
    low: Figure
    high: Figure
    p_value: Share | None


class Result(Section):
    """One way to store the cache in one cell."""

    subject: Text
    mean: Figure
    low: Figure
    high: Figure
    differences: Annotated[tuple[Difference, ...], Field(strict=False, max_length=MAX_LIST)]


class Cell(Section):
    """One measure at one place.

    Attributes:
        task: name of a task, for level ``task``.
        num_tokens: length of the contexts, about; None where they have one of their own.
        position: of their first token.
        count: questions asked, or tokens scored.
        flag: why the unquantized model's result cannot tell ways apart: it is at the floor or at the ceiling.
    """

    level: Level
    measure: Measure
    task: Text | None
    num_tokens: TokenCount | None
    position: TokenCount
    count: TokenCount
    flag: Literal["floor", "ceiling"] | None
    results: Annotated[tuple[Result, ...], Field(strict=False, max_length=MAX_LIST)]


class Subject(Section):
    """A way to store the cache.

    Attributes:
        name: ``profile``, ``bf16``, ``fp8``, or a uniform pair without transforms.
        bytes_per_token: all layers, on one rank that holds all heads; bf16's for the unquantized cache.
    """

    name: Text
    bytes_per_token: TokenCount


class Output(Section):
    """What one way said."""

    subject: Text
    text: LongText


class Sample(Section):
    """One prompt, and what followed it by every way."""

    prompt: LongText
    outputs: Annotated[tuple[Output, ...], Field(strict=False, max_length=MAX_LIST)]


class Host(Section):
    """Where answers came from.

    Attributes:
        kind: ``transformers``: this process.
        read_plan: what read quantized keys and values.
    """

    kind: Literal["transformers"]
    read_plan: ReadPlan


class Data(Section):
    """Text that likelihoods were scored on, and needles were hidden in.

    Attributes:
        corpus: its name.
        token_ids_sha256: of the scored tokens.
        is_unseen: whether it is known that the search did not see it: the same corpus, cut the same way.
    """

    corpus: Name
    token_ids_sha256: Sha256
    is_unseen: bool


class Making(Section):
    """How the file was made.

    Attributes:
        command: that makes it again.
        machine: processor or GPU.
        versions: of libraries.
    """

    kvtuner_version: Text
    command: Annotated[str, Field(max_length=2000)]
    machine: Text
    torch: Text
    transformers: Text
    seed: Seed


class Evaluation(Section):
    """See the module."""

    evaluation_version: Literal[1]
    profile_digest: Sha256
    model: ModelIdentity
    host: Host
    data: Data
    subjects: Annotated[tuple[Subject, ...], Field(strict=False, max_length=MAX_LIST)]
    cells: Annotated[tuple[Cell, ...], Field(strict=False, max_length=MAX_LIST)]
    samples: Annotated[tuple[Sample, ...], Field(strict=False, max_length=MAX_LIST)]
    making: Making

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = {subject.name for subject in self.subjects}
        said = {result.subject for cell in self.cells for result in cell.results}
        said |= {output.subject for sample in self.samples for output in sample.outputs}
        if unknown := sorted(said - names):
            raise ValueError(f"results of {unknown[0]!a}, which is none of the subjects")
        return self


def evaluation_path(profile: Path, host: Host) -> Path:
    """Where the evaluation of a profile's file by a host stands."""
    return profile.with_name(f"{profile.stem}{SUFFIX}{host.kind}-{host.read_plan}.json")


def evaluations_of(profile: Path, digest: str) -> list[Evaluation]:
    """Evaluations that stand beside a profile's file and name its digest.

    Raises:
        ProfileError: one of them is damaged.
    """
    found = [load_evaluation(path) for path in sorted(profile.parent.glob(f"{profile.stem}{SUFFIX}*.json"))]
    return [evaluation for evaluation in found if evaluation.profile_digest == digest]


def load_evaluation(path: Path) -> Evaluation:
    """Read and check an evaluation, which may be anybody's.

    Raises:
        ProfileError: whatever is wrong with it.
    """
    with naming(path, EVALUATION):
        document = read_document(path, EVALUATION)
        version = document.get("evaluation_version")
        if type(version) is not int or version != EVALUATION_VERSION:
            raise ProfileError(
                f"evaluation_version must be {EVALUATION_VERSION}, not {short(version)}; upgrade kvtuner, or"
                f" {EVALUATION.again}"
            )
        check_lengths(document, EVALUATION)
        try:
            return Evaluation.model_validate(document)
        except ValidationError as error:
            raise ProfileError(f"{explain(error)}; {EVALUATION.again}") from error


def dump_evaluation(evaluation: Evaluation) -> bytes:
    """The file's bytes."""
    return canonical_json(evaluation.model_dump(mode="json")).encode() + b"\n"
