"""A checkpoint is known by its tensors: however they are split, and whatever else lies beside them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from kvtuner.exported_configs.checkpoint import SAMPLE_BYTES, checkpoint_sha256

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {
    "embed": torch.arange(3 * SAMPLE_BYTES, dtype=torch.float32),
    "norm": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(2.0),
}


def write(folder: Path, *shards: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    folder.mkdir()
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata=metadata)
        return folder
    names = {}
    for number, shard in enumerate(shards):
        file = f"model-{number}.safetensors"
        save_file(shard, folder / file, metadata=metadata)
        names |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def split(tensors: dict[str, torch.Tensor], at: int) -> list[dict[str, torch.Tensor]]:
    names = list(tensors)
    return [{name: tensors[name] for name in part} for part in (names[:at], names[at:])]


def test_shards_order_and_metadata_do_not_matter(tmp_path: Path) -> None:
    known = checkpoint_sha256(write(tmp_path / "one", TENSORS))
    assert known is not None and known.startswith("sha256:")
    two = write(tmp_path / "two", *split(TENSORS, 1), metadata={"format": "pt"})
    (two / "README.md").write_text("other words")
    (two / "unlisted.safetensors").write_bytes(b"not of the model")
    assert checkpoint_sha256(two) == known
    assert checkpoint_sha256(write(tmp_path / "three", *split(TENSORS, 3)[::-1])) == known


@pytest.mark.parametrize("name", ["embed", "norm", "scalar"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_change_of_any_tensors_beginning_or_end_shows(tmp_path: Path, name: str, place: int) -> None:
    changed = {key: tensor.clone() for key, tensor in TENSORS.items()}
    changed[name].reshape(-1)[place] += 0.5
    one, other = write(tmp_path / "one", TENSORS), write(tmp_path / "other", changed)
    assert checkpoint_sha256(one) != checkpoint_sha256(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": TENSORS["norm"].to(torch.float16)},
        {"norm": TENSORS["norm"].reshape(3, 1)},
        {"norm": None},
        {"more": torch.zeros(1)},
    ],
)
def test_a_dtype_a_shape_and_the_names_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    changed = {name: tensor for name, tensor in {**TENSORS, **changes}.items() if tensor is not None}
    assert checkpoint_sha256(write(tmp_path / "one", TENSORS)) != checkpoint_sha256(write(tmp_path / "two", changed))


def test_what_is_no_whole_checkpoint_is_not_known(tmp_path: Path) -> None:
    assert checkpoint_sha256(tmp_path / "nowhere") is None
    assert checkpoint_sha256(tmp_path) is None
    missing = write(tmp_path / "missing", *split(TENSORS, 2))
    (missing / "model-1.safetensors").unlink()
    assert checkpoint_sha256(missing) is None
    for number, content in enumerate(
        (b"", b"\0" * 8, b"\xff" * 16, (10).to_bytes(8, "little") + b"no json at", (2).to_bytes(8, "little") + b"[]")
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        assert checkpoint_sha256(folder) is None
