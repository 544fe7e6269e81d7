"""The notebooks of the docs run, and still print what is stored in them."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs").glob("*.ipynb"))


def kinds_of_output(notebook: Any) -> list[list[str]]:
    """Return for each code cell what it shows: text, tables, pictures. What workers log is not kept."""
    shown = [[o for o in cell.outputs if o.get("name") != "stderr"] for cell in notebook.cells if "outputs" in cell]
    return [[kind for output in cell for kind in sorted(output.get("data", {"text": ""}))] for cell in shown]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_and_shows_what_is_stored_in_it(tmp_path: Path, notebook: Path) -> None:
    stored = nbformat.read(notebook, as_version=4)
    fresh = nbformat.read(notebook, as_version=4)
    NotebookClient(
        fresh, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()  # raises if a cell fails
    assert kinds_of_output(fresh) == kinds_of_output(stored)
    assert any("image/svg+xml" in kinds for kinds in kinds_of_output(stored))
