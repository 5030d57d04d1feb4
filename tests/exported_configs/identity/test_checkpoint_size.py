"""The bytes of tensors are those that safetensors files hold, however they are split."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from kvtuner.exported_configs.identity.checkpoint_hash import ONE_FILE, WEIGHTS_INDEX
from kvtuner.exported_configs.identity.checkpoint_size import checkpoint_bytes, float32_bytes, index_total

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
NUM_BYTES = 3 * 5 * 4 + 7 * 2


def split(folder: Path, **metadata: object) -> None:
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in TENSORS}
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def test_one_file_counts_its_tensors_without_its_header(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / ONE_FILE)
    assert checkpoint_bytes(tmp_path) == NUM_BYTES


def test_files_of_an_index_without_a_total_are_added(tmp_path: Path) -> None:
    split(tmp_path)
    assert checkpoint_bytes(tmp_path) == NUM_BYTES
    (tmp_path / "b.safetensors").unlink()
    assert checkpoint_bytes(tmp_path) is None


@pytest.mark.parametrize("total", [14_000_000_000, 14e9])
def test_the_total_of_an_index_counts_before_its_files_are_there(tmp_path: Path, total: float) -> None:
    (tmp_path / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": {}}))
    assert checkpoint_bytes(tmp_path) == 14_000_000_000


@pytest.mark.parametrize("total", [0, -5, True, "14", None, 1.5, [1]])
def test_a_total_that_is_no_number_of_bytes_is_none(total: object) -> None:
    assert index_total(json.dumps({"metadata": {"total_size": total}}).encode()) is None


@pytest.mark.parametrize("text", [b"", b"\xff" * 20, b"not json", b"[]", (10**9).to_bytes(8, "little") + b"{}"])
@pytest.mark.parametrize("name", [ONE_FILE, WEIGHTS_INDEX])
def test_a_damaged_file_is_not_counted(tmp_path: Path, name: str, text: bytes) -> None:
    (tmp_path / name).write_bytes(text)
    assert checkpoint_bytes(tmp_path) is None


def test_a_folder_without_safetensors_files_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"0" * 100)
    assert checkpoint_bytes(tmp_path) is None


def test_tensors_of_32_bits_are_counted_among_others(tmp_path: Path) -> None:
    split(tmp_path)
    assert float32_bytes(tmp_path) == 3 * 5 * 4
    (tmp_path / "a.safetensors").write_bytes(b"damaged")
    assert float32_bytes(tmp_path) is None


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    split(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    os.mkfifo(tmp_path / "b.safetensors")
    assert checkpoint_bytes(tmp_path) is None and float32_bytes(tmp_path) is None
