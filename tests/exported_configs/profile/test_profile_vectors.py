"""The published vectors: made by our code, read by another reader, and both agree; the docs show one."""

from __future__ import annotations

import ast
import json
import re
import runpy
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save as save_tensors
from safetensors.torch import load as load_tensors

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.checkpoint_hash import checkpoint_sha256
from kvtuner.exported_configs.profile import constants_file, document, field_types, records
from kvtuner.exported_configs.profile.build import dump_constants, dump_profile
from kvtuner.exported_configs.profile.constants_file import constants_path
from kvtuner.exported_configs.profile.digest import hashed_content
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.signing import signature_bundle, signer
from kvtuner.row_packing import pack_rows, unpack_rows
from kvtuner.run_folder import canonical_json

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FOLDER = ROOT / "exported_configs" / "vectors"
EXPECTED = json.loads((FOLDER / "expected.json").read_bytes())
VALID, INVALID = sorted(EXPECTED["valid"]), sorted(EXPECTED["invalid"])
WITH_ROWS = [name for name in VALID if EXPECTED["valid"][name]["rows"]]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("profiles", "format", "sharing")}


def module(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(HERE / f"{name}.py")))


reader = module("independent_reader")


def content(part: str, name: str) -> bytes:
    return file(part, name).read_bytes()


def file(part: str, name: str) -> Path:
    return FOLDER / part / f"{name}.json"


def side_file(part: str, name: str) -> bytes | None:
    path = constants_path(file(part, name))
    return path.read_bytes() if path.exists() else None


def read_by_the_other(part: str, name: str) -> Any:
    return reader.read(content(part, name), side_file(part, name))


def test_committed_vectors_are_what_the_generator_makes() -> None:
    generated = module("make_vectors").files()
    committed = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    assert sorted(committed) == sorted(generated)
    for path, data in generated.items():
        assert committed[path] == data, f"{path} differs: run tests/exported_configs/profile/make_vectors.py and commit"


