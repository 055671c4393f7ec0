"""The search under groups: planted faults lose under their own class, and never win."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import planted
import psutil
import pytest
from tvm.support.popen_pool import PopenPoolExecutor

import attentune
from attentune import AttentionKey, AttentionProblem
from attentune.errors import (
    CorruptDatabase,
    InvalidParameters,
    InvalidProblem,
    NoValidCandidate,
)
from attentune.group import Group, Policy, always
from attentune.interrupt import kept_apart
from attentune.plan import make_plan
from attentune.search.child import CandidateFailed, Child
from attentune.search.gate import checks
from attentune.search.measure import _shut_down
from attentune.search.tuning import Options, tune_key
from attentune.target import Target

NATIVE = Target.parse("native")
GOOD = planted.small("good")
MASKED = AttentionProblem.parse("1,4,2,64,64,32,32:float32:mask")


def in_batches(*batches):
    """Return a policy whose plan is these batches of names."""
    groups = tuple(
        Group(f"batch {i}", always(len(batches) - i), tuple((n, always(0)) for n in names))
        for i, names in enumerate(batches)
    )
    return Policy("planted", tuple(n for names in batches for n in names), groups)


def tune(batches, problem=MASKED, trials=8, run_seconds=3.0, **options):
    """Tune a problem with variants given in batches."""
    variants = {variant.name: variant for batch in batches for variant in batch}
    policy = in_batches(*([variant.name for variant in batch] for batch in batches))
    key = AttentionKey.from_problem(problem)
    plan = make_plan(key, NATIVE, policy)
    events = []
    chosen = Options(trials=trials, run_seconds=run_seconds, **options)
    record = tune_key(key, key.representative(), plan, variants, chosen, events.append)
    return record, events


def outcomes(losers):
    """Return the outcomes of each variant that lost, without those that were only slower."""
    found = {}
    for loser in losers:
        if loser.outcome != "slower":
            found.setdefault(loser.variant, set()).add(loser.outcome)
    return found


@pytest.mark.slow
def test_each_failure_has_its_class_and_the_search_goes_on():
    faults = [
        planted.UNSUPPORTED, planted.TEMPLATE_RAISES, planted.DOES_NOT_BUILD, planted.CRASHES,
        planted.HANGS, planted.TAKES_ALL_MEMORY, planted.HIDES_ITS_MEMORY, planted.WRONG,
    ]  # fmt: skip
    record, _ = tune([[*faults, GOOD]], trials=16, memory_bytes=8 << 30)
    assert record.variant == "good"
    found = outcomes(record.losers)
    # Where it is a thread of TVM's pool that gets no memory, the process goes down.
    assert found.pop("hides_its_memory") <= {"memory", "crash"}
    assert found == {
        "unsupported": {"unsupported"},
        "template_raises": {"build"},
        "does_not_build": {"build"},
        "crashes": {"crash"},
        "hangs": {"timeout"},
        "takes_all_memory": {"memory"},
        "wrong": {"wrong"},
    }
    reasons = {loser.variant: loser.reason for loser in record.losers}
    assert reasons["unsupported"] == "it was planted"
    assert "planted to fail" in reasons["template_raises"]
    assert "instead of" in reasons["wrong"]


@pytest.mark.slow
def test_a_batch_that_fails_gives_way_to_the_next():
    record, events = tune([[planted.UNSUPPORTED], [planted.WRONG], [GOOD]], trials=4)
    assert record.variant == "good"
    assert record.batch == ("good",)
    assert [e["variants"] for e in events if e["event"] == "batch"] == [
        ["unsupported"], ["wrong"], ["good"],
    ]  # fmt: skip


@pytest.mark.slow
def test_a_batch_with_a_valid_result_ends_the_search():
    record, events = tune([[GOOD], [planted.CRASHES]], trials=4)
    assert record.variant == "good"
    assert sum(e["event"] == "batch" for e in events) == 1
    assert not any(loser.variant == "crashes" for loser in record.losers)


@pytest.mark.slow
def test_when_everything_fails_every_reason_is_given():
    with pytest.raises(NoValidCandidate) as caught:
        tune([[planted.UNSUPPORTED], [planted.WRONG]], trials=2)
    assert outcomes(caught.value.losers) == {"unsupported": {"unsupported"}, "wrong": {"wrong"}}
    assert "it was planted" in str(caught.value)
    assert "instead of" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (planted.WRONG_ON_TAILS, "1,4,2,64,64,32,32:float32"),
        (planted.WRONG_WHEN_MASKED, "1,4,2,64,64,32,32:float32:mask"),
        (planted.WRONG_AT_LARGE_LOGITS, "1,4,2,64,64,32,32:float32"),
        (planted.WRONG_AT_ONE_QUERY, "1,4,2,64,64,32,32:float32"),
        (planted.WRONG_FOR_ONE_HEAD, "1,4,2,64,64,32,32:float32"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_gate_catches_faults_that_show_only_somewhere(fault, text):
    problem = AttentionProblem.parse(text)
    record, _ = tune([[fault], [GOOD]], problem, trials=2)
    assert record.variant == "good"
    assert outcomes(record.losers) == {fault.name: {"wrong"}}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["seed", "default"])
def test_a_variant_from_outside_takes_part_in_the_first_batch(policy):
    (record,) = attentune.tune(MASKED, trials=12, policy=policy, variants=[GOOD, planted.WRONG])
    assert {"good", "wrong"} <= set(record.batch)
    assert record.variant != "wrong"
    assert outcomes(record.losers)["wrong"] == {"wrong"}
    took_part = {record.variant, *(loser.variant for loser in record.losers)}
    assert "good" in took_part


@pytest.mark.slow
def test_a_policy_from_outside_is_followed():
    mine = Policy(
        "mine", ("flash_unit",), (Group("only", always(0), (("flash_unit", always(0)),)),)
    )
    (record,) = attentune.tune(MASKED, trials=4, policy=mine)
    assert record.batch == ("flash_unit",)


def test_a_name_that_ships_is_taken():
    with pytest.raises(InvalidParameters, match="another name"):
        attentune.tune(MASKED, variants=[planted.small("flash_unit")])


def test_trials_are_at_least_one():
    with pytest.raises(InvalidParameters, match="trials is 0"):
        attentune.tune(MASKED, trials=0)


@pytest.mark.parametrize("text", ["1,2,2,0,8,8,8:float32", "1,2,2,8,0,8,8:float32"])
def test_there_is_nothing_to_tune_without_queries_or_keys(text):
    with pytest.raises(InvalidProblem, match="nothing to tune"):
        attentune.tune(text)


@pytest.mark.slow
def test_a_time_budget_is_kept():
    start = time.monotonic()
    record, _ = tune([[GOOD]], trials=1000, seconds=20)
    assert time.monotonic() - start < 22
    assert record.variant == "good"


@pytest.mark.slow
def test_trials_are_kept_and_shared():
    _, events = tune([[GOOD, planted.small("other"), planted.small("third")]], trials=6)
    measured = [event["variant"] for event in events if event["event"] == "measured"]
    assert len(measured) == 6
    assert set(measured) == {"good", "other", "third"}


@pytest.mark.slow
def test_the_cost_model_is_kept_and_a_damaged_one_is_named(tmp_path):
    model = tmp_path / "model.tar"
    problem = AttentionProblem.parse("1,2,2,64,64,32,32:float32")
    guesses = []
    for _ in range(2):
        events = []
        attentune.tune(
            problem, trials=24, database=tmp_path / "records.sqlite", retune=True,
            on_event=events.append,
        )  # fmt: skip
        guesses.append([e["guess"] for e in events if e["event"] == "measured"])
    cold, warm = guesses
    assert cold[:16] == [None] * 16
    # Shares of the fastest one's speed: training that diverged would guess far beyond.
    assert all(-1 < guess < 2 for guess in warm)
    kept = tmp_path / "records.sqlite.cost-model.tar"
    assert kept.exists()
    model.write_bytes(b"no archive")
    with pytest.raises(CorruptDatabase, match="delete it"):
        tune([[GOOD]], trials=2, cost_model=model)


@pytest.mark.slow
def test_a_record_is_found_again_and_nothing_is_measured(tmp_path):
    problem = AttentionProblem.parse("1,2,2,64,64,32,32:float32")
    events = []
    first = attentune.tune(problem, trials=2, database=tmp_path / "records.sqlite")
    again = attentune.tune(
        problem, trials=2, database=tmp_path / "records.sqlite", on_event=events.append
    )
    assert again == first
    assert [event["event"] for event in events] == ["key", "record"]


@pytest.mark.slow
def test_a_record_is_used_by_the_next_call_of_this_process(tmp_path):
    path = tmp_path / "records.sqlite"
    q = np.zeros((1, 2, 64, 32), np.float32)
    attentune.attention(q, q, q, database=path)
    attentune.tune("1,2,2,64,64,32,32:float32", trials=2, database=path)
    # With on_miss="error" alone the call would have its own dispatcher, and prove nothing.
    dispatcher = attentune.api._dispatcher("native", path, "heuristic", "default", None)
    attentune.attention(q, q, q, database=path)
    (call,) = dispatcher._calls.values()
    with attentune.Database(path) as database:
        (record,) = database.records()
    assert call.kernel.variant == record.variant
    assert call.kernel.parameters == record.parameters


@pytest.mark.slow
def test_no_child_process_is_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    tune([[GOOD]], trials=2)
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before


@pytest.mark.slow
def test_the_same_seed_proposes_the_same_candidates():
    def candidates(seed):
        _, events = tune([[GOOD]], trials=2, seed=seed)
        return [e["parameters"] for e in events if e["event"] == "measured"]

    assert candidates(7) == candidates(7)


@pytest.mark.slow
def test_the_kernel_that_the_search_starts_from_stays_intact():
    from tvm.ir import assert_structural_equal

    from attentune.schedules import VARIANTS
    from attentune.search.measure import search
    from attentune.search.workload import Workload

    key = AttentionKey.from_problem(AttentionProblem.parse("1,4,4,64,64,32,32:float32:causal"))
    for variant in VARIANTS:
        structure = variant.structures(key, NATIVE)[0]
        workload = Workload(variant, structure, key, key.representative(), NATIVE)
        untouched = workload.module().script()
        searched = workload.module()
        measured = search([workload], trials=8, seed=0, run_seconds=10)
        assert [m.failure for m in measured] == [None] * len(measured)
        assert workload.module().script() == untouched
        assert_structural_equal(workload.module(), searched)


def test_the_gate_has_tails_single_queries_few_keys_large_logits_and_whole_groups():
    key = AttentionKey.from_problem(MASKED)
    problems = checks(key, key.representative())
    assert {check.problem.seq_q for check in problems} >= {1, 61, 64}
    assert any(check.problem.seq_kv % 16 for check in problems)
    assert any(check.problem.seq_kv <= 17 for check in problems)
    assert any(check.amplitude >= 30 for check in problems)
    assert all(check.problem.group == 2 for check in problems)
    assert any(check.problem.kv_heads > 1 for check in problems)


def test_the_gate_stays_small_for_long_sequences():
    key = AttentionKey.from_problem(AttentionProblem.parse("1,32,8,8192,8192,128,128:float32"))
    for check in checks(key, key.representative()):
        p = check.problem
        assert p.batch * p.q_heads * p.seq_q * p.seq_kv <= 1 << 24


@pytest.mark.parametrize("error", ["MemoryError()", "ValueError()"])
def test_no_candidate_runs_in_the_process_in_which_one_failed(error):
    child = Child()
    try:
        with pytest.raises(CandidateFailed):
            child.call("crash", 60, exec, f"import builtins; builtins.kept = 1; raise {error}")
        assert child.call("crash", 60, eval, "hasattr(__import__('builtins'), 'kept')") is False
    finally:
        child.close()


def test_an_interrupt_while_a_child_starts_waits_until_it_can_be_ended(monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    child = Child()
    with pytest.raises(KeyboardInterrupt), kept_apart(), contextlib.closing(child):
        child.call("crash", 60, eval, "1")
    (process,) = started
    assert process.poll() is not None


def test_a_pool_shuts_down_while_its_threads_start_processes(monkeypatch):
    started = []
    in_start = threading.Event()

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def slow_pipe(*arguments):
        in_start.set()
        time.sleep(0.3)  # the process is noted, its pipes are not
        return fdopen(*arguments)

    fdopen = os.fdopen
    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(os, "fdopen", slow_pipe)
    pool = PopenPoolExecutor(max_workers=2)
    for _ in range(4):
        pool.submit(time.sleep, 60)
    assert in_start.wait(10)
    _shut_down(pool)
    assert started
    assert [process.poll() is None for process in started] == [False] * len(started)


INTERRUPTED = """
import os, signal, sys, threading, time
import attentune, psutil

def press():
    time.sleep(float(sys.argv[1]))
    print(time.monotonic(), flush=True)
    os.kill(os.getpid(), signal.SIGINT)

def on_event(event):
    if event["event"] == "batch":
        threading.Thread(target=press, daemon=True).start()

try:
    attentune.tune("1,8,8,256,256,64,64:float32", trials=64, on_event=on_event)
except KeyboardInterrupt:
    print(time.monotonic(), len(psutil.Process().children(recursive=True)), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 3.0, 6.5])
def test_an_interrupt_in_the_middle_is_an_interrupt_and_leaves_no_child(seconds):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(seconds)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    pressed, ended, children = (float(word) for word in done.stdout.split())
    assert children == 0
    assert ended - pressed < 10
