"""The catalogue: profiles that come with kvtuner, and an index of them.

``python -m kvtuner.exported_configs.sharing.catalogue`` writes the index anew from the profiles in ``profiles/``. Knows
nothing of how they were made; CONTRIBUTING says what evidence each must bring.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.mismatch import is_same_configuration
from kvtuner.exported_configs.profile.document import DocumentKind, naming, read_document, validated
from kvtuner.exported_configs.profile.evaluation_record import EVALUATION_SUFFIX, evaluation_files, load_evaluation
from kvtuner.exported_configs.profile.fields import Figure, Name, Sha256, StrictModel, Text, TokenCount
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.records import IntervalRecord, ModelIdentity
from kvtuner.run_folder import sha256_of, write_atomically

FOLDER: Final = Path(__file__).parents[1] / "profiles"
USUAL_BUDGET: Final = "4bit"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]*-[0-9][a-z0-9.]*")
CATALOGUE_INDEX: Final = "index.json"
INDEX_SCHEMA: Final = "index.schema.json"
_KIND: Final = DocumentKind("index", "python -m kvtuner.exported_configs.sharing.catalogue", 2**20)


class Entry(StrictModel):
    """One profile of the catalogue, so that it can be found without being read.

    Attributes:
        name: The name of its file without ``.json``: ``catalogue:name`` is its reference.
        model: The identity of the measured model.
        geometry_sha256: The hash of the geometry's canonical JSON.
        budget: The budget as the user wrote it.
        kl: The KL of the profile's own quality; None where nothing was measured.
        evaluations: The names of the evaluations beside it.
    """

    name: Name
    model: ModelIdentity
    geometry_sha256: Sha256
    budget: Text
    mean_bits: Figure
    effective_bits: Figure
    bytes_per_token: TokenCount
    bf16_bytes_per_token: TokenCount
    kl: IntervalRecord | None
    digest: Sha256
    evaluations: Annotated[tuple[Name, ...], Field(strict=False, max_length=64)]


class Index(StrictModel):
    """Every profile of the catalogue, by name."""

    catalogue_version: Literal[1]
    profiles: Annotated[tuple[Entry, ...], Field(strict=False, max_length=1024)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [entry.name for entry in self.profiles]
        if names != sorted(set(names)):
            raise ValueError("profiles must be different and sorted by name")
        return self


def load_index(folder: Path = FOLDER) -> Index:
    """Read and check the index, or raise `ProfileError`."""
    path = folder / CATALOGUE_INDEX
    with naming(path, _KIND):
        return validated(Index, read_document(path, _KIND), way_out=_KIND.again)


def catalogue_file(name: str) -> Path:
    """The file of a profile of the catalogue; `ProfileError` where there is none of that name."""
    names = [entry.name for entry in load_index().profiles]
    if name not in names:
        raise ProfileError(f"the catalogue has no profile {name[:60]!a}, but {', '.join(names)} (kvtuner list)")
    return FOLDER / f"{name}.json"


def choose(model: ModelIdentity, budget: str | None = None, folder: Path = FOLDER) -> Path:
    """Choose the profile for a served model by its configuration, and by its weights or its name.

    The budget is the catalogue's usual one by default. Where none has it, a `ProfileError` names those that there are.
    """
    alike = [entry for entry in load_index(folder).profiles if _is_alike(entry.model, model)]
    weights = model.checkpoint_sha256
    same = [entry for entry in alike if weights is not None and entry.model.checkpoint_sha256 == weights]
    entries = same or [entry for entry in alike if _is_called_alike(entry.model, model)]
    if not entries:
        raise ProfileError(
            f"the catalogue has no profile for {model.id} ({model.architecture}, configuration"
            f" {model.config_sha256[:19]}); kvtuner list shows what it has, kvtuner search makes one"
        )
    budget = USUAL_BUDGET if budget is None else budget
    fitting = [entry for entry in entries if entry.budget == budget]
    if len(fitting) != 1:
        budgets = ", ".join(entry.budget for entry in entries)
        raise ProfileError(
            f"the catalogue has {len(fitting)} profiles by budget {budget!a} for {model.id}, but {budgets}; name one as"
            " auto:BUDGET, or as catalogue:NAME"
        )
    return folder / f"{fitting[0].name}.json"


def _is_alike(measured: ModelIdentity, served: ModelIdentity) -> bool:
    """Whether models are of one configuration, which many fine-tunes share."""
    return is_same_configuration(measured, served) is True and measured.architecture == served.architecture


def _is_called_alike(measured: ModelIdentity, served: ModelIdentity) -> bool:
    """Whether names are the same, where weights cannot be compared."""
    have_weights = measured.checkpoint_sha256 is not None and served.checkpoint_sha256 is not None
    return not have_weights and measured.id.casefold() == served.id.casefold()


def make_index(folder: Path = FOLDER) -> Index:
    """The index of a folder's profiles; `ProfileError` for a wrong one, a stray evaluation, or missing evidence."""
    names = {path.name for path in folder.glob("*.json")} - {CATALOGUE_INDEX, INDEX_SCHEMA}
    entries = sorted(
        (_entry(folder / name) for name in names if EVALUATION_SUFFIX not in name), key=lambda entry: entry.name
    )
    if len({(entry.model.id, entry.budget) for entry in entries}) < len(entries):
        raise ProfileError("the catalogue has two profiles of one model by one budget; keep the better one")
    listed = {name for entry in entries for name in entry.evaluations}
    for name in sorted(names - listed):
        if EVALUATION_SUFFIX in name:
            raise ProfileError(f"{name} evaluates no profile of the catalogue; remove it")
    return Index(catalogue_version=1, profiles=tuple(entries))


def _entry(path: Path) -> Entry:
    profile, evaluations = load_profile(path), evaluation_files(path)
    geometry = profile.to_geometry()
    for file in evaluations:
        if load_evaluation(file).profile_digest != profile.digest:
            raise ProfileError(f"{file.name} evaluates another profile than {path.name}; evaluate that one")
    evidence = {  # CONTRIBUTING says why
        "a name in lower case that ends with its budget": _NAME.fullmatch(path.stem),
        "the command that made it": profile.provenance.command,
        "its measured quality": profile.quality,
        "an evaluation": evaluations,
        "what its weights are known by": profile.model.checkpoint_sha256,
    }
    lacking = [name for name, value in evidence.items() if not value]
    if lacking:
        raise ProfileError(f"{path.stem} lacks {', '.join(lacking)}; a profile of the catalogue brings its evidence")
    return Entry(
        name=path.stem,
        model=profile.model,
        geometry_sha256=sha256_of(geometry.as_dict()),
        budget=profile.budget.asked,
        mean_bits=profile.budget.mean_bits,
        effective_bits=profile.budget.effective_bits,
        bytes_per_token=profile.budget.bytes_per_token,
        bf16_bytes_per_token=geometry.bf16_bytes_per_token(),
        kl=None if profile.quality is None else profile.quality.measured_kl,
        digest=profile.digest,
        evaluations=tuple(file.name for file in evaluations),
    )


def index_text(index: Index) -> str:
    """The file of an index."""
    return json.dumps(index.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def index_schema_text() -> str:
    """The JSON Schema of the index."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Index.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the index and its schema beside the profiles."""
    write_atomically(FOLDER / CATALOGUE_INDEX, index_text(make_index()))
    write_atomically(FOLDER / INDEX_SCHEMA, index_schema_text())


if __name__ == "__main__":
    main()
