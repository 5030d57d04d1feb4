"""A run folder whose logs, tables and claims live in a database, so that machines share no file system.

The folder itself holds what a person reads: profiles, reports, and copies of the tables. Knows nothing of Optuna.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    delete,
    insert,
    make_url,
    select,
)
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)

from kvtuner.errors import RunFolderError
from kvtuner.run_folder import LockedLog, LostLockError, RunFolder, read_line, with_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from sqlalchemy import Connection, Engine

PATIENCE_S: Final = 60.0
"""The time that a database may be away, as while it restarts."""
_RETRY_S: Final = 0.5
_ROLLED_BACK: Final = "40"
"""The class of SQL states by which a database asks to begin a transaction again, such as one of a deadlock."""
_NAME: Final = 255
_METADATA: Final = MetaData()
_LINES: Final = Table(
    "kvtuner_lines",
    _METADATA,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("run", String(_NAME), nullable=False, index=True),
    Column("name", String(_NAME), nullable=False),
    Column("token", String(36), nullable=False, unique=True),
    Column("record", Text, nullable=False),
)
_DOCUMENTS: Final = Table(
    "kvtuner_documents",
    _METADATA,
    Column("run", String(_NAME), primary_key=True),
    Column("name", String(_NAME), primary_key=True),
    Column("document", Text, nullable=False),
)
_LOCKS: Final = Table(
    "kvtuner_locks",
    _METADATA,
    Column("run", String(_NAME), primary_key=True),
    Column("name", String(_NAME), primary_key=True),
)

Answer = TypeVar("Answer")


class DatabaseFolder(RunFolder):
    """A run folder of which the database has the logs and the checked files, under the folder's last name.

    A line is in the database when `append` returns, or an error says that it may not be. While a database that was
    there is away every call waits for up to `PATIENCE_S`; what is written again then is there once. Whatever else it
    refuses is an error at once.
    """

    def __init__(self, path: Path | str, url: str) -> None:
        """Open or make the tables; processes may do so at the same time.

        Raises:
            RunFolderError: The database cannot be reached or lets nobody in, or its driver is not installed.
        """
        super().__init__(path)
        self._run = self.path.resolve().name
        self._engine = _open(url)
        self._known_locks = set[str]()
        self._url = make_url(url)
        try:
            self._engine.connect().close()
            self._patiently(self._create_tables)
        except SQLAlchemyError as error:
            raise self._refusal(error, "check the URL, and that the database is there and lets you in") from error
        except RunFolderError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._engine.dispose()

    @contextlib.contextmanager
    def exclusive(self, name: str) -> Iterator[LockedRows]:
        """Hold a log, so that no other process appends to it meanwhile; lines are there when the block ends.

        Raises:
            RunFolderError: The database is away for too long.
            LostLockError: It was away when the block ended, and has none of the lines.
        """
        connection = self._patiently(lambda: self._locked(name))
        rows = LockedRows()
        try:
            yield rows
            try:
                self._insert(connection, name, rows.lines)
                connection.commit()
                return
            except SQLAlchemyError:
                connection.invalidate()  # whether it was committed is not known: the lines tell
        finally:
            with contextlib.suppress(SQLAlchemyError):
                connection.close()
        if not self._patiently(lambda: self._has_lines(name, rows.lines)):
            raise LostLockError

    def records_after(self, name: str, position: int) -> tuple[list[dict[str, Any]], int]:
        """The records after a position of a log, 0 or one that this returned, and the position after them."""
        found = (
            select(_LINES.c.number, _LINES.c.record)
            .where(_LINES.c.run == self._run, _LINES.c.name == name, _LINES.c.number > position)
            .order_by(_LINES.c.number)
        )
        rows = self._patiently(lambda: self._all(found))
        records = [record for _, text in rows if (record := read_line(text.encode())) is not None]
        return records, rows[-1][0] if rows else position

    def has(self, name: str) -> bool:
        """Whether `read_checked` has something to read."""
        return self._document(name) is not None

    def write_checked(self, name: str, payload: Mapping[str, Any]) -> None:
        """Write a JSON object with its own checksum, to the database and to a copy in the folder."""
        self.create()
        super().write_checked(name, payload)
        text = self.file(name).read_text(encoding="utf-8")

        def write() -> None:
            with self._engine.begin() as connection:
                self._lock(connection, name)
                connection.execute(delete(_DOCUMENTS).where(*self._is(_DOCUMENTS, name)))
                connection.execute(insert(_DOCUMENTS).values(run=self._run, name=name, document=text))

        self._patiently(write)

    def read_checked(self, name: str) -> dict[str, Any]:
        """Read what `write_checked` wrote on any machine, and keep a copy in the folder.

        Raises:
            RunFolderError: It is absent, or its checksum does not match.
        """
        text = self._document(name)
        if text is None:
            raise RunFolderError(f"{_shown(self._url)} has no {name} of {self._run}; run kvtuner calibrate first")
        self.create()
        if not self.file(name).exists() or self.file(name).read_text(encoding="utf-8") != text:
            self.file(name).write_text(text, encoding="utf-8")
        return super().read_checked(name)

    def _create_tables(self) -> None:
        try:
            _METADATA.create_all(self._engine)
        except DBAPIError:  # another process may make them at this moment; if it is something else, it comes again
            time.sleep(_RETRY_S)
            _METADATA.create_all(self._engine)

    def _locked(self, name: str) -> Connection:
        """A connection in a transaction that holds the lock of a log."""
        connection = self._engine.connect()
        try:
            self._lock(connection, name)
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        return connection

    def _lock(self, connection: Connection, name: str) -> None:
        """Hold the row of a log's lock until the transaction ends."""
        row = select(_LOCKS.c.name).where(*self._is(_LOCKS, name))
        if name not in self._known_locks:
            with contextlib.suppress(IntegrityError), self._engine.begin() as other:
                if other.execute(row).first() is None:
                    other.execute(insert(_LOCKS).values(run=self._run, name=name))
            self._known_locks.add(name)
        connection.execute(row.with_for_update())

    def _insert(self, connection: Connection, name: str, lines: Mapping[str, str]) -> None:
        if lines:
            rows = [{"run": self._run, "name": name, "token": t, "record": text} for t, text in lines.items()]
            connection.execute(insert(_LINES), rows)

    def _has_lines(self, name: str, lines: Mapping[str, str]) -> bool:
        """Whether a transaction that may have ended, or does so before this one has the lock, left its lines."""
        with self._engine.begin() as connection:
            self._lock(connection, name)
            tokens = select(_LINES.c.token).where(_LINES.c.token.in_(list(lines)))
            return len(connection.execute(tokens).all()) == len(lines)

    def _document(self, name: str) -> str | None:
        rows = self._patiently(lambda: self._all(select(_DOCUMENTS.c.document).where(*self._is(_DOCUMENTS, name))))
        return rows[0][0] if rows else None

    def _all(self, query: Any) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(query))

    def _is(self, table: Table, name: str) -> tuple[Any, Any]:
        return table.c.run == self._run, table.c.name == name

    def _patiently(self, use: Callable[[], Answer]) -> Answer:
        """What a use of the database returns, tried again while the database is away."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return use()
            except SQLAlchemyError as error:
                if not _may_pass(error):
                    way_out = "have the database allow or mend that, and run the same command again to resume"
                    raise self._refusal(error, way_out) from error
                if time.monotonic() > deadline:
                    way_out = "see that the database is there, and run the same command again to resume"
                    raise self._refusal(error, way_out) from error
                time.sleep(_RETRY_S)

    def _refusal(self, error: SQLAlchemyError, way_out: str) -> RunFolderError:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        if self._url.password:
            reason = reason.replace(str(self._url.password), "***")
        return RunFolderError(f"the run in {_shown(self._url)} cannot be used ({reason}): {way_out}")


class LockedRows(LockedLog):
    """A log in a database that this process alone appends to."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append records with checksums; they are durable when the lock is left."""
        self.lines |= {str(uuid.uuid4()): with_checksum(record) for record in records}

    def sync(self) -> None:
        """Nothing more than leaving the lock does."""


def _may_pass(error: SQLAlchemyError) -> bool:
    """Whether a connection was lost, or could not be made, or the database gave a transaction up for another one."""
    if not isinstance(error, DBAPIError):
        return False
    is_transport = error.statement is None and isinstance(error, OperationalError | InterfaceError)
    state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)  # psycopg 3 and 2
    is_given_up = str(state).startswith(_ROLLED_BACK)
    return error.connection_invalidated or is_transport or is_given_up


def _shown(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def _open(url: str) -> Engine:
    try:
        return create_engine(url, pool_pre_ping=True, pool_recycle=1800)
    except (ArgumentError, ImportError, ValueError) as error:
        raise RunFolderError(
            f"{_shown(make_url(url))} cannot be opened ({error}); for PostgreSQL:"
            " pip install 'kvtuner[postgresql]', and postgresql+psycopg://user:password@host/name"
        ) from error
