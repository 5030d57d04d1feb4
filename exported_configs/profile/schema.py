"""The JSON Schema of a profile: ``python -m kvtuner.exported_configs.profile.schema`` generates it from the model."""

import json
from pathlib import Path
from typing import Final

from kvtuner.exported_configs.profile.profile import Profile

SCHEMA_PATH: Final = Path(__file__).parents[1] / "schema.json"


def schema_text() -> str:
    """The schema file. It covers fields one by one; digest, shapes and totals only `load_profile` checks."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Profile.model_json_schema(by_alias=True)}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the schema beside this module."""
    SCHEMA_PATH.write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
