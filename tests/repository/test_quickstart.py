"""The notebook of examples/ runs from its first cell to its last, and shows what it showed when it was committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from tools.run_quickstart import NOTEBOOK, executed

if TYPE_CHECKING:
    from pathlib import Path


def shown(notebook: Any) -> dict[str, list[str]]:
    """The kinds of output of each code cell, by its text."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.source: [output.output_type for output in cell.outputs] for cell in cells}


def test_every_cell_was_run_before_it_was_committed_and_shows_no_path_of_a_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert all(shown(nbformat.read(NOTEBOOK, as_version=4)).values())
    assert not any(word in text for word in ("/home/", "/root/", "/tmp/", "stderr", "Traceback"))


@pytest.mark.slow
def test_the_cells_run_one_after_another(tmp_path: Path) -> None:
    notebook = executed(NOTEBOOK, tmp_path)
    assert shown(notebook) == shown(nbformat.read(NOTEBOOK, as_version=4))
    answers = [
        output.get("data", {}).get("text/plain") for cell in notebook.cells for output in cell.get("outputs", ())
    ]
    assert "'456'" in answers, "the model with the packed cache answers as the table says"
    assert (tmp_path / "runs" / "quickstart" / "report.html").exists()