def test_checkpoint_has_the_hash_that_the_page_gives_it() -> None:
    ((path, wanted),) = EXPECTED["checkpoint"].items()
    data = (FOLDER / path).read_bytes()
    assert len(data) < 2048 and len(load_tensors(data)) == 4
    text, digest = reader.checkpoint([data])
    assert digest == checkpoint_sha256((FOLDER / path).parent) == wanted["checkpoint_sha256"]
    assert f"```\n{text}\n```" in PAGES["format"] and digest in PAGES["format"]


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 8191, 8192, 8193, 20000])
def test_checkpoint_of_large_tensors_has_the_hash_that_the_page_gives_it(tmp_path: Path, size: int) -> None:
    generator = np.random.default_rng(size)
    tensors = {f"w{n}": generator.integers(0, 256, (n, size), dtype=np.uint8) for n in (1, 2, 3)}
    shards = [save_tensors({"w1": tensors["w1"], "w3": tensors["w3"]}), save_tensors({"w2": tensors["w2"]})]
    for number, data in enumerate(shards):
        (tmp_path / f"{number}.safetensors").write_bytes(data)
    names = {"w1": "0.safetensors", "w3": "0.safetensors", "w2": "1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "adapter.safetensors").write_bytes(save_tensors({"other": tensors["w1"]}))
    _, digest = reader.checkpoint(shards)
    assert checkpoint_sha256(tmp_path) == digest == reader.checkpoint([save_tensors(tensors)])[1]


def test_null_means_absent() -> None:
    """A null stands for an absent field; elsewhere a null is refused: see the invalid files."""
    nulls = set()
    pairs = (("nulls", "transforms"), ("nulls-of-evidence", "evidence"), ("nulls-by-layer", "latents"))
    for name, same in pairs:
        nulls_file = json.loads(content("valid", name))
        geometry, layers = nulls_file["geometry"], nulls_file["layers"]
        sides = [layer[side] for layer in layers for side in ("k", "v") if layer[side]]
        nodes = [nulls_file, nulls_file["model"], nulls_file["provenance"], *nulls_file["defaults"].values()]
        nodes += [geometry, *(geometry["exceptions"] or ()), *layers, *sides, nulls_file["quality"] or {}]
        nulls |= {name for node in nodes for name, value in node.items() if value is None}
        assert load_profile(content("valid", name)) == load_profile(content("valid", same))
    schema = json.loads((ROOT / "exported_configs" / "schema.json").read_bytes())
    names = ("ModelIdentity", "Provenance", "GeometryRecord", "GeometryException", "KeyDefaults", "ValueDefaults")
    names += ("LayerRecord", "KeyRecord", "ValueRecord", "QualityRecord")
    sections = {"Profile": schema, **{name: schema["$defs"][name] for name in names}}
    optional = {name for section in sections.values() for name in {*section["properties"]} - {*section["required"]}}
    others = [section for name, section in schema["$defs"].items() if name not in sections]
    assert all({*section["properties"]} == {*section["required"]} for section in others)
    assert nulls == optional | {"revision", "quality", "calibration", "search"}


def test_vectors_cover_the_format() -> None:
    assert len(VALID) >= 8 and len(INVALID) >= 25
    sides = [side for name in VALID for layer in EXPECTED["valid"][name]["layers"] for side in layer.values()]
    assert {side["bits"] for side in sides} == {2, 3, 4, 8, 16}
    assert len({side["transform"] for side in sides}) == 8
    rows = [(row["side"], load_profile(file("valid", name)).quant_spec(row["layer"], row["side"]).bits)
            for name in WITH_ROWS for row in EXPECTED["valid"][name]["rows"]]  # fmt: skip
    assert {("k", 8), ("k", 4), ("k", 3), ("k", 2), ("v", 4), ("v", 3), ("v", 2)} <= set(rows)


@pytest.mark.parametrize("name", VALID)
def test_both_readers_find_what_is_expected(name: str) -> None:
    wanted = EXPECTED["valid"][name]
    profile = load_profile(file("valid", name))
    assert (
        canonical_json(
            hashed_content(
                *(profile.layout, profile.geometry, profile.defaults, profile.layers),
                *(profile.window, profile.constants_sha256),
            )
        )
        == wanted["canonical"]
    )
    assert profile.digest == wanted["digest"]
    assert profile.bytes_per_token() == wanted["bytes_per_token"]
    assert [profile.mean_bits, profile.effective_bits] == [
        Fraction(wanted["mean_bits"]),
        Fraction(wanted["effective_bits"]),
    ]
    side = dump_constants(profile)
    assert side == side_file("valid", name)
    assert load_profile(dump_profile(profile), read_constants=lambda: side) == profile

    text, digest, layers = read_by_the_other("valid", name)
    assert (text, digest) == (wanted["canonical"], wanted["digest"])
    facts = ("bits", "transform", "bytes")
    assert [{side: {fact: stored[fact] for fact in facts} for side, stored in layer.items()} for layer in layers] == (
        wanted["layers"]
    )
    shape = json.loads(text)["geometry"]
    shapes = [layer for layer in shape["layers"] if len(layer) > 1] if "layers" in shape else [shape] * len(layers)
    total = payload = elements = 0
    growing = [
        (layer, sides) for layer, sides in zip(shapes, layers, strict=True) if "window" not in layer.get("kind", "")
    ]
    for layer, sides in growing or zip(shapes, layers, strict=True):
        heads, rope = layer["num_kv_heads"], layer.get("rope_dim", 0)
        dims = {"k": layer["head_dim"], "v": layer["v_head_dim"]}
        total += sum(side["bytes"] for side in sides.values()) + 2 * rope
        payload += sum(heads * dims[name] * side["bits"] for name, side in sides.items()) + 16 * rope
        elements += heads * sum(dims.values()) + rope
    assert total == wanted["bytes_per_token"]
    assert Fraction(payload, elements) == Fraction(wanted["mean_bits"])
    assert Fraction(8 * total, elements) == Fraction(wanted["effective_bits"])


@pytest.mark.parametrize("name", WITH_ROWS)
def test_both_readers_get_the_same_numbers_of_a_row(name: str) -> None:
    profile, (_, _, layers) = load_profile(file("valid", name)), read_by_the_other("valid", name)
    for wanted in EXPECTED["valid"][name]["rows"]:
        row, output = bytes.fromhex(wanted["row"]), np.array(wanted["output"], dtype=np.float32)
        side = layers[[layer.layer for layer in profile.layers].index(wanted["layer"])][wanted["side"]]
        assert len(row) == side["bytes"]
        assert np.array_equal(reader.read_row(row, side), output, equal_nan=True)
        spec = profile.quant_spec(wanted["layer"], wanted["side"])
        assert spec is not None
        heads, head_dim = output.shape
        stored = unpack_rows(
            torch.tensor(list(row), dtype=torch.uint8), spec.bits, heads, head_dim, spec.group_size,
            word_bits=spec.word_bits,
        ).dequantize()  # fmt: skip
        tokens = torch.from_numpy(np.array(wanted["input"], dtype=np.float32))
        for read in (spec.transform.invert(stored), spec.simulate(tokens)):
            torch.testing.assert_close(read, torch.from_numpy(output), rtol=0, atol=0, equal_nan=True)
        assert bytes(pack_rows(spec.quantize(tokens)).tolist()) == row


def test_rows_of_zeros_subnormal_numbers_and_nan_are_among_the_vectors() -> None:
    outputs = [output for name in VALID for row in EXPECTED["valid"][name]["rows"] for output in row["output"]]
    inputs = [head for name in VALID for row in EXPECTED["valid"][name]["rows"] for head in row["input"]]
    assert any(set(head) == {None} for head in outputs)
    assert any(all(x == 0 and str(x) == "-0.0" for x in head) for head in inputs)
    assert any(0 < max(map(abs, head)) < 2**-126 for head in inputs if None not in head)


@pytest.mark.parametrize("name", INVALID)
def test_file_that_breaks_a_rule_is_refused_by_us_and_where_rows_depend_on_it_by_the_other(name: str) -> None:
    with pytest.raises(ProfileError):
        load_profile(file("invalid", name))
    if EXPECTED["invalid"][name]["safety"]:
        with pytest.raises((AssertionError, LookupError, TypeError, ValueError, AttributeError)):
            read_by_the_other("invalid", name)


def test_each_invalid_file_is_refused_for_another_reason() -> None:
    """A file that was refused for what another one breaks would test nothing."""
    reasons = {}
    for name in INVALID:
        with pytest.raises(ProfileError) as refused:
            load_profile(file("invalid", name))
        reasons[name] = str(refused.value).removeprefix(str(file("invalid", name)))
    assert len(set(reasons.values())) == len(reasons)
    assert sum("digest is sha256" in reason for reason in reasons.values()) == 1


def test_pages_show_the_example_its_canonical_text_and_a_row() -> None:
    wanted = EXPECTED["valid"]["example"]
    (shown,) = re.findall(r"```json\n(.*?)```", PAGES["profiles"], re.DOTALL)
    assert json.loads(shown) == json.loads(content("valid", "example"))
    assert f"```\n{wanted['canonical']}\n```" in PAGES["format"]
    assert f"{len(wanted['canonical'])} bytes" in PAGES["format"]
    row = next(row for row in wanted["rows"] if (row["layer"], row["side"]) == (0, "v"))
    shown_row = re.search(r"row of 16 bytes:\n\n +([0-9a-f ]+)\n", PAGES["format"])
    assert shown_row is not None and shown_row[1].replace(" ", "") == row["row"]
    assert row["input"] == [[channel / 4 - 1 for channel in range(16)]]


def test_example_changed_by_hand_is_valid_with_what_its_refusals_name() -> None:
    """The page's way to write a profile: the right digest first, then each figure of the budget."""
    document = json.loads(content("valid", "example"))
    document["layers"][1]["v"] = {"bits": 4}
    with pytest.raises(ProfileError, match="digest is") as refused:
        load_profile(json.dumps(document).encode())
    document["digest"] = re.findall(r"sha256:[0-9a-f]{64}", str(refused.value))[1]
    for name in ("mean_bits", "effective_bits", "bytes_per_token"):
        with pytest.raises(ProfileError, match=f"budget.{name}: is") as refused:
            load_profile(json.dumps(document).encode())
        document["budget"][name] = json.loads(re.findall(r"the layers give ([\d.]+);", str(refused.value))[0])
    assert load_profile(json.dumps(document).encode()).pairs[1].v_bits == 4


def numbers(text: str) -> list[int]:
    """Every number of a text; `2^53` is one."""
    numbers = re.findall(r"\b\d[\d,]*(?:\^\d+)?\b", text)
    return [int(base.replace(",", "")) ** int(power or 1) for base, _, power in (n.partition("^") for n in numbers)]


def passage(page: str, start: str, end: str) -> str:
    """What stands between two words of a page."""
    match = re.search(re.escape(start) + r"(.*?)" + re.escape(end), PAGES[page], re.DOTALL)
    assert match is not None, f"{start!r} is not in docs/{page}.md"
    return " ".join(match[1].split())


def test_pages_give_the_limits_of_the_code() -> None:
    """Every number of a passage is a constant, and every constant is there."""
    bounds = [field_types.MAX_PROFILE_BYTES, document.MAX_DEPTH, document.MAX_FIELDS, document.MAX_ITEMS]
    assert numbers(passage("format", "## Reading a file\n", "\n\n").replace("UTF-8", "")) == [
        *bounds,
        document.MAX_INTEGER_DIGITS,
    ]
    assert numbers(passage("profiles", "A *text* has", "characters")) == [1, field_types.MAX_TEXT]
    assert numbers(passage("profiles", "a *count* an integer", ", a *seed*")) == [0, field_types.MAX_TOKENS]
    assert numbers(passage("format", "A side file must have at most", "bytes")) == [constants_file.MAX_CONSTANTS_BYTES]
    assert numbers(passage("profiles", "arrays exceed", "characters")) == [constants_file.MAX_INLINE_CHARS]
    most = field_types.MAX_COUNT
    assert numbers(passage("profiles", "`geometry`, integers:", "\n`num_layers`")) == [1, most, 0, most]
    assert numbers(passage("profiles", "`group_size` | integer,", "|")) == [1, most]
    assert numbers(passage("profiles", "`tp_size`, `pp_size` | integer,", "|")) == [1, most]
    assert numbers(passage("profiles", "`baselines` | list, at most", "|")) == [records.MAX_BASELINES]
    (command,) = numbers(passage("profiles", "`command` | text, at most", "|"))
    sections = json.loads((ROOT / "exported_configs" / "schema.json").read_bytes())["$defs"]
    assert command == sections["Provenance"]["properties"]["command"]["anyOf"][0]["maxLength"]
    figure = sections["IntervalRecord"]["properties"]["mean"]
    assert [float(bound) for bound in re.findall(r"within \+-(1e\d+),", PAGES["profiles"])] == [figure["maximum"]]
    assert numbers(passage("sharing", "damaged, above", "MiB")) == [signature_bundle.SIGNATURE.max_bytes // 2**20]
    assert numbers(passage("sharing", "It gets", "where somebody")) == [
        signer.NETWORK_SECONDS,
        signer.PERSON_SECONDS,
    ]


def test_pages_name_every_field() -> None:
    schema = json.loads((ROOT / "exported_configs" / "schema.json").read_bytes())
    sections = [schema, *schema["$defs"].values()]
    for name in {name for section in sections for name in section.get("properties", ())}:
        named = (f"`{name}`", f'"{name}"')
        assert any(text in PAGES[page] for text in named for page in ("profiles", "format")), f"{name} is in neither"


def test_other_reader_is_short_and_knows_no_kvtuner() -> None:
    source = (HERE / "independent_reader.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"base64", "hashlib", "json", "numpy", "re", "zlib"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    lines = {
        node.name: (node.end_lineno or 0) - node.lineno + 1 for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    assert sum(lines[name] for name in ("once", "constant", "read_side", "read")) <= 40
    assert sum(lines[name] for name in ("read_layer", "check_counts", "read_geometry")) <= 48
    assert sum(lines[name] for name in ("read_side_file", "hashed")) <= 25
    assert lines["checkpoint"] <= 12
