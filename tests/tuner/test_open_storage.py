"""What a storage of SQLite adds to Optuna's: transactions that other workers cannot read between."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

import pytest
from optuna.storages import RDBStorage

from kvtuner.tuner.study_storage import open_storage

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+pysqlite"])
def test_a_transaction_holds_the_database_before_its_first_write(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    storage = open_storage(f"{scheme}:///{path}")
    assert isinstance(storage, RDBStorage)
    with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
        with storage.engine.begin(), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.execute("BEGIN IMMEDIATE")
