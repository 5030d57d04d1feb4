"""The code of docs/python.md runs, block after block, as in a notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

PAGE: Final = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS: Final = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
SERVED: Final = "kvtuner.engine("
"""What marks the block that needs a GPU's server; tests/sglang/test_engine.py calls the same function."""


@pytest.mark.slow
def test_the_blocks_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["result"].profile == names["profile"]
    assert (tmp_path / "runs" / "demo" / "profile.json").exists()
    assert set(names["evaluation"].cells["scheme"]) == {"bf16", "profile", "fp8", "K8V8"}
    assert repr(names["profile"]) in repr(names["evaluation"])
    assert names["output"].shape[1] == names["prompt"]["input_ids"].shape[1] + 16


def test_the_served_block_runs_in_a_program_of_its_own_only() -> None:
    (served,) = [block for block in BLOCKS if SERVED in block]
    assert served.startswith('if __name__ == "__main__":')


def test_every_public_name_is_on_the_page() -> None:
    import kvtuner

    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in kvtuner.__all__ if f"kvtuner.{name}" not in text] == []
