"""Execute the notebooks of examples/, which needs the extra ``docs``.

    python -m experiments.notebooks [--write]

``make check`` runs it. With ``--write`` the new outputs replace those in the files.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="Keep the outputs.")
    write = parser.parse_args().write
    os.environ["PYTHONPATH"] = os.pathsep.join([str(NOTEBOOKS.parents[1]), os.environ.get("PYTHONPATH", "")])
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:  # times differ from run to run
            cell.metadata.pop("execution", None)
        if write:
            nbformat.write(notebook, path)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
