"""The committed JSON Schema of a profile is the generated one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.precision import ALL_BITS, LAYOUT_ID
from tools import make_schemas as schema

if TYPE_CHECKING:
    import pytest


def objects(node: Any) -> list[dict[str, Any]]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return [node] * isinstance(node, dict) + [inner for child in children for inner in objects(child)]


def test_committed_schema_is_what_the_model_generates() -> None:
    committed = schema.SCHEMA_PATH.read_text(encoding="utf-8")
    assert committed == schema.schema_text(), "run `make schema` and commit the difference"


def test_module_writes_both_schema_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(schema, "SCHEMA_PATH", tmp_path / "schema.json")
    monkeypatch.setattr(schema, "INDEX_SCHEMA", tmp_path / "index.schema.json")
    schema.main()
    assert json.loads((tmp_path / "schema.json").read_text(encoding="utf-8"))["title"] == "Profile"
    assert json.loads((tmp_path / "index.schema.json").read_text(encoding="utf-8"))["title"] == "Index"


def test_schema_states_the_closed_sets_of_the_format() -> None:
    document = json.loads(schema.schema_text())
    definitions = document["$defs"]
    assert document["properties"]["schema_version"]["enum"] == [1, 2]
    assert document["properties"]["layout"]["const"] == LAYOUT_ID
    for side in ("KeyRecord", "ValueRecord"):
        assert definitions[side]["properties"]["bits"]["enum"] == list(ALL_BITS)
    assert set(definitions["KeyRecord"]["properties"]) == {"bits", "transform", "group_size", "mu", "lambda"}
    assert set(definitions["ValueRecord"]["properties"]) == {"bits", "transform", "group_size"}
    assert definitions["KeyDefaults"]["properties"]["granularity"]["enum"] == ["per_token", "per_channel"]
    assert definitions["ValueDefaults"]["properties"]["granularity"]["const"] == "per_token"


def test_no_object_of_the_schema_takes_unknown_fields() -> None:
    document = json.loads(schema.schema_text())
    described = [node for node in objects(document) if node.get("type") == "object"]
    records = [record for record in document["$defs"].values() if record["type"] == "object"]
    assert len(described) == len(records) + 1 > 20
    assert all(node["additionalProperties"] is False for node in described)


def test_every_field_of_a_dumped_profile_is_in_the_schema() -> None:
    definitions = json.loads(schema.schema_text())
    documented = {name for node in objects(definitions) for name in node.get("properties", ())}
    files = list((schema.SCHEMA_PATH.parent / "vectors" / "valid").glob("*.json"))
    assert len(files) > 10
    for file in files:
        written = json.loads(dump_profile(load_profile(file)))
        assert {name for node in objects(written) for name in node} <= documented
