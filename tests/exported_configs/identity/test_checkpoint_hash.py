"""A checkpoint is known by its tensors: however they are split, and whatever else lies beside them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvtuner.exported_configs.identity import checkpoint_hash
from kvtuner.exported_configs.identity.checkpoint_hash import SAMPLE_BYTES, WEIGHTS_INDEX, checkpoint_sha256

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    digest = checkpoint_sha256(write(tmp_path / "one", TENSORS))
    assert digest is not None and digest.startswith("sha256:")
    two = write(tmp_path / "two", *split(TENSORS, 1), metadata={"format": "pt"})
    (two / "README.md").write_text("other words")
    (two / "unlisted.safetensors").write_bytes(b"not of the model")
    assert checkpoint_sha256(two) == digest
    assert checkpoint_sha256(write(tmp_path / "three", *split(TENSORS, 3)[::-1])) == digest


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


@pytest.mark.parametrize("beside", ["adapter_model", "consolidated", "model-00001-of-00002", "model.fp16", "a"])
@pytest.mark.parametrize("shards", [1, 2])
def test_other_weights_beside_the_model_s_do_not_count(tmp_path: Path, beside: str, shards: int) -> None:
    folder = write(tmp_path / "model", *(split(TENSORS, 2) if shards == 2 else [TENSORS]))
    digest = checkpoint_sha256(folder)
    save_file({"norm": torch.zeros(3), "lora": torch.ones(2)}, folder / f"{beside}.safetensors")
    assert checkpoint_sha256(folder) == digest is not None


def test_one_whole_file_is_taken_before_an_index(tmp_path: Path) -> None:
    digest = checkpoint_sha256(write(tmp_path / "one", TENSORS))
    both = write(tmp_path / "both", *split({"other": torch.ones(1), "more": torch.ones(2)}, 1))
    assert checkpoint_sha256(both) != digest
    save_file(TENSORS, both / "model.safetensors")
    assert checkpoint_sha256(both) == digest


@pytest.mark.parametrize("name", ["consolidated", "adapter_model", "model-00001-of-00001", "pytorch_model"])
def test_a_folder_of_other_names_is_not_known(tmp_path: Path, name: str) -> None:
    (write(tmp_path / "a", TENSORS) / "model.safetensors").rename(tmp_path / "a" / f"{name}.safetensors")
    assert checkpoint_sha256(tmp_path / "a") is None


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(folder: Path, header: Any, data: bytes = bytes(16)) -> Path:
    """A safetensors file as nobody's library would write it."""
    folder.mkdir(exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ENTRY.items() if key != name}


