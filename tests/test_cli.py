"""The command line: what it prints, the schema of its events, its errors, and how it ends."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from attentune import AttentionKey, Database, Record, bench, cli, models, report
from attentune.record import Loser
from attentune.target import native

SMALL = "1,2,2,64,64,32,32:float32"
CAUSAL = "1,2,2,64,64,32,32:float32:causal"
PARAMETERS = {"block_q": 32, "block_kv": 64}


def call(capsys, *argv):
    """Run a command and return its exit code, output and errors."""
    try:
        code = cli.main([str(one) for one in argv])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def example(text=SMALL, **changes):
    """Return a record as a search would make it."""
    losers = (
        Loser("flash_cmma_2_planes", {}, "unsupported", "it has no unit"),
        Loser("flash_unit", {"block_q": 64, "block_kv": 64}, "slower", "it is 1.50 times", 3e-3),
        Loser("fallback", PARAMETERS, "slower", "it is 1.20 times", 2.4e-3),
        Loser("flash_unit", {"block_q": 32, "block_kv": 32}, "build", "LLVM says no"),
        Loser("flash_unit", {"block_q": 64, "block_kv": 32}, "build", "LLVM says no"),
    )
    fields = {
        "key": AttentionKey.from_problem(cli.AttentionProblem.parse(text)),
        "target": str(native()), "variant": "flash_unit", "parameters": PARAMETERS,
        "seconds_all": (2e-3, 2e-3), "score": 2e-3, "losers": losers,
        "versions": {"tvm": "1"}, "fingerprint": "f", "created": "2026-01-02T03:04:05Z",
        "machine": "m", "batch": ("fallback", "flash_unit"), "workspace_bytes": 1 << 20,
    }  # fmt: skip
    return Record(**{**fields, **changes})


def rendered(view, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    return console.file.getvalue()


@pytest.mark.parametrize("command", ["plan", "tune", "show", "run", "bench"])
def test_help_has_examples(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert f"  attentune {command} " in out
    assert "B,Hq,Hkv,Sq,Skv,D,Dv:dtype" in out


def test_help_of_tune_has_the_schema_of_events(capsys):
    _, out, _ = call(capsys, "tune", "--help")
    for name, fields in report.EVENTS.items():
        assert f"  {name}\n" in out
        for field, text in fields.items():
            assert f"    {field}: {text}" in out


CORRUPT = "corrupt.sqlite"
ERRORS = [
    ([], "COMMAND"),
    (["frob"], "frob"),
    (["plan"], "--problem"),
    (["plan", "--problem", "1,2"], "1,2"),
    (["plan", "--problem", "1,3,2,4,4,8,8:float32"], "multiple of kv_heads"),
    (["plan", "--problem", SMALL, "--target", "nativ"], "did you mean 'native'"),
    (["plan", "--problem", SMALL, "--policy", "sead"], "did you mean 'seed'"),
    (["plan", "--model", "bert-bse"], "did you mean 'bert-base'"),
    (["tune", "--problem", SMALL, "--trials", "0"], "trials"),
    (["tune", "--problem", SMALL, "--trials", "many"], "many"),
    (["tune", "--problem", SMALL, "--level", "ful"], "ful"),
    (["tune", "--problem", SMALL, "--target", "cuda:sm_80"], "no CPU"),
    (["tune", "--problem", SMALL, "--tracker", "here:9190"], "--rpc-key"),
    (["tune", "--problem", SMALL, "--tracker", "here", "--rpc-key", "k"], "HOST:PORT"),
    (["tune", "--problem", "1,2,2,0,4,8,8:float32"], "nothing to tune"),
    (["tune", "--problem", SMALL, "--database", "."], "is a folder"),
    (["tune", "--problem", SMALL, "--database", CORRUPT], CORRUPT),
    (["tune", "--problem", SMALL, "--database", f"{CORRUPT}/x"], CORRUPT),
    (["show", "--database", "nowhere.sqlite"], "nowhere.sqlite"),
    (["show", "--database", CORRUPT], CORRUPT),
    (["run", "--problem", SMALL, "--database", "nowhere.sqlite"], "nowhere.sqlite"),
    (["run", "--problem", SMALL, "--target", '{"kind":"llvm","mtriple":"riscv64-x"}'], "riscv64"),
    (["run", "--problem", "99999,99999,1,99999,1,9,9:float32"], "memory"),
    (["bench", "--against", "torhc"], "torhc"),
    (["bench", "--threads", "1,x"], "1,x"),
    (["bench", "--threads", "9999"], "9999"),
    (["bench", "--rounds", "0"], "rounds"),
]


@pytest.mark.parametrize(("argv", "words"), ERRORS, ids=[" ".join(a) for a, _ in ERRORS])
def test_bad_input_is_one_line_and_exit_code_1(capsys, monkeypatch, tmp_path, argv, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTENTUNE_DATABASE", str(tmp_path / "own.sqlite"))
    (tmp_path / CORRUPT).write_text("no database at all, but a long enough text " * 99)
    code, out, err = call(capsys, *argv)
    assert code == 1
    assert out == "" or argv[0] == "tune"
    assert err.count("\n") == 1
    assert err.startswith("attentune: ")
    assert words in err
    assert "Traceback" not in err


def test_plan_prints_batches_and_reasons(capsys):
    code, out, _ = call(capsys, "plan", "--problem", SMALL, "--target", "cuda:sm_80")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["batch", "1"] in [line[:2] for line in lines]
    assert "unsupported: no schedule for cuda targets" in out


def test_plan_as_json(capsys):
    argv = ["plan", "--model", "whisper-base", "--problem", SMALL, "--problem", SMALL, "--json",
            "--policy", "seed"]  # fmt: skip
    code, out, _ = call(capsys, *argv)
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["problem"] for one in found] == [SMALL, *models.NAMED["whisper-base"]]
    for one in found:
        assert set(one) == {
            "problem", "key", "target", "policy", "batches", "dropped", "unsupported",
        }  # fmt: skip
        assert one["policy"] == "seed"
        assert set(one["unsupported"]) <= {name for batch in one["batches"] for name in batch}


EXAMPLES = [
    {"event": "key", "key": "k", "target": "t"},
    {"event": "batch", "index": 0, "variants": ["fallback", "flash_unit"]},
    {"event": "lost", "variant": "other", "parameters": {}, "outcome": "unsupported",
     "reason": "no unit"},
    {"event": "measured", "variant": "fallback", "parameters": PARAMETERS, "seconds": 2e-3,
     "guess": None, "outcome": None},
    {"event": "measured", "variant": "flash_unit", "parameters": PARAMETERS, "seconds": None,
     "guess": None, "outcome": "crash"},
    {"event": "measured", "variant": "flash_unit", "parameters": PARAMETERS, "seconds": 1e-3,
     "guess": 0.9, "outcome": None},
    {"event": "measured", "variant": "fallback", "parameters": PARAMETERS, "seconds": 3e-3,
     "guess": 0.5, "outcome": None},
    {"event": "final", "candidates": 2},
    {"event": "lost", "variant": "fallback", "parameters": PARAMETERS, "outcome": "slower",
     "reason": "it is 2 times"},
    {"event": "record", "record": {}, "found": False},
]  # fmt: skip


def follow(watcher):
    with watcher:
        for event in EXAMPLES:
            watcher(event)
    return watcher


def test_plain_lines_tell_what_matters():
    console = Console(file=io.StringIO(), width=200)
    watcher = follow(report.PlainLines(console, 4))
    lines = [line.split("] ", 1)[1] for line in console.file.getvalue().splitlines()]
    assert lines == [
        "batch 1: fallback, flash_unit",
        "other unsupported: no unit",
        "trial 1/4: best fallback 2 ms (block_q 32, block_kv 64)",
        "trial 3/4: best flash_unit 1 ms (block_q 32, block_kv 64)",
        "final: 2 candidates measured again, side by side",
    ]
    assert (watcher.measured, watcher.finalists) == (4, 2)


def test_progress_bar_tells_batch_variant_trials_and_best():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    watcher = report.LiveProgress(console, 4)
    with watcher:
        for event in EXAMPLES[:6]:
            watcher(event)
        (task,) = watcher.progress.tasks
        assert task.description == "batch 1 flash_unit"
        assert (task.completed, task.total) == (3, 4)
        assert task.fields["best"] == "best flash_unit 1 ms"
        assert "left" in rendered(watcher.progress.get_renderable())
        watcher(EXAMPLES[6])
        assert (task.description, task.total) == ("batch 1 building and checking the best", None)
        watcher(EXAMPLES[7])
        assert task.description == "batch 1 final of 2"
        watcher(EXAMPLES[9])
        assert watcher.progress.tasks == []


def test_json_lines_are_the_events():
    console = Console(file=io.StringIO())
    follow(report.JsonLines(console))
    assert [json.loads(line) for line in console.file.getvalue().splitlines()] == EXAMPLES


def test_events_of_the_examples_are_those_of_the_schema():
    assert {event["event"] for event in EXAMPLES} == set(report.EVENTS)
    for event in EXAMPLES:
        assert set(event) == {"event", *report.EVENTS[event["event"]]}


def test_ranking_is_by_time_and_says_why():
    def memory(variant, parameters):
        return None if variant == "fallback" else 1 << 20

    text = rendered(report.ranking(example(), memory=memory, ideal=1e-3))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert [row for row in rows if row] == [
        ["1", "flash_unit", "64/32", "2 ms", "1.00", "50 %", "1.0 MiB", ""],
        ["2", "fallback", "64/32", "2.4 ms", "1.20", "42 %", "-", "it is 1.20 times"],
        ["3", "flash_unit", "64/64", "3 ms", "1.50", "33 %", "1.0 MiB", "it is 1.50 times"],
        ["-", "flash_cmma_2_planes", "-", "-", "-", "-", "-", "unsupported: it has no unit"],
        ["-", "flash_unit", "-", "-", "-", "-", "-", "build: LLVM says no (2 candidates)"],
    ]
    assert "parameters: block_kv/block_q" in text
    assert "roofline" not in rendered(report.ranking(example(), memory=memory))


def test_explanation_says_why_this_batch():
    assert "every candidate of the batches before it failed (flash_cmma_2_planes)" in rendered(
        report.explanation(example(), None)
    )
    first = rendered(report.explanation(example(losers=()), "it is old"))
    assert "it is the plan's first" in first
    assert "stale, not served: it is old" in first


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (2.5e-3, "2.5 ms"), (2.5e-6, "2.5 us"), (None, "-")]
)
def test_durations_have_units(seconds, text):
    assert report.duration(seconds) == text


def test_show_lists_and_explains_stale_records_too(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "PIPE_WIDTH", 300)
    path = tmp_path / "records.sqlite"
    with Database(path) as database:
        database.put(example())
        database.put(example(CAUSAL, variant="gone"))
    code, out, _ = call(capsys, "show", "--database", path)
    assert code == 0
    assert "stale: the sources of flash_unit have changed" in out
    assert "stale: there is no variant gone any more" in out

    code, out, _ = call(capsys, "show", "--database", path, "--problem", SMALL)
    assert code == 0
    assert "stale, not served: the sources of flash_unit have changed" in out
    assert "it is 1.20 times" in out

    code, out, _ = call(capsys, "show", "--database", path, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == 2
    assert all(one.pop("stale") for one in found)
    assert Record.from_json(found[0]) in (example(), example(CAUSAL, variant="gone"))

    code, _, err = call(capsys, "show", "--database", path, "--problem", "1,1,1,1,1,1,1:float32")
    assert code == 1
    assert "tune it" in err


def test_run_checks_its_result(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTENTUNE_DATABASE", str(tmp_path / "none.sqlite"))
    monkeypatch.setattr(cli, "RUN_SECONDS", 0.001)
    argv = ["run", "--problem", "1,4,2,5,7,16,8:float32:mask", "--json"]
    code, out, _ = call(capsys, *argv)
    result = json.loads(out)
    assert code == 0
    assert set(result) == {
        "problem", "variant", "parameters", "tuned", "seconds", "error", "wrong",
    }  # fmt: skip
    assert result["wrong"] is None
    assert not result["tuned"]
    assert 0 < result["error"] < 1e-5

    monkeypatch.setattr(bench, "difference", lambda *_: "all of it")
    code, out, _ = call(capsys, *argv[:-1])
    assert code == 1
    assert "WRONG: all of it" in out


@pytest.mark.parametrize(
    "text", ["1,2,2,0,5,8,8:float32", "0,2,2,3,5,8,8:float32", "1,2,2,3,0,8,8:float32"]
)
def test_nothing_to_compute_is_right(capsys, monkeypatch, text):
    monkeypatch.setattr(cli, "RUN_SECONDS", 0.001)
    code, out, _ = call(capsys, "run", "--problem", text)
    assert code == 0
    assert "right" in out


def test_bench_prints_a_table_or_json(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTENTUNE_DATABASE", str(tmp_path / "none.sqlite"))
    result = {"name": "attentune", "how": "so", "seconds": 1e-3, "spread": 0.1, "gflops": 2.0,
              "ratio": 1.0, "wrong": None, "samples": [[1e-3]]}  # fmt: skip
    jobs = []

    def run_in_child(job):
        jobs.append(job)
        yield {"problem": job.problems[0], "threads": job.threads, "flops": 1,
               "unavailable": {"torch": "not installed"}, "results": [result]}  # fmt: skip

    monkeypatch.setattr(bench, "run_in_child", run_in_child)
    argv = ["bench", "--problem", SMALL, "--threads", "1", "--against", "torch,tvm"]
    code, out, _ = call(capsys, *argv)
    assert code == 0
    assert "torch: left out, not installed" in out
    assert (jobs[0].threads, jobs[0].against) == (1, ["torch", "tvm"])

    code, out, _ = call(capsys, *argv, "--json")
    assert json.loads(out)["results"] == [result]

    result["wrong"] = "all of it"
    assert call(capsys, *argv)[0] == 1

    call(capsys, "bench")
    assert jobs[-1].problems == [text for name in cli.DEMO_MODELS for text in models.NAMED[name]]


@pytest.mark.slow
def test_tune_tells_events_of_the_schema_then_finds_its_record(capsys, tmp_path):
    path = tmp_path / "records.sqlite"
    argv = ["tune", "--problem", SMALL, "--trials", "4", "--database", path, "--json"]
    code, out, err = call(capsys, *argv)
    assert (code, err) == (0, "")
    events = [json.loads(line) for line in out.splitlines()]
    assert {event["event"] for event in events} == set(report.EVENTS)
    for event in events:
        assert set(event) == {"event", *report.EVENTS[event["event"]]}, event
    record = Record.from_json(events[-1]["record"])

    code, out, _ = call(capsys, *argv)
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["key", "record"]
    assert events[-1]["found"]

    code, out, _ = call(capsys, *argv[:-1])
    assert "found in the database" in out
    code, out, _ = call(capsys, "run", "--problem", SMALL, "--database", path, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["tuned"]
    assert (result["variant"], result["parameters"]) == (record.variant, record.parameters)


@pytest.mark.slow
def test_second_demo_builds_and_measures_no_candidate(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "DEMO_MODELS", ("tiny",))
    monkeypatch.setitem(models.NAMED, "tiny", (SMALL, CAUSAL))
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "demo.sqlite"
    argv = ["demo", "--trials", "2", "--database", path]
    code, out, _ = call(capsys, *argv)
    assert code == 0
    assert out.count("times as fast as TVM's own lowering") == 2
    assert " 0 builds" not in out
    assert str(path) in out.replace("\n", "")

    monkeypatch.setattr("attentune.search.tuning.tune_key", None)
    code, out, _ = call(capsys, *argv)
    assert code == 0
    assert "0 builds and 0 measurements of candidates" in out


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "sigwait"), reason="needs POSIX signals")
def test_interruption_is_one_line_and_leaves_nothing(tmp_path):
    path, scratch = tmp_path / "records.sqlite", tmp_path / "scratch"
    scratch.mkdir()
    argv = ["tune", "--problem", SMALL, "--problem", CAUSAL, "--trials", "2", "--json",
            "--database", path]  # fmt: skip
    program = "import sys; from attentune.cli import main; sys.exit(main(sys.argv[1:]))"
    child = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, argv)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(scratch)},
        start_new_session=True,
    )  # fmt: skip
    seen = []
    for line in child.stdout:
        seen.append(json.loads(line)["event"])
        # In the second key's search, with children at work.
        if seen.count("key") == 2 and seen[-1] == "measured":
            break
    children = psutil.Process(child.pid).children(recursive=True)
    begin = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, err = child.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert child.returncode == 130
    assert err == "attentune: interrupted; what was finished is kept\n"
    assert children
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    assert list(scratch.iterdir()) == []
    with Database(path, read_only=True) as database:
        assert len(database) == 1


def test_closed_output_is_no_error(tmp_path):
    path = tmp_path / "records.sqlite"
    with Database(path) as database:
        database.put(example())
    program = "import sys; from attentune.cli import main; sys.exit(main(sys.argv[1:]))"
    child = subprocess.Popen(
        [sys.executable, "-c", program, "show", "--json", "--database", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait() == 1


def test_export_and_run_without_the_compiler(tmp_path, capsys):
    path = tmp_path / "a.so"
    text = "1,2,2,64,64,16,16:float32"
    assert cli.main(["export", "--problem", text, "--output", str(path)]) == 0
    assert "1 keys, " in capsys.readouterr().out
    assert cli.main(["export", "--problem", text, "--output", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "a.so.json").read_text())
    run = ["run", "--library", str(path), "--problem", "2,1,1,50,60,16,16:float32"]
    assert cli.main(run) == 0
    assert ", right" in capsys.readouterr().out
    assert cli.main([*run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wrong"] is None
    assert cli.main(["run", "--library", str(tmp_path / "b.so"), "--problem", text]) == 1
    assert "cannot be read" in capsys.readouterr().err
