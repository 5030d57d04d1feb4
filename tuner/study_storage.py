"""Opens the storage of a study, and tells what is wrong with one that cannot be used. Knows nothing of layers."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import optuna
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import URL, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from kvtuner.errors import RunFolderError
from kvtuner.run_folder import RunFolder, refuse_difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOCK_TIMEOUT_S: Final = 60.0
IDENTITY_ATTRIBUTE: Final = "identity"
JOURNAL: Final = "journal:///"
STORAGE_ERRORS: Final = (SQLAlchemyError, sqlite3.Error, optuna.exceptions.StorageInternalError)

_OPTUNA_TABLES: Final = {"studies", "version_info"}
# By part of the message of SQLite or of the operating system.
_REMEDIES: Final = {
    "locked": "another program holds it; end that and run the same command again",
    "No space": "free some space and run the same command again to resume",
    "full": "free some space and run the same command again to resume",
    "readonly": "make it writable or choose another folder with --out",
    "unable to open": "choose another folder with --out",
}
_DAMAGED: Final = "delete it and run the same command again: its trials are measured anew"
_UNREACHED: Final = "check the URL, and that the database is there and lets you in"


@contextlib.contextmanager
def storage_errors(url: str | None) -> Iterator[None]:
    """Turn what a broken storage raises into one line.

    Raises:
        RunFolderError: The storage is damaged, locked, full, of another program or cannot be reached.
    """
    try:
        yield
    except (*STORAGE_ERRORS, OSError) as error:
        is_journal = url is not None and url.startswith(JOURNAL)
        if isinstance(error, OSError) and not is_journal:
            raise
        cause: BaseException = error  # SQLAlchemy's and Optuna's errors wrap the one that says what is wrong
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = str(getattr(cause, "orig", None) or cause).split("\n")[0]
        is_file = is_journal or (url is not None and _parsed(url).get_backend_name() == "sqlite")
        otherwise = _DAMAGED if is_file else _UNREACHED
        remedy = next((remedy for word, remedy in _REMEDIES.items() if word in reason), otherwise)
        raise RunFolderError(f"the study in {printable_url(url)} cannot be used ({reason}): {remedy}") from error


def printable_url(url: str | None) -> str:
    """The URL without its password."""
    if url is None:
        return "memory"
    try:
        return make_url(url).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return url.rpartition("@")[2]


def sqlite_url(path: Path) -> str:
    """The URL of an SQLite database in a file, whatever characters its path has."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def is_shared_database(url: str | None) -> bool:
    """Whether a storage is a database that other machines reach, and not a file."""
    return url is not None and not url.startswith(JOURNAL) and _parsed(url).get_backend_name() != "sqlite"


def _parsed(url: str) -> URL:
    try:
        return make_url(url)
    except (ArgumentError, ValueError) as error:
        raise _no_storage(error) from error


def _no_storage(reason: object) -> RunFolderError:
    return RunFolderError(f"a study is stored in sqlite:///PATH, journal:///PATH or a database: {reason}")


def _sqlite_file(url: str) -> Path | None:
    """The file of an SQLite database, by whatever spelling of its URL; None for other databases.

    Raises:
        RunFolderError: It is no URL, or one of SQLite with a query, another driver or no file.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if "?" in url:
        raise _no_storage(f"{printable_url(url)} has a query after its '?', which SQLite's cannot have")
    if parsed.get_driver_name() != "pysqlite" or not parsed.database or parsed.database == ":memory:":
        raise _no_storage(f"{printable_url(url)} is no sqlite:///PATH")
    return Path(parsed.database)


def open_storage(url: str | None) -> optuna.storages.BaseStorage:
    """Open ``sqlite:///PATH``, ``journal:///PATH`` or any database URL of SQLAlchemy; None is memory.

    Raises:
        RunFolderError: It cannot be opened, or holds something else than Optuna's studies.
    """
    if url is None:
        return InMemoryStorage()
    if url.startswith(JOURNAL):
        return _open_journal(Path(url.removeprefix(JOURNAL)))
    options: dict[str, Any] = {"pool_pre_ping": True}
    path = _sqlite_file(url)
    if path is not None:
        _check_sqlite(path)
        options = {"creator": lambda: _connect(path)}
    try:
        storage = RDBStorage(url, engine_kwargs=options)
    except (ImportError, ValueError, ArgumentError) as error:
        raise _no_storage(error) from error
    except RuntimeError as error:
        raise RunFolderError(f"{printable_url(url)} is of another Optuna: {str(error).splitlines()[0]}") from error
    if path is not None:
        # Optuna takes a queued trial by reading and then writing its state. SQLite has no SELECT ... FOR UPDATE, and
        # its driver begins a transaction at the first write: without this two workers can take the same trial.
        event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return storage


def _open_journal(path: Path) -> JournalStorage:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise RunFolderError(f"{path} is no journal of a study ({error}): {_DAMAGED}") from error


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, check_same_thread=False, isolation_level=None)
    # Each of a trial's parameters is a commit of its own, and each would wait for the disk. A killed process loses
    # nothing by this; after a power cut the file may be damaged, which is noticed, and can be measured anew.
    connection.execute("PRAGMA synchronous=OFF")
    return connection


def _check_sqlite(path: Path) -> None:
    """Refuse a database that is not Optuna's, before Optuna puts its tables in it."""
    if not path.exists():
        return
    with contextlib.closing(_connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise sqlite3.DatabaseError(damage.splitlines()[-1])
    if tables and not tables & _OPTUNA_TABLES:
        raise RunFolderError(f"{path} is a database of another program; choose another folder with --out")


@contextlib.contextmanager
def opening_lock(url: str | None) -> Iterator[None]:
    """Let one process at a time create a study, bind it and queue its first trials, where files can be locked."""
    if url is None:
        path = None
    elif url.startswith(JOURNAL):
        path = Path(url.removeprefix(JOURNAL))
    else:
        path = _sqlite_file(url)
    if path is None:
        yield
        return
    with RunFolder(path.parent).lock(f".{path.name}.lock"):
        yield


def bind_identity(study: optuna.Study, identity: Mapping[str, Any], url: str | None) -> bool:
    """Bind a study to what it measures, or compare it with what it is bound to; True if it was unbound.

    Raises:
        RunFolderError: It measures something else; names the first field that differs.
    """
    bound = study.user_attrs.get(IDENTITY_ATTRIBUTE)
    if bound is None:
        if study.get_trials(deepcopy=False):
            raise RunFolderError(f"{printable_url(url)} holds a study of another program; choose another name")
        study.set_user_attr(IDENTITY_ATTRIBUTE, dict(identity))
        return True
    refuse_difference(bound, identity, f"the study {study.study_name!r} in {printable_url(url)} is of another run")
    return False
