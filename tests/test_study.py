"""The studies of the search: which members they look at, and what they report."""

import pytest

from attentune import AttentionKey, AttentionProblem, api, study
from attentune.search.bucket import members
from attentune.target import Target

NATIVE = Target.parse("native")


@pytest.mark.parametrize("text", [*study.REGRET_PROBLEMS, "1,8,8,64,1024,64,64:float32:mask:bias"])
def test_members_share_the_key_and_differ(text):
    problem = AttentionProblem.parse(text)
    found = members(study._corner(problem), study.PLACES)
    key = AttentionKey.from_problem(problem)
    assert {AttentionKey.from_problem(member) for member in found} == {key}
    assert len({(m.seq_q, m.seq_kv) for m in found}) == len(study.PLACES)
    assert found[0].seq_q == key.seq_q // 2 + 1
    assert found[-1].seq_q == key.seq_q


def test_a_bucket_of_one_length_has_that_member():
    found = members(AttentionProblem.parse("1,8,8,1,1024,64,64:float32"), study.PLACES)
    assert {member.seq_q for member in found} == {1}
    assert {member.seq_kv for member in found} == {513, 641, 769, 896, 1024}


def test_twenty_members_are_looked_at():
    assert len(study.REGRET_PROBLEMS) * len(study.PLACES) == 20


@pytest.mark.slow
def test_regret_is_at_least_one_and_names_both():
    problem = AttentionProblem.parse("1,2,2,64,64,32,32:float32")
    results = list(study.regret([problem], NATIVE, trials=4, rounds=1))
    assert len(results) == len(study.PLACES)
    for one in results:
        assert one["regret"] >= 1
        assert one["seconds"] == pytest.approx(one["regret"] * one["best"])
        assert "block_q" in one["winner"]
        assert "block_q" in one["best_candidate"]


@pytest.mark.slow
def test_both_strategies_are_run_and_only_get_better():
    problem = AttentionProblem.parse("1,2,2,64,64,32,32:float32")
    results = list(study.strategies([problem], NATIVE, trials=16, seeds=(0,)))
    assert [one["strategy"] for one in results] == ["evolutionary", "random"]
    for one in results:
        assert one["found"] == sorted(one["found"], reverse=True)
        assert one["candidates"] > 100


@pytest.mark.slow
def test_overhead_is_a_share():
    found = study.overhead(AttentionProblem.parse("1,2,2,64,64,32,32:float32"), NATIVE, trials=8)
    assert 0 < found["overhead"] < 1
    assert 0 < found["busy"] < found["wall"]


@pytest.mark.slow
def test_the_candidates_of_a_record_are_compiled_winner_first():
    (record,) = api.tune("1,2,2,64,64,32,32:float32", trials=4)
    kernels = api.candidates(record)
    assert kernels[0].variant == record.variant
    assert kernels[0].parameters == record.parameters
    assert len(kernels) == 1 + sum(loser.outcome == "slower" for loser in record.losers)
