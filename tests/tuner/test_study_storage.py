"""Storages that are damaged, foreign, locked or of another run."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import optuna
import pytest
from sqlalchemy.exc import OperationalError

from kvtuner.errors import RunFolderError
from kvtuner.search_spaces.budget import Constraint
from kvtuner.search_spaces.space import Configuration, SearchSpace
from kvtuner.tuner import study_storage as storage_module
from kvtuner.tuner.exact_solver import solve
from kvtuner.tuner.study import StudyResult, refine
from kvtuner.tuner.study_storage import StorageErrors, open_storage, printable_url, sqlite_url

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

Space = Callable[..., SearchSpace]
Limit = Callable[..., Constraint]
Run = Callable[..., StudyResult]


@pytest.fixture
def run(random_space: Space, make_constraint: Limit) -> Run:
    """`run(url, budget=..., seed=..., **options)`: a short study."""

    def start(url: str, *, budget: str = "7bit", seed: int = 0, num_trials: int = 6, **options: object) -> StudyResult:
        space, constraint = random_space(3, seed), make_constraint(budget, 3)

        def objective(configuration: Configuration) -> float:
            return sum(choice.score for choice in configuration)

        return refine(
            space,
            constraint,
            objective,
            warm=[solve(space, constraint)],
            num_trials=num_trials,
            storage=url,
            **options,  # type: ignore[arg-type]  # whatever the test asks for
        )

    return start


def refusal(run: Run, url: str, **options: object) -> str:
    """The one line that a study is refused with."""
    with pytest.raises(RunFolderError) as caught:
        run(url, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("scheme", ["sqlite", "journal"])
def test_a_finished_study_is_resumed_without_new_trials_and_extended_on_demand(
    run: Run, tmp_path: Path, scheme: str
) -> None:
    url = f"{scheme}:///{tmp_path}/new/folder/study"
    first = run(url, identity={"model": "a"})
    assert run(url, identity={"model": "a"}) == first
    longer = run(url, identity={"model": "a"}, num_trials=9)
    assert longer.trials[:6] == first.trials
    assert len(longer.trials) == 9


def test_two_studies_share_one_storage(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    run(url, study_name="7bit")
    run(url, study_name="4bit", budget="4bit")
    assert sorted(optuna.get_all_study_names(url)) == ["4bit", "7bit"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"identity": {"model": "b", "corpus": 1}}, 'model is "a" there and "b" here'),
        ({"identity": {"model": "a"}}, "corpus is 1 there and null here"),
        ({"identity": {"model": "a", "corpus": 1}, "budget": "6bit"}, 'budget is "7bit" there and "6bit" here'),
        ({"identity": {"model": "a", "corpus": 1}, "seed": 1}, 'space is "sha256:'),
    ],
)
@pytest.mark.parametrize("scheme", ["sqlite", "journal"])
def test_a_study_of_another_run_is_refused_by_the_field_that_differs(
    run: Run, tmp_path: Path, scheme: str, changed: dict[str, object], says: str
) -> None:
    url = f"{scheme}:///{tmp_path}/study"
    run(url, identity={"model": "a", "corpus": 1})
    assert says in refusal(run, url, **changed)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"this is no database at all, but long enough to be one" * 40,
        lambda data: data[: len(data) // 2],
        lambda data: data[:4096] + b"\xff" * 8192 + data[12288:],
        lambda data: data[:100],
        lambda data: b"\0" * len(data),
    ],
    ids=["text", "half", "overwritten", "header", "zeros"],
)
def test_a_damaged_database_is_refused_with_the_way_out(
    run: Run, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "study.db"
    run(f"sqlite:///{path}")
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(run, f"sqlite:///{path}")
    assert str(path) in message
    assert "delete it" in message


def test_an_empty_file_is_a_new_study(run: Run, tmp_path: Path) -> None:
    (tmp_path / "study.db").touch()
    assert len(run(f"sqlite:///{tmp_path}/study.db").trials) == 6


def test_a_database_of_another_program_is_refused_and_left_as_it_was(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    before = path.read_bytes()
    assert "another program" in refusal(run, f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_a_study_that_kvtuner_did_not_make_is_refused(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=url, study_name="kvtuner")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    assert "another program" in refusal(run, url)


def test_a_locked_database_is_refused_after_waiting(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.db"
    run(f"sqlite:///{path}")
    monkeypatch.setattr(storage_module, "LOCK_TIMEOUT_S", 0.05)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        assert "another program holds it" in refusal(run, f"sqlite:///{path}", num_trials=9)
    finally:
        holder.close()
    assert len(run(f"sqlite:///{path}", num_trials=9).trials) == 9


def test_a_lock_in_the_middle_of_a_study_loses_no_trial(
    random_space: Space, make_constraint: Limit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, space, constraint = tmp_path / "study.db", random_space(3, 0), make_constraint("7bit", 3)
    warm = [solve(space, constraint), space.configuration([0, 0, 0])]
    holder = sqlite3.connect(path, isolation_level=None)

    def objective(configuration: Configuration) -> float:
        if configuration == warm[1]:
            holder.execute("BEGIN EXCLUSIVE")
        return 1.0

    monkeypatch.setattr(storage_module, "LOCK_TIMEOUT_S", 0.05)
    # The worker cannot even give the trial back; the next one takes it for lost when it stays silent.
    monkeypatch.setattr("kvtuner.workers.worker_identity.GRACE_S", 0.2)
    with pytest.raises(RunFolderError, match="another program holds it"):
        refine(space, constraint, objective, warm=warm, num_trials=5, storage=f"sqlite:///{path}")
    holder.close()
    result = refine(space, constraint, lambda _: 1.0, warm=warm, num_trials=5, storage=f"sqlite:///{path}")
    assert len(result.trials) == 5
    assert set(warm) <= {trial.configuration for trial in result.trials}


def test_a_full_disk_is_said_and_loses_no_trial(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.db"
    run(f"sqlite:///{path}")
    connect = storage_module._connect

    def full(file: Path) -> sqlite3.Connection:
        connection = connect(file)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages}")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(storage_module, "_connect", full)
        assert "free some space" in refusal(run, f"sqlite:///{path}", num_trials=200)
    monkeypatch.setattr("kvtuner.tuner.liveness.UNNAMED_GRACE_S", 0.2)
    assert len(run(f"sqlite:///{path}", num_trials=200).trials) == 200


def test_a_full_disk_under_a_journal_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"journal:///{tmp_path}/study.log"
    run(url)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("optuna.storages.journal.JournalFileBackend.append_logs", full)
        assert "free some space" in refusal(run, url, num_trials=9)
    assert len(run(url, num_trials=9).trials) == 9


@pytest.mark.parametrize("scheme", ["sqlite", "journal"])
@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/data/shard-3.safetensors"),
        BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)),
        sqlite3.DatabaseError("file is not a database"),  # of a data set's cache
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("raised_by", ["objective", "race", "on_trial", "is_over"])
def test_an_error_of_what_a_study_calls_is_not_taken_for_the_storages(
    random_space: Space, make_constraint: Limit, tmp_path: Path, scheme: str, error: Exception, raised_by: str
) -> None:
    space, constraint = random_space(3, 0), make_constraint("7bit", 3)
    url = f"{scheme}:///{tmp_path}/study"

    def fail(*_: object) -> NoReturn:
        raise error

    def refined(objective: Callable[[Configuration], float], **calls: Any) -> StudyResult:
        return refine(space, constraint, objective, warm=[solve(space, constraint)], num_trials=4, storage=url, **calls)

    with pytest.raises(type(error)) as caught:
        refined(fail) if raised_by == "objective" else refined(lambda _: 1.0, **{raised_by: fail})
    assert caught.value is error
    assert len(refined(lambda _: 1.0).trials) == 4


@pytest.mark.parametrize("scheme", ["sqlite", "journal"])
def test_a_path_that_is_a_folder_is_refused_and_not_to_be_deleted(run: Run, tmp_path: Path, scheme: str) -> None:
    message = refusal(run, f"{scheme}:///{tmp_path}")
    assert f"{tmp_path} is a folder" in message
    assert "give --storage one in that folder" in message
    assert "delete" not in message
    assert not list(tmp_path.parent.glob(".*.lock"))


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EACCES, "make it writable"),
        (errno.EROFS, "make it writable"),
        (errno.EISDIR, "choose another folder"),
        (errno.EDQUOT, "free some space"),
        (errno.EIO, "see to that and run the same command again"),
        (errno.ESTALE, "see to that and run the same command again"),
    ],
)
def test_a_journal_that_cannot_be_read_is_not_to_be_deleted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    url = f"journal:///{tmp_path}/a folder that is locked/study.log"  # words of a path say nothing
    run(url)

    def unreadable(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number), "a folder that is locked/study.log")

    for when in ("read_logs", "append_logs"):
        with monkeypatch.context() as patch:
            patch.setattr(f"optuna.storages.journal.JournalFileBackend.{when}", unreadable)
            message = refusal(run, url, num_trials=9)
        assert says in message
        assert "delete" not in message
    assert len(run(url, num_trials=9).trials) == 9


@pytest.mark.parametrize("reason", ["disk I/O error", "locking protocol", "interrupted", "a message of a later SQLite"])
def test_only_a_database_that_does_not_parse_is_to_be_deleted(tmp_path: Path, reason: str) -> None:
    storage = StorageErrors(f"sqlite:///{tmp_path}/study.db")
    with pytest.raises(RunFolderError, match="see to that and run the same command again") as caught, storage.named():
        raise OperationalError("SELECT 1", None, sqlite3.OperationalError(reason))
    assert "delete" not in str(caught.value)
    with pytest.raises(RunFolderError, match="delete it"), storage.named():
        raise OperationalError("SELECT 1", None, sqlite3.DatabaseError("database disk image is malformed"))


@pytest.mark.parametrize("content", [b"no journal\n", b'{"op_code": 99}\n', b"\xff\xfe\n", b"[1, 2]\n"])
def test_a_damaged_journal_is_refused(run: Run, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "study.log").write_bytes(content * 3)
    message = refusal(run, f"journal:///{tmp_path}/study.log")
    assert "no journal of a study" in message
    assert "delete it" in message


@pytest.mark.parametrize("url", ["study.db", "", "nosuchdatabase://host/name"])
def test_urls_that_are_none_are_refused(run: Run, url: str) -> None:
    assert "sqlite:///PATH, journal:///PATH or a database" in refusal(run, url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:///{}/study.db?timeout=5", "has a query after its '?', which SQLite's cannot have"),
        ("sqlite:///file:{}/study.db?uri=true", "has a query"),
        ("sqlite+aiosqlite:///{}/study.db", "is no sqlite:///PATH"),
        ("sqlite:///:memory:", "is no sqlite:///PATH"),
        ("sqlite://", "is no sqlite:///PATH"),
    ],
)
def test_urls_of_sqlite_that_name_more_or_less_than_a_file_are_refused(
    run: Run, tmp_path: Path, url: str, says: str
) -> None:
    assert says in refusal(run, url.format(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["study.db", "what? 50%20.db", "a@b#c.db"])
def test_the_url_of_a_file_names_that_file(run: Run, tmp_path: Path, name: str) -> None:
    run(sqlite_url(tmp_path / name))
    assert {path.name for path in tmp_path.iterdir()} == {name, f".{name}.lock"}


def test_every_spelling_of_a_sqlite_url_is_protected(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    first = run(f"sqlite+pysqlite:///{path}")
    assert run(f"sqlite:///{path}") == first
    assert (tmp_path / ".study.db.lock").exists()
    path.write_bytes(b"no database" * 100)
    assert "delete it" in refusal(run, f"sqlite+pysqlite:///{path}")


def test_passwords_are_not_printed() -> None:
    assert "secret" not in printable_url("postgresql://me:secret@host:5432/db")
    assert "host" in printable_url("postgresql://me:secret@host:5432/db")
    with pytest.raises(RunFolderError) as caught:
        open_storage("nosuchdatabase://me:secret@host/db")
    assert "secret" not in str(caught.value)


def test_a_database_that_cannot_be_reached_is_not_to_be_deleted() -> None:
    refused = OperationalError(None, None, ConnectionRefusedError("connection refused"))
    with (
        pytest.raises(RunFolderError, match=r"connection refused.*check the URL") as caught,
        StorageErrors("postgresql://me:secret@there/studies").named(),
    ):
        raise refused
    assert "delete" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("reason", "remedy"), [("deadlock detected", "see to that"), ("could not extend file: Disk quota exceeded", "free")]
)
def test_a_database_that_refuses_a_statement_is_there(reason: str, remedy: str) -> None:
    with (
        pytest.raises(RunFolderError, match=rf"{reason}\): {remedy}"),
        StorageErrors("postgresql://me:secret@there/studies").named(),
    ):
        raise OperationalError("INSERT", None, RuntimeError(reason))


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+pysqlite", "journal"])
def test_a_queued_trial_is_taken_by_one_worker(scheme: str, tmp_path: Path) -> None:
    url, num_workers, each = f"{scheme}:///{tmp_path}/study", 4, 15
    study = optuna.create_study(study_name="queue", storage=open_storage(url))
    for number in range(num_workers * each):
        study.enqueue_trial({"x": number})

    def take(_: int) -> list[int]:
        mine = optuna.load_study(study_name="queue", storage=open_storage(url))
        return [mine.ask().number for _ in range(each)]

    with ThreadPoolExecutor(num_workers) as pool:
        taken = sorted(chain(*pool.map(take, range(num_workers))))
    assert taken == list(range(num_workers * each))
