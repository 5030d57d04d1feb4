"""A new format: its module and one row of the table are all that it takes."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.cli import main
from kvtuner.exported_configs import formats
from kvtuner.exported_configs.formats.conversion import Exported, Imported, ImportOptions, LostFeature, write
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.precision import PrecisionPair

if TYPE_CHECKING:
    from pathlib import Path

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ModelGeometry


def write_pairs(profile: Profile) -> Exported:
    """Write the pairs of all layers as a list."""
    text = json.dumps([str(pair) for pair in profile.pairs]) + "\n"
    return Exported(text, ("a note",), (LostFeature(0, "everything but the bits"),))


def read_pairs(data: bytes, geometry: ModelGeometry, options: ImportOptions) -> Imported:
    """Read what `write_pairs` writes."""
    return Imported(dict(enumerate(map(PrecisionPair.parse, json.loads(data)))), options.storage(geometry))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    module = SimpleNamespace(write=write_pairs, read=read_pairs)
    monkeypatch.setitem(sys.modules, f"{formats.__name__}.toy", module)
    monkeypatch.setitem(formats.FORMATS, "toy", formats.Format("toy", options=(), can_lose=True))
    return "toy"


def test_a_registered_format_is_listed_written_and_read_back(toy: str, make_profile: Any, take: Any) -> None:
    assert toy in formats.writable() and toy in formats.readable()
    profile = make_profile()
    exported = write(profile, toy, lossy=True)
    assert exported.notes == ("a note", "dropped, from layer 0 on: everything but the bits")
    imported, notes = take(json.dumps(["K8V4", "K4V4", "K16V16", "K2V2"]), toy)
    assert [str(pair) for pair in imported.pairs] == ["K8V4", "K4V4", "K16V16", "K2V2"] and notes == ()


def test_the_command_line_exports_and_names_a_registered_format(
    toy: str, make_profile: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    profile = make_profile()
    path.write_bytes(dump_profile(profile))
    assert main(["export", str(path), "--to", toy, "--lossy"]) == 0
    assert json.loads(capsys.readouterr().out) == [str(pair) for pair in profile.pairs]
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert toy in capsys.readouterr().out
