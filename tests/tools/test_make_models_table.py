"""The table of docs/models.md is what the installed transformers and SGLang, and the tests, say of every model."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from tiny.shrunk_models import REFUSED, SMALL

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_committed_table_is_made_of_what_is_installed() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    releases = re.search(r"^Made with transformers (\S+) and SGLang (\S+)\.$", page, re.MULTILINE)
    assert releases is not None
    for package, release in zip(("transformers", "sglang"), releases.groups(), strict=True):
        try:
            installed = version(package)
        except PackageNotFoundError:
            installed = "none"
        if installed != release:
            pytest.skip(f"the table was made with {package} {release}, but {installed} is installed")
    command = [sys.executable, "-m", "tools.make_models_table", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_reasons_on_the_page_have_no_sizes_of_the_small_models_that_were_refused() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    sizes = {str(size) for size in SMALL.values() if isinstance(size, int) and size > 2}
    for kind in REFUSED:
        assert "refused: " in rows[kind]
        assert not sizes & set(re.findall(r"\b\d+\b", rows[kind])), rows[kind]
