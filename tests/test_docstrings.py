"""Every public name has a NumPy-style docstring with an example, and the examples are true."""

import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attentune

FINDER = doctest.DocTestFinder(exclude_empty=True)
# Their examples tune or link.
SLOW = ("export_library", "load_library", "tune")
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name in attentune.__all__
]


def examples(name):
    """Return the examples of a public name, members included."""
    tests = FINDER.find(getattr(attentune, name), name)
    return [test for test in tests if test.examples]


@pytest.mark.parametrize("name", attentune.__all__)
def test_a_public_name_has_an_example(name):
    found = examples(name)
    assert found
    for test in found:
        assert not any(doctest.SKIP in example.options for example in test.examples)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_true(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for test in examples(name):
        report = []
        # A snippet of its reader's, who has imported nothing but what it says.
        test.globs = {}
        if inspect.isclass(getattr(attentune, name)):
            test.globs[name] = getattr(attentune, name)
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
        assert result.failed == 0, "".join(report)


@pytest.mark.parametrize("name", attentune.__all__)
def test_a_docstring_lists_the_parameters(name):
    subject = getattr(attentune, name)
    if inspect.ismodule(subject):
        return
    text = inspect.getdoc(subject)
    for parameter in inspect.signature(subject).parameters:
        assert parameter in text, parameter


@pytest.mark.slow
def test_the_reference_is_built(tmp_path):
    makefile = (Path(__file__).parents[1] / "Makefile").read_text().replace("\\\n", "")
    modules = re.search(r"^REFERENCE := (.+)$", makefile, re.M)[1].split()
    command = [sys.executable, "-m", "pdoc", "--docformat", "numpy", "--output-directory", tmp_path]
    subprocess.run([*command, *modules], check=True, capture_output=True)
    front = (tmp_path / "attentune.html").read_text()
    for name in attentune.__all__:
        assert f'id="{name}"' in front or f'href="attentune/{name}.html"' in front
    for module in modules:
        assert (tmp_path / f"{module.replace('.', '/')}.html").exists()
