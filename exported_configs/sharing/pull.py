"""Profiles of the hub: fetched by commit, checked, and kept. Knows nothing of the hub's protocol."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Final

from huggingface_hub import constants

from kvtuner.errors import HubError, OversizedFileError, ProfileError, SignatureError
from kvtuner.exported_configs.profile.build import dump_constants
from kvtuner.exported_configs.profile.constants_file import MAX_CONSTANTS_BYTES, constants_name
from kvtuner.exported_configs.profile.evaluation_record import EVALUATION, EVALUATION_SUFFIX, parse_evaluation
from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.hub_client import fetch_file, list_files
from kvtuner.exported_configs.sharing.profile_store import (
    ORIGIN,
    FetchedProfile,
    find_stored,
    remember,
    remembered,
    store_profile,
)
from kvtuner.exported_configs.sharing.reference import HubReference, check_digest, is_commit, profile_names
from kvtuner.exported_configs.signing.signature_bundle import SIGNATURE, SIGNATURE_SUFFIX, read_bundle

MAX_COMPANIONS: Final = 32


def pull(reference: HubReference) -> FetchedProfile:
    """Fetch a profile with its side file, evaluations and signature, check it, and keep it.

    A commit that is kept whole is not fetched again. With ``HF_HUB_OFFLINE`` nothing is fetched at all. A profile that
    cannot be had is a `HubError`, a wrong one or one that is not pinned a `ProfileError`; one that cannot be kept is a
    `RunFolderError`.
    """
    if PurePosixPath(reference.path).name == ORIGIN:
        raise ProfileError(f"{reference} is no name for a profile; name another file")
    fetch = _pull_offline if constants.HF_HUB_OFFLINE else _pull_online
    return find_stored(reference) or fetch(reference)


def _pull_online(reference: HubReference) -> FetchedProfile:
    listing = list_files(reference.repo, reference.revision)
    at = reference.at(listing.commit)
    fetched = find_stored(at) or _fetch(at, listing.sizes)
    if is_commit(reference.revision):
        return fetched
    before = remember(reference, listing.commit)
    notes = [f"{reference} may change; it is {at} now: name that to keep it"]
    if before not in (None, listing.commit):
        notes.append(f"{reference} moved: it was {before} when it was pulled last")
    return replace(fetched, notes=(*notes, *fetched.notes))


def _pull_offline(reference: HubReference) -> FetchedProfile:
    commit = None if is_commit(reference.revision) else remembered(reference)
    fetched = None if commit is None else find_stored(reference.at(commit))
    if fetched is None:
        raise HubError(
            f"{reference}: HF_HUB_OFFLINE is set and it was never pulled; pull it once without, or name a file"
        )
    return replace(fetched, notes=(f"HF_HUB_OFFLINE: {reference} as it was when it was pulled last, {commit}",))


def _fetch(at: HubReference, sizes: Mapping[str, int | None]) -> FetchedProfile:
    """Fetch a commit's profile with its companions; a damaged or oversized companion is left out, with a note."""
    if at.path not in sizes:
        profiles = profile_names(sorted(sizes))
        others = f"; it has {', '.join(profiles[:8])}" if profiles else ""
        raise HubError(f"{at}: the repository has no file {at.path}{others}")
    data = fetch_file(at, sizes[at.path], MAX_PROFILE_BYTES)
    try:
        profile = load_profile(data, read_constants=partial(_fetch_constants, at, sizes))
    except ProfileError as error:
        raise ProfileError(f"{at} holds no valid profile: {error}") from error
    check_digest(profile.digest, at.digest, str(at))
    file = PurePosixPath(at.path).name
    files, notes = {file: data}, []
    if (side_file := dump_constants(profile)) is not None:
        files[constants_name(file)] = side_file
    for name in _companions(at.path, sizes):
        beside = HubReference(at.repo, at.revision, name)
        kind = SIGNATURE if name.endswith(SIGNATURE_SUFFIX) else EVALUATION
        try:
            content = fetch_file(beside, sizes[name], kind.max_bytes)
            if kind is SIGNATURE:
                read_bundle(content)
            elif parse_evaluation(content).profile_digest != profile.digest:
                raise ProfileError("it evaluates another profile")
        except (OversizedFileError, ProfileError, SignatureError) as error:
            notes.append(f"left out {beside}: {error}")
        else:
            files[PurePosixPath(name).name] = content
    return replace(store_profile(at, files, profile), notes=tuple(notes))


def _fetch_constants(at: HubReference, sizes: Mapping[str, int | None]) -> bytes:
    beside = replace(at, path=constants_name(at.path), digest=None)
    if beside.path not in sizes:
        raise ProfileError(f"its constants are in {beside.path}, which the repository does not have; ask its owner")
    return fetch_file(beside, sizes[beside.path], MAX_CONSTANTS_BYTES)


def _companions(path: str, names: Iterable[str]) -> list[str]:
    evaluation = re.compile(re.escape(path.removesuffix(".json") + EVALUATION_SUFFIX) + r"[^/]*\.json")
    evaluations = [name for name in sorted(names) if evaluation.fullmatch(name) and name.isprintable()]
    if len(evaluations) > MAX_COMPANIONS:
        raise HubError(
            f"{path} has {len(evaluations)} evaluations beside it, above {MAX_COMPANIONS}; ask its owner for less"
        )
    return evaluations + [name for name in names if name == path + SIGNATURE_SUFFIX]
