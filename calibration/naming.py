"""What may be written into a profile instead of a path of this machine."""

from __future__ import annotations

from pathlib import Path

MAX_LENGTH = 200


def public_name(text: str) -> str:
    """The last part of an existing path, or a hub id as it is; printable and short enough for a profile."""
    path = Path(text).expanduser()
    name = path.resolve().name if path.exists() else text
    printable = "".join(c if c.isprintable() else "_" for c in name).strip().lstrip("./~\\")
    return printable[:MAX_LENGTH].strip() or "unnamed"
