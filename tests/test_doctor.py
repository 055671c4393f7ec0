"""What the machine has, completion in a shell, and the nearest valid name."""

import json
import shutil
import subprocess
import sys

import pytest

from attentune import cli, completion, doctor, models
from attentune.doctor import Finding
from attentune.target import Target, native

AMX = Target.parse({"kind": "llvm", "mcpu": "x86-64-v4", "mattr": ["+amx-tile"],
                    "mtriple": "x86_64-unknown-linux-gnu"})  # fmt: skip
BASH = shutil.which("bash")


def test_doctor_says_what_there_is(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = {
        (one["topic"], one["name"]): one
        for one in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert found["machine", "target"]["found"] == str(native())
    assert found["versions", "apache-tvm"]["found"] == doctor.PINNED["apache-tvm"]
    assert found["versions", "LLVM"]["found"].isdecimal()
    assert found["versions", "Python"]["found"].startswith(f"{sys.version_info[0]}.")
    assert found["tools", "cc"]["found"] == next(
        filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None
    )


def test_doctor_for_a_person_names_what_each_enables(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "AMX permission" in out
    assert "linking libraries for this machine" in out


def test_a_wrong_pair_of_versions_is_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "installed", lambda package: "0.1")
    assert cli.main(["doctor"]) == 1
    assert "WRONG, run: pip install apache-tvm==" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "answer", "found"),
    [(AMX, 0, "granted"), (AMX, -1, None), (Target.parse("cuda:sm_80"), 0, None)],
)
def test_amx_permission(target, answer, found):
    assert doctor.amx_permission(target, lambda: answer) == found


def test_a_finding_is_data():
    assert Finding("tools", "cc", None).wrong is None


def complete(*words):
    """Return what bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    text = completion.script(cli._parser(), "bash", models.NAMED)
    program = f"""{text}
COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _attentune; echo "${{COMPREPLY[@]}}" """
    run = subprocess.run([BASH, "-c", program], capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.mark.skipif(BASH is None, reason="needs bash to run its completion")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("attentune", "t"), ["tune"]),
        (("attentune", "tune", "--tri"), ["--trials"]),
        (("attentune", "plan", "--model", "bert"), ["bert-base"]),
        (("attentune", "plan", "--policy", ""), ["default", "seed"]),
        (("attentune", "tune", "--level", "b"), ["balanced"]),
        (("attentune", "export", "--on-miss", ""), ["heuristic", "error"]),
        (("attentune", "report", "rec"), []),  # a file: the shell's own completion
    ],
)
def test_completion(words, offered):
    assert complete(*words) == offered


def test_zsh_reads_the_same_script(capsys):
    assert cli.main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["tun"], "did you mean tune?"),
        (["plan", "--modle", "bert-base"], "did you mean --model?"),
        (["tune", "--level", "balance"], "did you mean balanced?"),
        (["plan", "--model", "bert-bse"], "bert-base"),
        (["plan", "--problem", "1,1,1,8,8,8,8:float32", "--policy", "sed"], "seed"),
        (["plan", "--problem", "1,1,1,8,8,8,8:float23"], "float32"),
    ],
)
def test_a_wrong_name_suggests_the_nearest(arguments, near, capsys):
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 1
    assert near in error
    assert error.count("\n") == 1
