"""Profiles of the hub: fetched by commit, checked, and kept. Knows nothing of the hub's protocol."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from kvtuner.errors import HubError, ProfileError, SignatureError
from kvtuner.exported_configs.profile.evaluation_record import EVALUATION, SUFFIX, parse_evaluation
from kvtuner.exported_configs.profile.fields import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.hub_client import HubClient
from kvtuner.exported_configs.sharing.profile_store import (
    ORIGIN,
    FetchedProfile,
    Origin,
    find_stored,
    remember,
    remembered,
    store,
)
from kvtuner.exported_configs.sharing.reference import HubReference, check_digest
from kvtuner.exported_configs.signing.signature_bundle import SIGNATURE, read_bundle
from kvtuner.exported_configs.signing.signature_bundle import SUFFIX as SIGNATURE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_COMPANIONS: Final = 32


@dataclass(frozen=True, slots=True)
class Pulled:
    """A profile of the hub, on this machine.

    Attributes:
        stored: The profile in the store.
        notes: Advice to the user: a revision that may move or that moved, and files that were left out.
    """

    stored: FetchedProfile
    notes: tuple[str, ...] = ()


def pull(reference: HubReference) -> Pulled:
    """Fetch a profile with its evaluations and signature, check it, and keep it.

    A commit that is kept whole is not fetched again. With ``HF_HUB_OFFLINE`` nothing is fetched at all.

    Raises:
        HubError: it cannot be had.
        ProfileError: the file is no profile, or not the one that was pinned.
        RunFolderError: it cannot be kept.
    """
    if PurePosixPath(reference.path).name == ORIGIN:
        raise ProfileError(f"{reference} is no name for a profile; name another file")
    kept = find_stored(reference.repo, reference.revision, reference.path)
    if kept is not None:
        check_digest(kept.digest, reference.digest, str(reference))
        return Pulled(kept)
    hub = HubClient()
    if hub.is_offline:
        return _pull_offline(reference)
    listing = hub.listing(reference.repo, reference.revision)
    at = reference.at(listing.commit)
    kept = find_stored(at.repo, at.revision, at.path)
    notes: tuple[str, ...] = ()
    if kept is None:
        kept, notes = _fetch(hub, at, listing.sizes)
    check_digest(kept.digest, reference.digest, str(at))
    if reference.is_commit:
        return Pulled(kept, notes)
    moved = remember(reference.repo, reference.revision, listing.commit)
    return Pulled(kept, (*_notes(reference, listing.commit, moved), *notes))


def _fetch(hub: HubClient, at: HubReference, sizes: Mapping[str, int | None]) -> tuple[FetchedProfile, tuple[str, ...]]:
    """Fetch a commit's profile with its companions; a damaged companion is left out, with a note."""
    if at.path not in sizes:
        profiles = [name for name in sorted(sizes) if name.endswith(".json") and SUFFIX not in name]
        known = f"; it has {', '.join(profiles[:8])}" if profiles else ""
        raise HubError(f"{at}: the repository has no file {at.path}{known}")
    data = _bounded(hub, at, sizes, MAX_PROFILE_BYTES)
    try:
        digest = load_profile(data).digest
    except ProfileError as error:
        raise ProfileError(f"{at} holds no valid profile: {error}") from error
    check_digest(digest, at.digest, str(at))
    files, notes = {PurePosixPath(at.path).name: data}, []
    for name, limit in _companions(at.path, sizes):
        beside = HubReference(at.repo, at.revision, name)
        content = _bounded(hub, beside, sizes, limit)
        try:
            _check_companion(name, content, digest)
        except (ProfileError, SignatureError) as error:
            notes.append(f"left out {beside}: {error}")
            continue
        files[PurePosixPath(name).name] = content
    return store(digest, files, Origin(at.repo, at.revision, at.path)), tuple(notes)


def _bounded(hub: HubClient, at: HubReference, sizes: Mapping[str, int | None], limit: int) -> bytes:
    size = sizes[at.path]
    if size is None or size > limit:
        raise HubError(f"{at} has {size} bytes, above {limit}; this is none of ours")
    return hub.fetch(at, limit)


def _check_companion(name: str, content: bytes, digest: str) -> None:
    if name.endswith(SIGNATURE_SUFFIX):
        read_bundle(content)
    elif parse_evaluation(content).profile_digest != digest:
        raise ProfileError("it evaluates another profile")


def _companions(path: str, names: Mapping[str, int | None]) -> list[tuple[str, int]]:
    """The paths of a profile's evaluations and signature, each with its largest size."""
    stem = path.removesuffix(".json")
    evaluations = [
        (name, EVALUATION.max_bytes)
        for name in sorted(names)
        if name.startswith(stem + SUFFIX)
        and name.endswith(".json")
        and "/" not in name.removeprefix(stem)
        and name.isprintable()
    ]
    if len(evaluations) > MAX_COMPANIONS:
        raise HubError(
            f"{path} has {len(evaluations)} evaluations beside it, above {MAX_COMPANIONS}; ask its owner for less"
        )
    return evaluations + [(name, SIGNATURE.max_bytes) for name in names if name == path + SIGNATURE_SUFFIX]


def _notes(reference: HubReference, commit: str, before: str | None) -> tuple[str, ...]:
    notes = [f"{reference} may change; it is {reference.at(commit)} now: name that to keep it"]
    if before not in (None, commit):
        notes.append(f"{reference} moved: it was {before} when it was pulled last")
    return tuple(notes)


def _pull_offline(reference: HubReference) -> Pulled:
    commit = reference.revision if reference.is_commit else remembered(reference.repo, reference.revision)
    kept = None if commit is None else find_stored(reference.repo, commit, reference.path)
    if kept is None:
        raise HubError(
            f"{reference}: HF_HUB_OFFLINE is set and it was never pulled; pull it once without, or name a file"
        )
    check_digest(kept.digest, reference.digest, str(reference))
    note = f"HF_HUB_OFFLINE: {reference} as it was when it was pulled last, {commit}"
    return Pulled(kept, () if reference.is_commit else (note,))
