"""Opens the storage of a study, and tells what is wrong with one that cannot be used. Knows nothing of layers."""

from __future__ import annotations

import contextlib
import sqlite3
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import optuna
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import URL, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from kvtuner.errors import RunFolderError
from kvtuner.run_folder import RunFolder, refuse_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOCK_TIMEOUT_S: Final = 60.0
IDENTITY_ATTRIBUTE: Final = "identity"
JOURNAL: Final = "journal:///"
STORAGE_ERRORS: Final = (SQLAlchemyError, sqlite3.Error, optuna.exceptions.StorageInternalError)

_OPTUNA_TABLES: Final = {"studies", "version_info"}
_FULL: Final = "free some space and run the same command again to resume"
_READ_ONLY: Final = "make it writable, or choose another folder with --out or another place with --storage"
_ELSEWHERE: Final = "choose another folder with --out or another place with --storage"
_DAMAGED: Final = "delete it and run the same command again: its trials are measured anew"
_UNREACHED: Final = "check the URL, and that the database is there and lets you in"
_UNKNOWN: Final = "see to that and run the same command again to resume"
# By part of what SQLite or the operating system says of a file.
_REMEDIES: Final = {
    "locked": "another program holds it; end that and run the same command again",
    "No space": _FULL,
    "quota": _FULL,
    "full": _FULL,
    "readonly": _READ_ONLY,
    "Read-only": _READ_ONLY,
    "Permission denied": _READ_ONLY,
    "not permitted": _READ_ONLY,
    "unable to open": _ELSEWHERE,
    "directory": _ELSEWHERE,  # there is none, or one in place of a file
    "not a database": _DAMAGED,
    "malformed": _DAMAGED,
}

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


class StorageErrors:
    """Turns what a broken storage raises into one line, but nothing that a function of `outside` raised."""

    def __init__(self, url: str | None) -> None:
        """Watch the storage of that URL; None is memory."""
        self._url = url
        self._raised_outside: BaseException | None = None

    def outside(self, call: Callable[Given, Returned]) -> Callable[Given, Returned]:
        """A function that does not use the storage: its errors are its own, such as those of a file that it reads."""

        @wraps(call)
        def watched(*given: Given.args, **named: Given.kwargs) -> Returned:
            try:
                return call(*given, **named)
            except Exception as error:
                self._raised_outside = error
                raise

        return watched

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Name the storage, the reason and the way out.

        Raises:
            RunFolderError: The storage is damaged, locked, full, of another program or cannot be reached.
        """
        try:
            yield
        except (*STORAGE_ERRORS, OSError) as error:
            is_journal = self._url is not None and self._url.startswith(JOURNAL)
            if error is self._raised_outside or (isinstance(error, OSError) and not is_journal):
                raise
            raise RunFolderError(_complaint(self._url, error)) from error


def _complaint(url: str | None, error: Exception) -> str:
    cause, is_refused = error, False  # SQLAlchemy's and Optuna's errors wrap the one that says what is wrong
    while True:
        if isinstance(cause, DBAPIError):  # of a statement, on a connection that holds
            is_refused = cause.statement is not None and not cause.connection_invalidated
        if not isinstance(cause.__cause__, Exception):
            break
        cause = cause.__cause__
    reason = str(getattr(cause, "orig", None) or cause).split("\n")[0]
    if is_shared_database(url):
        is_full = any(word in reason for word, remedy in _REMEDIES.items() if remedy is _FULL)
        remedy = _FULL if is_full else _UNKNOWN if is_refused else _UNREACHED
    else:
        # Of the operating system's error the words alone, without the path.
        words = cause.strerror or reason if isinstance(cause, OSError) else reason
        remedy = next((remedy for word, remedy in _REMEDIES.items() if word in words), _UNKNOWN)
    return f"the study in {printable_url(url)} cannot be used ({reason}): {remedy}"


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


def _file_of(url: str) -> Path | None:
    """The file of a journal or an SQLite database, by whatever spelling of its URL; None for other databases.

    Raises:
        RunFolderError: It is no URL, or one of SQLite with a query, another driver or no file.
    """
    if url.startswith(JOURNAL):
        return Path(url.removeprefix(JOURNAL))
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
    path = _file_of(url)
    if path is not None and url.startswith(JOURNAL):
        return _open_journal(path)
    options: dict[str, Any] = {"pool_pre_ping": True}
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
    except OSError as error:
        raise RunFolderError(_complaint(JOURNAL + str(path), error)) from error
    except (ValueError, KeyError, TypeError, AssertionError) as error:
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
        raise RunFolderError(f"{path} is a damaged database ({damage.splitlines()[-1]}): {_DAMAGED}")
    if tables and not tables & _OPTUNA_TABLES:
        raise RunFolderError(f"{path} is a database of another program; choose another folder with --out")


@contextlib.contextmanager
def opening_lock(url: str | None) -> Iterator[None]:
    """Let one process at a time create a study, bind it and queue its first trials, where files can be locked.

    Raises:
        RunFolderError: A folder in place of a file, or one that cannot be written.
    """
    path = None if url is None else _file_of(url)
    if path is None:
        yield
        return
    if _is_folder(path):
        raise RunFolderError(f"{path} is a folder, but a study is stored in a file; give --storage one in that folder")
    with RunFolder(path.parent).lock(f".{path.name}.lock"):
        yield


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # nobody may look: the lock says why
        return False


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
