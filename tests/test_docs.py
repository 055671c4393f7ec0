"""Every command and snippet of README, CONTRIBUTING and docs/ works as it is written.

The everyday tests read them: commands are parsed by the program they call, links lead somewhere.
The slow ones run each section's blocks in order, in one folder and one namespace.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import numpy as np
import pytest

import attentune
from attentune import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"sh", "python", "cpp", "mermaid", ""}

# Commands that other tests run, or that would run these.
ELSEWHERE = {
    "make demo": "test_cli.py",
    "make test": "it runs this",
    "make install": "the Makefile's first rule of every other target",
    "cmake -B build/cpp": "test_cpp.py",
    "cmake --build build/cpp": "test_cpp.py",
    "ctest --test-dir build/cpp": "test_cpp.py",
    "cmake --install build/cpp --prefix PREFIX": "test_cpp.py",
}
# Started by test_remote.py; here their options are looked up.
SERVERS = ("tvm.exec.rpc_tracker", "tvm.exec.rpc_server")
# Searching for less long changes nothing else.
SHORTER = {"tune": ["--trials", "4"], "bench": ["--rounds", "1"]}


class Block(NamedTuple):
    language: str
    text: str
    line: int


def blocks(text):
    """Return the fenced blocks of a page, without the indentation that they share."""
    found, begin = [], None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if begin is None:
            begin = number
        else:
            body = dedent("\n".join(lines[begin + 1 : number]))
            found.append(Block(lines[begin].strip().removeprefix("```"), body, begin + 2))
            begin = None
    assert begin is None, "a block is not closed"
    return found


def commands(block):
    """Return the commands of a block, without comments."""
    lines = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    for words in filter(None, lines):
        command = []
        for word in [*words, "&&"]:
            if word == "&&":
                yield command
                command = []
            else:
                command.append(word)


def attentune_arguments(command):
    """Return the arguments if it is ours, else None."""
    name = Path(command[0]).name
    return command[1:] if name == "attentune" else None


ALL = [(page, block) for page in PAGES for block in blocks(page.read_text())]
PYTHON = [(page, block) for page, block in ALL if block.language == "python"]
SHELL = [
    (page, block.line, command)
    for page, block in ALL
    if block.language == "sh"
    for command in commands(block)
]


def test_blocks_are_found():
    text = "1. one\n\n   ```sh\n   a && b # c\n   ```\n\n```\nx\n```\n"
    assert blocks(text) == [Block("sh", "a && b # c", 4), Block("", "x", 8)]
    assert list(commands(blocks(text)[0])) == [["a"], ["b"]]
    assert {block.language for _, block in ALL} == LANGUAGES
    assert len(SHELL) > 20
    assert len(PYTHON) > 12


def name(case):
    return case.name if isinstance(case, Path) else None


@pytest.mark.parametrize(("page", "line", "command"), SHELL, ids=name)
def test_a_command_is_understood(page, line, command):
    command = [word for word in command if not re.fullmatch(r"[A-Z_]+=\S+", word)]
    ours = attentune_arguments(command)
    if ours is not None:
        cli._parser().parse_args(ours)
    elif command[:2] == ["python", "-m"] and command[2] in SERVERS:
        described = helps(command[2])
        assert [o for o in command if o.startswith("--") and o not in described] == []
    else:
        assert " ".join(command) in ELSEWHERE, f"{page.name}:{line}: say who runs it"
    if command[0] == "make":
        assert re.search(rf"^{command[1]}:", (ROOT / "Makefile").read_text(), re.M)


def helps(module):
    run = [sys.executable, "-m", module, "--help"]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=name)
def test_a_snippet_compiles(page, block):
    compile("\n" * block.line + block.text, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), target
        if anchor:
            assert anchor in anchors(other), target


def anchors(page):
    """Return what GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def readme_prelude():
    """What the README's reader has: arrays of the first problem, and a model of PyTorch's."""
    import torch

    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, 12, 384, 64), np.float32)
    mask = np.arange(384) < rng.integers(1, 384, (1, 1, 1, 1))

    class Model(torch.nn.Module):
        def forward(self, query, key, value, mask):
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(query, key, value, attn_mask=mask)

    arrays = {"query": query, "key": key, "value": value, "mask": mask}
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {**arrays, "batch": batch, "model": Model()}


PRELUDES = {"README.md": readme_prelude}


def sections():
    """Split the pages into what is run together: a how-to's section, any other page whole."""
    for page in PAGES:
        text = page.read_text()
        parts = re.split(r"^(?=## )", text, flags=re.M) if page.name == "how-to.md" else [text]
        for part in parts:
            title = part.splitlines()[0].strip("# ")
            runnable = [b for b in blocks(part) if b.language in ("sh", "python")]
            if runnable:
                yield pytest.param(page.name, runnable, id=f"{page.name}: {title}")


@pytest.mark.slow
@pytest.mark.parametrize(("page", "runnable"), list(sections()))
def test_a_section_runs(page, runnable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTENTUNE_DATABASE", str(tmp_path / "records.sqlite"))
    monkeypatch.setattr(attentune, "tune", partial(attentune.tune, trials=4))
    scope = PRELUDES.get(page, dict)()
    for block in runnable:
        if block.language == "python":
            exec(compile(block.text, f"{page}:{block.line}", "exec"), scope)
            continue
        for command in commands(block):
            run_command(command)


def run_command(command):
    arguments = attentune_arguments(command)
    if arguments is None or "TRACKER:9190" in arguments:
        return
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        assert cli.main([*arguments, *SHORTER.get(arguments[0], [])]) == 0, command
