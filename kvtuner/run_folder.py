"""The folder of a run, which may be killed at any moment: atomic files, checksums, an event log, identities, a lock.

Knows nothing of what is stored in it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from kvtuner.errors import RunFolderError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

EVENTS = "events.jsonl"
LINE_CHECKSUM = "crc32"
RUNS = "runs"
"""The folder of run folders, where nobody names another."""


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces and UTF-8 kept; NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_of(value: Any) -> str:
    """``sha256:`` and the hex digest of the canonical JSON of `value`."""
    return "sha256:" + hashlib.sha256(canonical_json(value).encode()).hexdigest()


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader sees the old or the new content, never a half.

    Raises:
        RunFolderError: The disk is full or the folder cannot be written.
    """
    write_together({path: data})


def write_together(files: Mapping[Path, bytes | str]) -> None:
    """Write files so that a reader sees the old or the new content of each, never a half.

    All are on the disk before the first takes its name, so that a full disk changes none. They take their names in
    their order, one at once after the other; a process that is killed in between leaves the first new, the rest old.

    Raises:
        RunFolderError: The disk is full or a folder cannot be written.
    """
    partials = {path: path.with_name(f".{path.name}.{os.getpid()}.partial") for path in files}
    try:
        for path, data in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with partials[path].open("wb") as handle:
                handle.write(data.encode() if isinstance(data, str) else data)
                handle.flush()
                os.fsync(handle.fileno())
        for path, partial in partials.items():
            partial.replace(path)
    except OSError as error:
        raise _write_error(path, error) from error
    finally:  # of an interrupt, too
        for partial in partials.values():
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def _write_error(path: Path, error: OSError) -> RunFolderError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunFolderError(f"no space left to write {path}; free some and run the same command again to resume")
    return RunFolderError(f"cannot write {path}: {error.strerror or error}; choose another place, or make it writable")


class LostLockError(Exception):
    """A log was not held to the end, and has nothing of what was appended: decide anew, and append again."""


