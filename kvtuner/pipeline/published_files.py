"""The files that a push publishes, a run's profiles, evaluations, signatures, report and card; and copies of a pull."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ProfileError, SignatureError
from kvtuner.exported_configs.profile.build import dump_constants, write_files
from kvtuner.exported_configs.profile.constants_file import MAX_CONSTANTS_BYTES, constants_name, constants_path
from kvtuner.exported_configs.profile.document import first_bytes, naming
from kvtuner.exported_configs.profile.evaluation_record import (
    EVALUATION,
    EvaluatedProfile,
    evaluation_files,
    parse_evaluation,
)
from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.card import card
from kvtuner.exported_configs.sharing.reference import PROFILE_FILE, HubReference, profile_files
from kvtuner.exported_configs.signing.signature_bundle import SIGNATURE, SIGNATURE_SUFFIX, read_bundle
from kvtuner.report.formatting import printable
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from kvtuner.exported_configs.sharing.profile_store import FetchedProfile
    from kvtuner.exported_configs.sharing.push import Upload
    from kvtuner.exported_configs.sharing.reference import ResolvedProfile

README: Final = "README.md"
REPORT: Final = "report.html"
_MAX_REPORT_BYTES: Final = 2**25
_MAX_PICTURE_BYTES: Final = 2**22
_MAX_SHOWN_PICTURES: Final = 4
_PNG: Final = b"\x89PNG\r\n\x1a\n"


def published_files(
    path: Path, repo: str, *, license_id: str, with_report: bool, branch: str | None = None
) -> dict[str, bytes]:
    """The content of a commit that publishes a profile or the profiles of a run folder, by path in the repository.

    What is sent is what was checked: files that belong to their profile, signatures of its content, profiles of one
    model. A report goes with them where the run has one and `with_report` says so. The card's commands read the branch,
    the main one by default, and pin digests, since a branch may move.
    """
    sources = profile_files(path)
    # One profile is found without being named.
    names = [PROFILE_FILE] if len(sources) == 1 else [source.name for source in sources]
    files: dict[str, bytes] = {}
    places = [HubReference(repo, branch or "main", name) for name in names]
    entries = [_add_profile(files, source, place) for source, place in zip(sources, places, strict=True)]
    pictures = []
    if with_report and path.is_dir():
        pictures = [picture for source in sources for picture in _add_report(files, path, source.stem)]
    text = card(repo, entries, license_id=license_id, pictures=pictures[:_MAX_SHOWN_PICTURES])
    return {README: text.encode(), **files}


def preview_text(upload: Upload) -> str:
    """The preview of a commit, for a person to agree to."""
    branch = f"@{upload.branch}" if upload.branch else ""
    kind = {True: "private", False: "public", None: "private or public"}[upload.is_private]
    onto = f"onto {upload.head.commit} of a {kind} repository" if upload.head else f"a new {kind} repository"
    there, adds = (upload.head.sizes if upload.head else {}), "adds    "
    if upload.unknown_head is not None:
        onto = f"onto what nobody here knows ({kind}), so that files may also be replaced and removed"
        adds = "uploads "
    lines = [f"{upload.repo}{branch}: {onto}" + (", as a pull request" if upload.create_pr else "")]
    lines += [f"  ({printable(upload.unknown_head)})"] if upload.unknown_head is not None else []
    lines += [
        f"  {'replaces' if name in there else adds} {printable(name)}  {len(data):,} bytes"
        for name, data in upload.files.items()
    ]
    lines += [f"  removes  {printable(name)}" for name in upload.removed]
    readme = upload.files[README].decode()
    return "\n".join([*lines, "", *(f"  | {printable(line)}" for line in readme.splitlines()), ""])


def upload_facts(upload: Upload) -> dict[str, Any]:
    """The contents of a commit as plain JSON values."""
    return {
        "repo": upload.repo,
        "branch": upload.branch,
        "private": upload.is_private,
        "parent": upload.head.commit if upload.head else None,
        "unknown_parent": upload.unknown_head,
        "files": {name: len(data) for name, data in upload.files.items()},
        "removed": list(upload.removed),
        "card": upload.files[README].decode(),
    }


def copy_fetched(fetched: FetchedProfile | ResolvedProfile, profile: Path, signature: Path) -> None:
    """Copy a profile with its side file and its signature, where it has them; those of another one are removed."""
    data = fetched.path.read_bytes()
    side_file = dump_constants(load_profile(data, fetched.path))
    write_files(profile, data, side_file)
    source = fetched.path.with_name(fetched.path.name + SIGNATURE_SUFFIX)
    if source.exists():
        write_atomically(signature, source.read_bytes())
    else:
        signature.unlink(missing_ok=True)


def _add_profile(files: dict[str, bytes], source: Path, place: HubReference) -> EvaluatedProfile:
    """Add a profile with its evaluations and its signature, for a place of the hub; returns its part of the card."""
    name = place.path
    data = files[name] = _read(source, MAX_PROFILE_BYTES)
    profile = load_profile(data, source, read_constants=lambda: _read(constants_path(source), MAX_CONSTANTS_BYTES))
    if (side_file := dump_constants(profile)) is not None:
        files[constants_name(name)] = side_file
    evaluations = []
    for file in evaluation_files(source):
        content = _read(file, EVALUATION.max_bytes)
        with naming(file, EVALUATION):
            evaluation = parse_evaluation(content)
        if evaluation.profile_digest != profile.digest:
            raise ProfileError(
                f"{file.name} evaluates another profile than {source.name}; remove it, or evaluate this one"
            )
        evaluations.append(evaluation)
        # Under the name that the profile gets.
        files[file.name.replace(source.stem, name.removesuffix(".json"), 1)] = content
    signature = source.with_name(source.name + SIGNATURE_SUFFIX)
    if signature.exists():  # whoever pulls checks whose it is
        content = files[name + SIGNATURE_SUFFIX] = _read(signature, SIGNATURE.max_bytes)
        if read_bundle(content).sha256 != hashlib.sha256(data).hexdigest():
            raise SignatureError(
                f"{signature} signs another content than the profile has now; sign it again, or remove it"
            )
    return EvaluatedProfile(name, f"{place}#{profile.digest}", profile, tuple(evaluations))


def _add_report(files: dict[str, bytes], run: Path, profile: str) -> list[str]:
    """Add the report of a run's profile and its pictures; returns the paths of the pictures."""
    from kvtuner.report.plots.search_plots import PICTURES  # brings matplotlib, which not every push needs

    # A run of several profiles has a folder for each one's report.
    suffix = profile.removeprefix("profile")
    folder, prefix = (run / f"report{suffix}", f"report{suffix}/") if suffix else (run, "")
    report = folder / REPORT
    if report.exists():
        files[prefix + REPORT] = _read(report, _MAX_REPORT_BYTES)
    pictures = {f"{prefix}pictures/{name}.png": folder / f"{name}.png" for name in PICTURES}
    pictures = {place: picture for place, picture in pictures.items() if picture.exists()}
    for place, picture in pictures.items():
        files[place] = _read(picture, _MAX_PICTURE_BYTES)
        if not files[place].startswith(_PNG):
            raise ProfileError(f"{picture} is no picture of a report; write the report again, or push --no-report")
    return list(pictures)


def _read(path: Path, limit: int) -> bytes:
    """A file's content; a link could publish what lies elsewhere."""
    if path.is_symlink():
        raise ProfileError(f"{path} is a link, and a push takes files only; push what it points to")
    try:
        data = first_bytes(path, limit + 1)
    except OSError as error:
        reason = error.strerror or error
        raise ProfileError(f"{path} cannot be read ({reason}); name a profile or a run folder") from error
    if len(data) > limit:
        raise ProfileError(f"{path} is larger than {limit} bytes; push without it")
    return data
