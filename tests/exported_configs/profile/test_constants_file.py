"""The side file of a profile: one form, pinned by the profile, and each damage refused by name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import safetensors.torch

from kvtuner.errors import ProfileError, RunFolderError
from kvtuner.exported_configs.profile import build
from kvtuner.exported_configs.profile.build import (
    LayerQuantization,
    dump_constants,
    dump_profile,
    place_constants,
    write_profile,
)
from kvtuner.exported_configs.profile.constants_file import arrays_of, constants_name, constants_path, decode_constants
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.precision import ScaleLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtuner.quant import Transform

VECTORS = Path(__file__).resolve().parents[3] / "exported_configs" / "vectors" / "valid"


@pytest.fixture
def placed(profile: Profile) -> Profile:
    return place_constants(profile, "file")


@pytest.fixture
def written(placed: Profile, tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    write_profile(path, placed)
    return path


def test_safetensors_reads_the_file_and_writes_the_same_bytes(placed: Profile, written: Path) -> None:
    data = constants_path(written).read_bytes()
    tensors = {name: array.decode() for name, array in arrays_of(placed.layers).items()}
    assert data == dump_constants(placed) == safetensors.torch.save(tensors)
    read = safetensors.torch.load(data)
    assert len(read) == len(tensors) >= 2 and all(read[name].equal(tensor) for name, tensor in tensors.items())
    assert decode_constants(data) == arrays_of(placed.layers)


def test_constants_move_there_and_back_and_store_the_same(profile: Profile, placed: Profile, written: Path) -> None:
    assert load_profile(written) == placed and placed.schema_version == 2 and placed.digest != profile.digest
    assert b'"mu"' not in written.read_bytes() and b'"lambda"' not in written.read_bytes()
    for entry in profile.layers:
        first, second = (one.quant_spec(entry.layer, "k") for one in (profile, placed))
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert (first.bits, first.fit, first.transform.kind) == (second.bits, second.fit, second.transform.kind)
            for one, other in ((first.transform.mu, second.transform.mu), (first.transform.lam, second.transform.lam)):
                assert (one is None) == (other is None) and (one is None or other is None or one.equal(other))
    assert dump_profile(place_constants(placed, "inline")) == dump_profile(profile)
    assert place_constants(placed, "auto") == profile and place_constants(placed, "file") is placed


@pytest.mark.parametrize("name", ["gaps", "two-geometries", "latents", "example", "three-bits"])
def test_version_that_a_profile_needs_without_its_side_file_is_kept(name: str) -> None:
    inline = load_profile(VECTORS / f"{name}.json")
    placed = place_constants(inline, "file")
    assert placed.schema_version == 2 and placed.constants_sha256 is not None
    assert dump_profile(place_constants(placed, "inline")) == (VECTORS / f"{name}.json").read_bytes()


def test_short_words_alone_need_the_second_version_wherever_the_constants_stand(
    make_profile: Callable[..., Profile],
) -> None:
    inline = make_profile(k_layout=ScaleLayout(24, 16))
    assert inline.defaults.k.grid_fit == "minmax" and dump_constants(place_constants(inline, "file")) is not None
    assert place_constants(place_constants(inline, "file"), "inline") == inline


def test_profile_without_constants_has_no_side_file() -> None:
    plain = load_profile(VECTORS / "uniform.json")
    assert place_constants(plain, "file") is plain and dump_constants(plain) is None


def test_side_file_is_written_by_itself_only_where_one_file_may_not_hold_all(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    chars = sum(len(array.data) for array in arrays_of(profile.layers).values())
    monkeypatch.setattr(build, "MAX_INLINE_CHARS", chars)
    assert place_constants(profile, "auto") is profile
    monkeypatch.setattr(build, "MAX_INLINE_CHARS", chars - 1)
    assert place_constants(profile, "auto").constants_sha256 is not None
    assert place_constants(profile, "inline") is profile


def test_side_file_stands_beside_its_profile_under_its_name(tmp_path: Path) -> None:
    assert constants_name("a/profile-4bit.json") == "a/profile-4bit.constants.safetensors"
    assert constants_path(tmp_path / "model.json").name == "model.constants.safetensors"
    assert constants_path(tmp_path / "json").name == "json.constants.safetensors"


def test_older_side_file_goes_with_the_profile_that_had_it(profile: Profile, written: Path) -> None:
    write_profile(written, profile)
    assert load_profile(written) == profile and not constants_path(written).exists()


@pytest.fixture
def other(make_profile: Callable[..., Profile], make_transform: Callable[..., Transform]) -> Profile:
    """A profile with other constants than `placed` has, in a side file too."""
    balanced = LayerQuantization(4, 2, make_transform("balanced", seed=1))
    return place_constants(make_profile(layers=[balanced] * 5), "file")


def test_profile_that_cannot_be_written_leaves_the_older_one_with_its_side_file(
    placed: Profile, other: Profile, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, synced = os.fsync, list[int]()

    def sync_one(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) > 1:
            raise OSError(errno.ENOSPC, "full")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_one)
    with pytest.raises(RunFolderError, match="no space left"):
        write_profile(written, other)
    assert len(synced) == 2 and load_profile(written) == placed
    assert {file.name for file in written.parent.iterdir()} == {written.name, constants_path(written).name}


@pytest.mark.parametrize(("changes", "advice"), [(1, "write them by the same command again"), (2, "")])
def test_writer_that_was_killed_between_both_files_is_made_good_by_another(
    other: Profile, written: Path, monkeypatch: pytest.MonkeyPatch, changes: int, advice: str
) -> None:
    with killed_after(changes, monkeypatch):
        write_profile(written, other)
    if advice:
        with pytest.raises(ProfileError, match=f"or an older profile was being replaced; .*{advice}"):
            load_profile(written)
        write_profile(written, other)
    assert load_profile(written) == other


def test_writer_that_was_killed_before_the_older_side_file_went_says_that_it_may_go(
    profile: Profile, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_after(1, monkeypatch):
        write_profile(written, profile)
    with pytest.raises(ProfileError, match=r"or of an older one that was being replaced; remove it"):
        load_profile(written)
    constants_path(written).unlink()
    assert load_profile(written) == profile


@contextmanager
def killed_after(changes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that ends after so many changes of names under which files are found."""
    replace, unlink, changed = Path.replace, Path.unlink, list[Path]()

    def change(path: Path) -> None:
        if len(changed) == changes:
            raise SystemExit
        changed.append(path)

    def counted_replace(path: Path, target: Path) -> Path:
        change(target)
        return replace(path, target)

    def counted_unlink(path: Path, *, missing_ok: bool = False) -> None:
        if not path.name.endswith(".partial"):
            change(path)
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch, suppress(SystemExit):
        patch.setattr(Path, "replace", counted_replace)
        patch.setattr(Path, "unlink", counted_unlink)
        yield