class LockedLog:
    """A log that this process alone appends to."""

    def __init__(self, path: Path, handle: BinaryIO) -> None:
        self._path, self._handle = path, handle

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append JSON lines with checksums; they are durable after `sync`."""
        lines = "".join(with_checksum(record) + "\n" for record in records).encode()
        self._handle.seek(0, os.SEEK_END)
        if lines and self._handle.tell() and not _ends_with_newline(self._path):
            lines = b"\n" + lines
        self._handle.write(lines)
        self._handle.flush()

    def sync(self) -> None:
        """Wait until what was appended survives a loss of power."""
        os.fsync(self._handle.fileno())


class RunFolder:
    """One run's files, each written atomically; the log only grows."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def file(self, name: str) -> Path:
        """The path of one file in the folder."""
        return self.path / name

    def create(self) -> None:
        """Make the folder, or raise `RunFolderError`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _write_error(self.path, error) from error

    def log(self, event: str, **fields: Any) -> None:
        """Append one line to the event log: UTC seconds, process id, event and its fields."""
        self.append(EVENTS, {"time": round(time.time(), 3), "pid": os.getpid(), "event": event, **fields})

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Append JSON lines with checksums durably, beside other processes; `records` drops a cut or changed one.

        Raises:
            RunFolderError: The disk is full or the folder cannot be written or locked.
        """
        is_there = not records
        while not is_there:
            with contextlib.suppress(LostLockError):
                with self.exclusive(name) as log:
                    log.append(*records)
                    log.sync()
                is_there = True

    @contextlib.contextmanager
    def exclusive(self, name: str) -> Iterator[LockedLog]:
        """Hold a log, so that no other process appends to it meanwhile.

        Raises:
            RunFolderError: The disk is full or the folder cannot be written or locked.
            LostLockError: Raised at the end of the block by a folder in a database that went away meanwhile.
        """
        path = self.file(name)
        try:
            with path.open("ab") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX)  # until the file is closed
                yield LockedLog(path, handle)
        except OSError as error:
            raise _write_error(path, error) from error

    def records(self, name: str) -> Iterator[dict[str, Any]]:
        """The records of a log in their order, without lines that a kill cut or that changed."""
        yield from self.records_after(name, 0)[0]

    def records_after(self, name: str, position: int) -> tuple[list[dict[str, Any]], int]:
        """The records after a position of a log, 0 or one that this returned, and the position after them.

        Lines that a kill cut or that changed are left out; one that may still be written is read the next time.
        """
        path = self.file(name)
        if not path.exists():
            return [], position
        if path.stat().st_size < position:  # another file by the same name
            position = 0
        found: list[dict[str, Any]] = []
        with path.open("rb") as handle:
            handle.seek(position)
            for line in handle:
                record = read_line(line)
                if record is None and not line.endswith(b"\n"):
                    break
                position += len(line)
                if record is not None:
                    found.append(record)
        return found, position

    def write_checked(self, name: str, payload: Mapping[str, Any]) -> None:
        """Write a JSON object with its own checksum."""
        plain = _as_read_back(payload)
        document = {"checksum": sha256_of(plain), "payload": plain}
        write_atomically(self.file(name), json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")

    def read_checked(self, name: str) -> dict[str, Any]:
        """Read what `write_checked` wrote.

        Raises:
            RunFolderError: The file is absent, not JSON, or its checksum does not match.
        """
        path = self.file(name)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(document, dict) or set(document) != {"checksum", "payload"}:
                raise ValueError("no checksum")
            payload = document["payload"]
            if not isinstance(payload, dict) or sha256_of(payload) != document["checksum"]:
                raise ValueError("checksum differs")
            return payload
        except FileNotFoundError as error:
            raise RunFolderError(f"{path} does not exist; run kvtuner calibrate first") from error
        except (OSError, ValueError, RecursionError) as error:
            raise RunFolderError(
                f"{path} is damaged ({error}); delete it and run the command that wrote it again"
            ) from error

    def has(self, name: str) -> bool:
        """Whether `read_checked` has something to read."""
        return self.file(name).exists()

    def check_identity(self, name: str, identity: Mapping[str, Any], what: str) -> None:
        """Bind the folder to an identity, plain JSON of what a noun names, or compare it with the one it is bound to.

        Raises:
            RunFolderError: The folder belongs to something else; names the first field that differs.
        """
        if not self.has(name):
            self.create()
            self.write_checked(name, identity)
            return
        refuse_difference(self.read_checked(name), identity, f"{self.path} holds the {what} of another run")

    @contextlib.contextmanager
    def lock(self, name: str, waiting: str | None = None) -> Iterator[None]:
        """Hold a lock, which the end of the process frees; the reason for waiting is logged if another one holds it.

        Raises:
            RunFolderError: The file cannot be made, or its file system has no locks.
        """
        self.create()
        path = self.file(name)
        try:
            handle = path.open("a")
        except OSError as error:
            raise _write_error(path, error) from error
        with handle:
            if not _try_lock(path, handle, fcntl.LOCK_NB):
                if waiting:
                    self.log("waiting", reason=waiting)
                _try_lock(path, handle, 0)
            try:
                yield
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)


def refuse_difference(recorded: Mapping[str, Any], identity: Mapping[str, Any], complaint: str) -> None:
    """Refuse identities that differ with `RunFolderError`, which names the first field that does."""
    order = dict.fromkeys([*identity, *recorded])
    recorded, identity = _as_read_back(recorded), _as_read_back(identity)
    for key in order:
        if recorded.get(key) != identity.get(key):
            raise RunFolderError(
                f"{complaint}: {key} is {_short(recorded.get(key))} there and {_short(identity.get(key))} here;"
                " choose another folder with --out"
            )


def _as_read_back(value: Mapping[str, Any]) -> dict[str, Any]:
    """A value after JSON: tuples become lists, keys strings."""
    plain: dict[str, Any] = json.loads(canonical_json(value))
    return plain


def with_checksum(record: Mapping[str, Any]) -> str:
    """A record as a line of a log, which `read_line` reads."""
    plain = _as_read_back(record)
    return canonical_json({**plain, LINE_CHECKSUM: _line_checksum(plain)})


def _line_checksum(record: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def _try_lock(path: Path, handle: IO[str], flags: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _write_error(path, error) from error
    return True


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as handle:
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) == b"\n"


def _short(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line of a log; None where a kill cut the line or it changed."""
    with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
        record = json.loads(line)
        if isinstance(record, dict) and record.pop(LINE_CHECKSUM, None) == _line_checksum(record):
            return record
    return None
