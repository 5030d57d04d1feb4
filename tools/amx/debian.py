"""Files of Debian's archive, each of the hash that a caller or the release's index names. Knows no machine."""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import tarfile
import urllib.request
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

ARCHIVE: Final = "https://deb.debian.org/debian"
RELEASE: Final = "trixie"


def fetch(path: str, sha256: str, folder: Path) -> Path:
    """A file of the archive in a folder, fetched unless it is there; `OSError` where its hash is another one."""
    file = folder / path.rpartition("/")[2]
    if not file.exists():
        data = _read(path)
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise OSError(f"{ARCHIVE}/{path} has the SHA-256 {found}, not {sha256}")
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.part")
        part.write_bytes(data)
        part.replace(file)
    return file


def fetch_package(pattern: str, folder: Path) -> tuple[str, tarfile.TarFile]:
    """The name and the files of the release's newest package for amd64 whose name is a pattern's."""
    index = lzma.decompress(_read(f"dists/{RELEASE}/main/binary-amd64/Packages.xz")).decode()
    entries = [dict(re.findall(r"^([\w-]+): (.*)$", text, re.MULTILINE)) for text in index.split("\n\n")]
    matching = [entry for entry in entries if re.fullmatch(pattern, entry.get("Package", ""))]
    newest = max(matching, key=lambda entry: [int(number) for number in re.findall(r"\d+", entry["Version"])])
    file = fetch(newest["Filename"], newest["SHA256"], folder)
    return newest["Package"], _files_in(file)


def _files_in(package: Path) -> tarfile.TarFile:
    """The files that a package installs: an ar archive's member data.tar."""
    data, place = package.read_bytes(), 8
    while not data[place:].startswith(b"data.tar"):
        size = int(data[place + 48 : place + 58])
        place += 60 + size + size % 2
    size = int(data[place + 48 : place + 58])
    return tarfile.open(fileobj=io.BytesIO(data[place + 60 : place + 60 + size]))


def _read(path: str) -> bytes:
    with urllib.request.urlopen(f"{ARCHIVE}/{path}", timeout=120) as answer:
        data: bytes = answer.read()
    return data
