"""Run the cells of examples/quickstart.ipynb anew, and keep what they show.

make notebook
"""

import tempfile
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

NOTEBOOK: Final = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
TIMEOUT_S: Final = 900


def executed(file: Path, folder: Path) -> Any:
    """The notebook with the outputs of a new run in a folder, without what cells say on their way (stderr).

    Raises:
        CellExecutionError: A cell fails.
    """
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # the times at which it ran
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    """Write the notebook."""
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(NOTEBOOK, Path(folder)), NOTEBOOK)


if __name__ == "__main__":
    main()
