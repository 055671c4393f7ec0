"""The tutorials: text and notebook agree, import public names only, and run to their assertions."""

import ast
import importlib
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "tutorials"
sys.path.insert(0, str(FOLDER))

import run  # noqa: E402

TUTORIALS = run.numbered()
# Beside the package itself: what CONTRIBUTING has people write variants and policies with.
PUBLIC = (
    "attentune", "attentune.group", "attentune.kernels.*", "attentune.schedules",
    "attentune.schedules.*", "attentune.search.peaks", "attentune.search.roofline",
    "attentune.torch", "attentune.variant",
)  # fmt: skip
tutorial = pytest.mark.parametrize("text", TUTORIALS, ids=[text.stem for text in TUTORIALS])


def test_they_are_found():
    assert len(TUTORIALS) >= 9


@tutorial
def test_the_notebook_is_made_from_the_text(text):
    saved = nbformat.read(text.with_suffix(".ipynb"), 4)
    nbformat.validate(saved)

    def cells(notebook):
        return [(cell.cell_type, cell.source) for cell in notebook.cells]

    remedy = f"run `python tutorials/run.py {text.name}`"
    assert cells(saved) == cells(jupytext.read(text)), remedy


@tutorial
def test_the_notebook_was_run_to_its_end(text):
    code = [c for c in nbformat.read(text.with_suffix(".ipynb"), 4).cells if c.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]


@tutorial
def test_it_ends_in_an_assertion(text):
    *_, last = ast.parse(text.read_text()).body
    assert any(isinstance(node, ast.Assert) for node in ast.walk(last))


def is_public(module, name):
    """Return whether a name of a module of ours, or of a module in it, is public."""
    if name.startswith("_"):
        return False
    if any(fnmatchcase(f"{module}.{name}", public) for public in PUBLIC[1:]):
        return True
    owner = importlib.import_module(module)
    listed = any(fnmatchcase(module, public) for public in PUBLIC)
    return listed and name in getattr(owner, "__all__", vars(owner))


@tutorial
def test_it_uses_public_names_only(text):
    for node in ast.walk(ast.parse(text.read_text())):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
            assert not node.attr.startswith("_"), f"line {node.lineno}"
        if isinstance(node, ast.Import):
            ours = [one.name for one in node.names if one.name.startswith("attentune.")]
            assert set(ours) <= set(PUBLIC), f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "attentune":
            for one in node.names:
                assert is_public(node.module, one.name), f"line {node.lineno}: {one.name}"


@pytest.mark.slow
@tutorial
def test_it_runs(text):
    if text.stem == "08_library" and shutil.which("c++") is None:
        pytest.skip("it builds an application with a C++ compiler, and there is none")
    seconds = run.execute(run.notebook(text))
    # Other tests run beside this one.
    assert seconds < 2 * run.SECONDS
