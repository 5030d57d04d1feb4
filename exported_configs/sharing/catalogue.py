"""The catalogue: profiles that come with kvtuner, and an index of them, which ``make catalogue-index`` writes."""

import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.mismatch import is_same_configuration
from kvtuner.exported_configs.profile.document import DocumentKind, naming, read_document, validated
from kvtuner.exported_configs.profile.field_types import Figure, Name, Sha256, StrictModel, Text, TokenCount
from kvtuner.exported_configs.profile.records import IntervalRecord, ModelIdentity

FOLDER: Final = Path(__file__).parents[1] / "profiles"
USUAL_BUDGET: Final = "4bit"
CATALOGUE_INDEX: Final = "index.json"
_AMOUNT: Final = re.compile(r"([0-9]*)(?:\.([0-9]+))? ?(.*)", re.DOTALL)
_KIND: Final = DocumentKind("index", "install kvtuner again, or run make catalogue-index in a clone", 2**20)


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

    The budget is the catalogue's usual one by default, and may be spelled as a search takes it. Where none has it, a
    `ProfileError` names those that there are.
    """
    entries = _entries_of(model, load_index(folder))
    if not entries:
        raise ProfileError(
            f"the catalogue has no profile for {model.id} ({model.architecture}, configuration"
            f" {model.config_sha256[:19]}); kvtuner list shows what it has, kvtuner search makes one"
        )
    budget = USUAL_BUDGET if budget is None else budget
    fitting = [entry for entry in entries if _spelling(entry.budget) == _spelling(budget)]
    if len(fitting) != 1:
        budgets = ", ".join(entry.budget for entry in entries)
        raise ProfileError(
            f"the catalogue has {len(fitting)} profiles by budget {budget!a} for {model.id}, but {budgets}; name one as"
            " auto:BUDGET, or as catalogue:NAME"
        )
    return folder / f"{fitting[0].name}.json"


def _spelling(budget: str) -> str:
    """One spelling of all that a budget has, such as of ``4bit``, ``4.0 bits`` and ``4BIT``; its unit is not read."""
    match = _AMOUNT.fullmatch(budget.strip().casefold())
    assert match is not None, "it matches any text"
    whole, fraction, unit = match.groups(default="")
    return f"{whole.lstrip('0')}.{fraction.rstrip('0')} {'bit' if unit == 'bits' else unit}"


def _entries_of(model: ModelIdentity, index: Index) -> list[Entry]:
    """The entries of a configuration, which many fine-tunes share, by weights, or by name where nobody knows these."""
    by_weights, by_name = [], []
    for entry in index.profiles:
        weights = entry.model.checkpoint_sha256, model.checkpoint_sha256
        if is_same_configuration(entry.model, model) is not True or entry.model.architecture != model.architecture:
            continue
        if None not in weights and weights[0] == weights[1]:
            by_weights.append(entry)
        elif None in weights and entry.model.id.casefold() == model.id.casefold():
            by_name.append(entry)
    return by_weights or by_name
