"""Run notebooks, and store their outputs: ``python tests/support/notebooks.py [NAME...]``, from the root of a checkout.

Stored are texts and pictures. Pages are left out: they are large, and viewers of stored outputs show none.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def executed(path: Path, folder: Path, environment: dict[str, str]) -> Any:
    """The notebook with the outputs of a run in this folder."""
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    options = {"resources": {"metadata": {"path": folder}}, "kernel_name": "python3", "timeout": 600}
    nbclient.NotebookClient(notebook, **options).execute(env={**environment, "IPYTHONDIR": str(folder / "ipython")})
    return notebook


def without_pages(notebook: Any) -> Any:
    """The notebook with texts and pictures only, and without what differs in every run."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                data = output.get("data", {})
                data.pop("text/html", None)
                if "image/png" in data:
                    data["text/plain"] = "a picture"
    return notebook


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.processes import child_environment

    for name in sys.argv[1:] or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")):
        file = NOTEBOOKS / f"{name}.ipynb"
        kept = read(file).metadata
        with tempfile.TemporaryDirectory() as place:
            done = without_pages(executed(file, Path(place), child_environment(CUDA_VISIBLE_DEVICES="")))
        done.metadata = kept
        nbformat.write(done, file)
        print(f"{file.name}: {file.stat().st_size:,} bytes", flush=True)
