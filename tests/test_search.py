"""The search under groups: planted faults lose under their own class, and never win."""

import planted
import psutil
import pytest

from attentune import AttentionKey, AttentionProblem
from attentune.errors import NoValidCandidate
from attentune.group import Group, Policy, always
from attentune.plan import make_plan
from attentune.search.gate import checks
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
        planted.HANGS, planted.WRONG,
    ]  # fmt: skip
    record, _ = tune([[*faults, GOOD]], trials=14)
    assert record.variant == "good"
    assert outcomes(record.losers) == {
        "unsupported": {"unsupported"},
        "template_raises": {"build"},
        "does_not_build": {"build"},
        "crashes": {"crash"},
        "hangs": {"timeout"},
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