def test_missing_strange_and_exchanged_file_are_named(profile: Profile, written: Path, tmp_path: Path) -> None:
    side = constants_path(written)
    data = side.read_bytes()
    side.unlink()
    with pytest.raises(ProfileError, match=r"mine.json: its constants are in mine.constants.safetensors beside"):
        load_profile(written)
    with pytest.raises(ProfileError, match="its constants are in a side file, which is not at hand"):
        load_profile(written.read_bytes())
    os.mkfifo(side)
    with pytest.raises(ProfileError, match=r"which cannot be read \(a named pipe"):
        load_profile(written)
    side.unlink()
    side.mkdir()
    with pytest.raises(ProfileError, match="which cannot be read"):
        load_profile(written)
    side.rmdir()
    for other in (data[:-1], data + b"\0", data[:-1] + bytes([data[-1] ^ 1]), b""):
        side.write_bytes(other)
        with pytest.raises(ProfileError, match="it was changed, cut or exchanged"):
            load_profile(written)
    alone = tmp_path / "alone.json"
    alone.write_bytes(dump_profile(profile))
    constants_path(alone).write_bytes(data)
    with pytest.raises(ProfileError, match=r"alone.constants.safetensors stands beside it, but the profile has no"):
        load_profile(alone)
    constants_path(alone).unlink()
    constants_path(alone).symlink_to("nowhere")
    with pytest.raises(ProfileError, match="stands beside it"):
        load_profile(alone)


def test_hash_of_other_constants_is_no_profile(placed: Profile) -> None:
    fields = {**dict(placed), "constants_sha256": "sha256:" + "0" * 64}
    with pytest.raises(ProfileError, match="constants_sha256: is not of the layers' mu and lambda"):
        Profile(**fields)


@pytest.mark.parametrize("seed", range(60))
def test_any_other_bytes_are_refused_in_one_line_though_the_hash_is_theirs(placed: Profile, seed: int) -> None:
    """Whoever forges the profile too gets through only with arrays that keep every rule."""
    draw = random.Random(seed)
    data = bytearray(dump_constants(placed) or b"")
    size = int.from_bytes(data[:8], "little")
    for _ in range(draw.randint(1, 3)):
        place = draw.choice([draw.randrange(8), draw.randrange(8, 8 + size), draw.randrange(8, 8 + size)])
        kind = draw.choice(["flip", "set", "cut", "insert"])
        if kind == "flip":
            data[place] ^= 1 << draw.randrange(8)
        elif kind == "set":
            data[place] = draw.choice(b'"{}[]:,0123456789 \x00\xff')
        elif kind == "cut":
            del data[place : place + draw.randint(1, 9)]
        else:
            data[place:place] = draw.choice([b"0", b" ", b'"', b"\0", b"9" * 30, b"[" * 40])
    if bytes(data) == dump_constants(placed):
        return
    document = json.loads(dump_profile(placed))
    document["constants_sha256"] = f"sha256:{hashlib.sha256(data).hexdigest()}"
    with pytest.raises(ProfileError) as refused:
        load_profile(json.dumps(document).encode(), read_constants=lambda: bytes(data))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600


def test_huge_and_deep_headers_are_refused_before_they_are_read() -> None:
    deep = "must nest at most 16 deep, but nests"
    for header, rule in (
        (b"[" * 2**18, f"{deep} {2**18}"),
        (b'{"layers.0.k.mu":' * 17, f"{deep} 17"),
        (b'{"' + b"a" * 2**20, "must be at most 524288 bytes"),
    ):
        with pytest.raises(ProfileError, match=rule):
            decode_constants(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ProfileError, match="must be at most 67108864 bytes"):
        decode_constants(bytes(2**26 + 1))
    with pytest.raises(ProfileError, match="the header has no 18446744073709551615 bytes"):
        decode_constants(b"\xff" * 64)
