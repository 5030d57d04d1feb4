"""The published vectors: made by our code, read by another reader, and both agree; docs/profiles.md shows one."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.build import dump_profile
from kvtuner.exported_configs.digest import canonical_text
from kvtuner.exported_configs.load import load_profile
from kvtuner.quant import unpack_rows

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "exported_configs" / "vectors"
EXPECTED = json.loads((FOLDER / "expected.json").read_bytes())
VALID, INVALID = sorted(EXPECTED["valid"]), sorted(EXPECTED["invalid"])
WITH_ROWS = [name for name in VALID if EXPECTED["valid"][name]["rows"]]
PAGE = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


reader = module("independent_reader")


def content(part: str, name: str) -> bytes:
    return (FOLDER / part / f"{name}.json").read_bytes()


def test_committed_vectors_are_what_the_generator_makes() -> None:
    made = module("make_vectors").files()
    committed = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in FOLDER.rglob("*.json")}
    assert sorted(committed) == sorted(made)
    for path, data in made.items():
        assert committed[path] == data, f"{path} differs: run python tests/exported_configs/make_vectors.py and commit"


def test_vectors_cover_the_format() -> None:
    assert len(VALID) >= 8 and len(INVALID) >= 25
    sides = [side for name in VALID for layer in EXPECTED["valid"][name]["layers"] for side in layer.values()]
    assert {side["bits"] for side in sides} == {2, 4, 8, 16}
    assert len({side["transform"] for side in sides}) == 8
    rows = [(row["side"], EXPECTED["valid"][name]["layers"][row["layer"]][row["side"]]["bits"])
            for name in WITH_ROWS for row in EXPECTED["valid"][name]["rows"]]  # fmt: skip
    assert {("k", 8), ("k", 4), ("k", 2), ("v", 4), ("v", 2)} <= set(rows)


@pytest.mark.parametrize("name", VALID)
def test_both_readers_find_what_is_expected(name: str) -> None:
    wanted, data = EXPECTED["valid"][name], content("valid", name)
    profile = load_profile(data)
    assert canonical_text(profile.layout, profile.geometry, profile.defaults, profile.layers) == wanted["canonical"]
    assert profile.digest == wanted["digest"]
    assert profile.bytes_per_token() == wanted["bytes_per_token"]
    assert [profile.mean_bits, profile.effective_bits] == [
        Fraction(wanted["mean_bits"]),
        Fraction(wanted["effective_bits"]),
    ]
    assert load_profile(dump_profile(profile)) == profile

    text, digest, layers = reader.read(data)
    assert (text, digest) == (wanted["canonical"], wanted["digest"])
    facts = ("bits", "transform", "bytes")
    assert [{side: {fact: found[fact] for fact in facts} for side, found in layer.items()} for layer in layers] == (
        wanted["layers"]
    )
    shape = json.loads(text)["geometry"]
    k_dim, v_dim, heads = shape["head_dim"], shape["v_head_dim"], shape["num_kv_heads"]
    total = sum(side["bytes"] for layer in layers for side in layer.values())
    payload = sum(layer["k"]["bits"] * k_dim + layer["v"]["bits"] * v_dim for layer in layers)
    elements = len(layers) * (k_dim + v_dim)
    assert total == wanted["bytes_per_token"]
    assert Fraction(payload, elements) == Fraction(wanted["mean_bits"])
    assert Fraction(8 * total, elements * heads) == Fraction(wanted["effective_bits"])


@pytest.mark.parametrize("name", WITH_ROWS)
def test_both_readers_get_the_same_numbers_of_a_row(name: str) -> None:
    data = content("valid", name)
    profile, (_, _, layers) = load_profile(data), reader.read(data)
    for wanted in EXPECTED["valid"][name]["rows"]:
        row, output = bytes.fromhex(wanted["row"]), np.array(wanted["output"], dtype=np.float32)
        side = layers[wanted["layer"]][wanted["side"]]
        assert len(row) == side["bytes"]
        assert np.array_equal(reader.read_row(row, side), output)
        spec = profile.quant_spec(wanted["layer"], wanted["side"])
        assert spec is not None
        heads, head_dim = output.shape
        stored = unpack_rows(
            torch.tensor(list(row), dtype=torch.uint8), spec.bits, heads, head_dim, spec.group_size
        ).dequantize()
        assert torch.equal(spec.transform.invert(stored), torch.from_numpy(output))
        assert torch.equal(spec.simulate(torch.tensor(wanted["input"])), torch.from_numpy(output))


@pytest.mark.parametrize("name", INVALID)
def test_file_that_breaks_a_rule_is_refused_by_us_and_where_rows_depend_on_it_by_the_other(name: str) -> None:
    data = content("invalid", name)
    with pytest.raises(ProfileError):
        load_profile(data)
    if EXPECTED["invalid"][name]["safety"]:
        with pytest.raises((AssertionError, LookupError, TypeError, ValueError, AttributeError)):
            reader.read(data)


def test_each_invalid_file_is_refused_for_another_reason() -> None:
    """A file that was refused for what another one breaks would test nothing."""
    reasons = {}
    for name in INVALID:
        with pytest.raises(ProfileError) as refused:
            load_profile(content("invalid", name))
        reasons[name] = str(refused.value)
    assert len(set(reasons.values())) == len(reasons)
    assert sum("digest is sha256" in reason for reason in reasons.values()) == 1


def test_page_shows_the_example_and_its_canonical_text() -> None:
    wanted = EXPECTED["valid"]["example"]
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert load_profile(shown.encode()) == load_profile(content("valid", "example"))
    assert f"```\n{wanted['canonical']}\n```" in PAGE
    assert f"{len(wanted['canonical'])} bytes" in PAGE
    row = next(row for row in wanted["rows"] if (row["layer"], row["side"]) == (0, "v"))
    shown_row = re.search(r"row of 16 bytes:\n\n +([0-9a-f ]+)\n", PAGE)
    assert shown_row is not None and shown_row[1].replace(" ", "") == row["row"]
    assert row["input"] == [[channel / 4 - 1 for channel in range(16)]]


def test_page_names_every_field_and_limit() -> None:
    schema = json.loads((ROOT / "exported_configs" / "schema.json").read_bytes())
    sections = [schema, *schema["$defs"].values()]
    for name in {name for section in sections for name in section.get("properties", ())}:
        assert f"`{name}`" in PAGE or f'"{name}"' in PAGE, f"{name} is not in docs/profiles.md"


def test_other_reader_is_short_and_knows_no_kvtuner() -> None:
    source = (HERE / "independent_reader.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"base64", "hashlib", "json", "numpy"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    lines = {
        node.name: (node.end_lineno or 0) - node.lineno + 1 for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    assert sum(lines[name] for name in ("once", "constant", "read_side", "read")) <= 40
