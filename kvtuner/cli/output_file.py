"""The files that ``--html`` and ``--out`` may write: pages over pages, other files by force. Knows no contents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvtuner.errors import ProfileError, RunFolderError
from kvtuner.run_folder import write_atomically

_BEGINNING: Final = b"<!DOCTYPE html>"


def write_page(path: Path, text: str) -> None:
    """Write a page, over another page but over no other file; a reader sees the old one or the new one.

    Raises:
        RunFolderError: The path is a folder or a file that is no page, or the disk is full or cannot be written.
    """
    try:
        if path.is_dir():
            raise RunFolderError(f"--html {path} is a folder; name a file in it, such as {path / 'profile.html'}")
        if path.exists() and not _is_page(path):
            raise RunFolderError(f"--html {path} is there and is no HTML page; name another file, or remove it")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as error:
        raise RunFolderError(f"--html {path} cannot be written ({error.strerror}); name another file") from error
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise RunFolderError(f"--html {path}: {folder} is no folder that can be written; name another file")
    write_atomically(path, text.encode(errors="replace"))


def check_new(out: str | None, *, force: bool) -> None:
    """Refuse to overwrite a file without ``--force``."""
    if out is not None and os.path.lexists(out) and not force:
        raise ProfileError(f"{out} is there already; name another --out, or overwrite it with --force")


def check_new_profile(out: str | None, *, force: bool) -> None:
    """Refuse to overwrite a profile, or to replace the side file at its place, without ``--force``."""
    from kvtuner.exported_configs.profile.constants_file import constants_path

    check_new(out, force=force)
    if out is not None:
        check_new(str(constants_path(Path(out))), force=force)


def _is_page(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(len(_BEGINNING)).lower() == _BEGINNING.lower()