HOSTILE: dict[str, Any] = {
    "a list": [],
    "a text": "x",
    "a number": 7,
    "nothing": None,
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a deep shape": b'{"a":{"dtype":"F32","data_offsets":[0,8],"shape":' + b"[" * 900 + b"]" * 900 + b"}}",
    "no text": b"\xff\xfe{}",
    "a huge number": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,' + b"9" * 5000 + b"]}}",
    "half a character": b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "a tensor that is a list": {"a": [1, 2]},
    "a tensor that is a text": {"a": "dtype"},
    "a tensor that is nothing": {"a": None},
    **{f"no {name}": {"a": without(name)} for name in ENTRY},
    "a dtype that is a list": {"a": {**ENTRY, "dtype": ["F32"]}},
    "a shape that is a text": {"a": {**ENTRY, "shape": "2"}},
    "a shape below zero": {"a": {**ENTRY, "shape": [-2]}},
    "a shape of texts": {"a": {**ENTRY, "shape": ["2"]}},
    **{
        f"offsets {offsets}": {"a": {**ENTRY, "data_offsets": offsets}}
        for offsets in (
            *([-8, 0], [-(2**70), 8], [8, 0], [0, -1], [0, 17], [0, 2**62], [2**70, 2**70], [16, 17], [0.0, 8.0]),
            *([False, True], ["0", "8"], [None, 8], [0], [0, 8, 16], [], {"0": 0, "8": 8}, "08", 8, None),
        )
    },
    "one of two": {"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 0]}},
}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes asked for, of every sample."""
    sizes: list[int] = []
    sample = checkpoint_hash._sample

    class Watched:
        def __init__(self, file: Any) -> None:
            self.file = file

        def seek(self, place: int) -> None:
            self.file.seek(place)

        def read(self, size: int) -> bytes:
            sizes.append(size)
            return bytes(self.file.read(size))

    monkeypatch.setattr(checkpoint_hash, "_sample", lambda file, start, size: sample(Watched(file), start, size))  # type: ignore[arg-type]
    return sizes


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_not_known_and_no_more_than_samples_are_read(
    tmp_path: Path, reads: list[int], header: Any
) -> None:
    assert checkpoint_sha256(raw(tmp_path, header)) is None
    assert all(0 <= size <= SAMPLE_BYTES for size in reads)


def test_what_a_header_may_say_is_known(tmp_path: Path, reads: list[int]) -> None:
    for header in ({"a": ENTRY}, {"a": {**ENTRY, "data_offsets": [8, 16]}}, {"a": {**ENTRY, "data_offsets": [16, 16]}}):
        assert checkpoint_sha256(raw(tmp_path, header)) is not None
        assert checkpoint_sha256(raw(tmp_path, {**header, "__metadata__": {"format": "pt"}})) is not None
    assert checkpoint_sha256(raw(tmp_path, {"a": {**ENTRY, "data_offsets": [0, 20000]}}, bytes(20000))) is not None
    assert max(reads) == SAMPLE_BYTES
    assert checkpoint_sha256(raw(tmp_path, {"a": {**ENTRY, "data_offsets": [0, 20000]}}, bytes(19999))) is None


def indexes(files: Path) -> Iterator[tuple[str, Any]]:
    """Indexes that name a checkpoint's own file, in ways that none should."""
    outside = files / "outside.safetensors"
    for name in ("../outside.safetensors", str(outside), "inner/a.safetensors", "..", ".", "", "inner\\a.safetensors"):
        yield name, {"weight_map": {"a": name}}
    yield "no safetensors", {"weight_map": {"a": "config.json"}}
    yield "a number", {"weight_map": {"a": 7}}
    yield "a list of it", {"weight_map": {"a": ["model-0.safetensors"]}}
    yield "a zero", {"weight_map": {"a": "model-0\0.safetensors"}}
    yield "a long one", {"weight_map": {"a": "a" * 300 + ".safetensors"}}
    yield "one of two", {"weight_map": {"a": "model-0.safetensors", "b": "../outside.safetensors"}}
    yield "a list", {"weight_map": ["model-0.safetensors"]}
    yield "a text", {"weight_map": "model-0.safetensors"}
    yield "none", {}
    yield "an empty one", {"weight_map": {}}
    yield "no object", ["weight_map"]
    yield "deep", b"[" * 100_000
    yield "no text", b"\xff"


def test_an_index_names_files_beside_it_only(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    places = (
        "model-0.safetensors",
        "inner/a.safetensors",
        "inner\\a.safetensors",
        "../outside.safetensors",
        "config.json",
    )
    for place in places:
        save_file(TENSORS, folder / place)

    def digest_of(index: Any) -> str | None:
        (folder / WEIGHTS_INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
        return checkpoint_sha256(folder)

    assert digest_of({"weight_map": {"a": "model-0.safetensors"}}) is not None
    for what, index in indexes(tmp_path):
        assert digest_of(index) is None, what


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": {"a": "model-0.safetensors"}}))
    os.mkfifo(tmp_path / "model-0.safetensors")
    assert checkpoint_sha256(tmp_path) is None
    os.mkfifo(tmp_path / "model.safetensors")
    assert checkpoint_sha256(tmp_path) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.text(max_size=3) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(header=JSON, tail=st.binary(max_size=40), cut=st.integers(0, 200))
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_file_makes_it_fail(tmp_path: Path, header: Any, tail: bytes, cut: int) -> None:
    file = raw(tmp_path, header, tail) / "model.safetensors"
    for content in (file.read_bytes(), file.read_bytes()[:cut]):
        file.write_bytes(content)
        digest = checkpoint_sha256(tmp_path)
        assert digest is None or digest.startswith("sha256:")
