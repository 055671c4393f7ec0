"""Execute the tutorials and save their outputs: ``python tutorials/run.py [NAME ...]``.

The text is in the ``.py`` files; the notebooks beside them are made from these.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SECONDS = 90


def numbered() -> list[Path]:
    """Return the tutorials' texts in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def notebook(text: Path) -> nbformat.NotebookNode:
    """Return a tutorial as a notebook that was not executed."""
    made = jupytext.read(text)
    made.metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    }
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"
    return made


def execute(made: nbformat.NotebookNode) -> float:
    """Execute a notebook in place and return how many seconds it took."""
    begin = time.monotonic()
    client = NotebookClient(
        made, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    for cell in made.cells:
        cell.metadata.pop("execution", None)  # times of day, which differ each time
    return time.monotonic() - begin


def main(names: list[str]) -> None:
    """Execute the named tutorials, or all."""
    for text in [FOLDER / name for name in names] or numbered():
        made = notebook(text)
        seconds = execute(made)
        nbformat.write(made, text.with_suffix(".ipynb"))
        print(f"{text.name}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
