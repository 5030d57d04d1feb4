"""Write the JSON Schemas of a profile and of the catalogue's index, as the models generate them.

make schema
"""

import json
from typing import Final

from pydantic import BaseModel

from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.sharing.catalogue import FOLDER, Index

SCHEMA_PATH: Final = FOLDER.parent / "schema.json"
INDEX_SCHEMA: Final = FOLDER / "index.schema.json"


def schema_text(model: type[BaseModel] = Profile) -> str:
    """The schema file. It covers fields one by one; digest, shapes and totals only `load_profile` checks."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema(by_alias=True)}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write both schemas."""
    SCHEMA_PATH.write_text(schema_text(), encoding="utf-8")
    INDEX_SCHEMA.write_text(schema_text(Index), encoding="utf-8")


if __name__ == "__main__":
    main()
