"""Write the index of the catalogue anew from the profiles in ``exported_configs/profiles``.

    make catalogue-index

CONTRIBUTING says what evidence each profile must bring.
"""

import json
import re
from pathlib import Path
from typing import Final

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.evaluation_record import EVALUATION_SUFFIX, evaluation_files, load_evaluation
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.catalogue import CATALOGUE_INDEX, FOLDER, Entry, Index
from kvtuner.run_folder import sha256_of, write_atomically
from tools.make_schemas import INDEX_SCHEMA

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]*-[0-9][a-z0-9.]*")


def make_index(folder: Path = FOLDER) -> Index:
    """The index of a folder's profiles; `ProfileError` for a wrong one, a stray evaluation, or missing evidence."""
    names = {path.name for path in folder.glob("*.json")} - {CATALOGUE_INDEX, INDEX_SCHEMA.name}
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
        geometry_sha256=sha256_of(profile.geometry.hashed()),
        budget=profile.budget.asked,
        mean_bits=profile.budget.mean_bits,
        effective_bits=profile.budget.effective_bits,
        bytes_per_token=profile.budget.bytes_per_token,
        bf16_bytes_per_token=profile.bf16_bytes_per_token(),
        kl=None if profile.quality is None else profile.quality.measured_kl,
        digest=profile.digest,
        evaluations=tuple(file.name for file in evaluations),
    )


def index_text(index: Index) -> str:
    """The file of an index."""
    return json.dumps(index.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the index beside the profiles."""
    write_atomically(FOLDER / CATALOGUE_INDEX, index_text(make_index()))


if __name__ == "__main__":
    main()
