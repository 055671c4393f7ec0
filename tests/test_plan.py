"""Plans as tables, with groups and variants that exist nowhere else."""

import dataclasses
import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attentune.errors import InvalidPolicy
from attentune.group import Context, Group, Policy, always
from attentune.key import AttentionKey
from attentune.plan import make_plan, memory_budget, merge
from attentune.problem import AttentionProblem
from attentune.target import Target

TARGET = Target.parse({"kind": "llvm"})
PROBLEM = AttentionProblem.parse("1,2,2,60,60,8,8:float32")
KEY = AttentionKey.from_problem(PROBLEM)
CONTEXT = Context(KEY, TARGET, memory_bytes=1 << 20)


def group(name, priority, **members):
    return Group(name, always(priority), tuple((n, always(p)) for n, p in members.items()))


G = group


@pytest.mark.parametrize(
    ("groups", "variants", "batches"),
    [
        pytest.param((), "", (), id="nothing"),
        pytest.param((G("g", 1),), "", (), id="a group without members"),
        pytest.param((G("g", 1, a=0),), "a", ("a",), id="one"),
        pytest.param(
            (G("low", 1, a=0), G("high", 2, b=0)), "ab", ("b", "a"), id="higher groups first"
        ),
        pytest.param(
            (G("g", 1, a=0, b=2, c=1),), "abc", ("b", "c", "a"), id="higher variants first"
        ),
        pytest.param((G("g", 1, b=5, a=5),), "ab", ("ab",), id="ties are a batch, as registered"),
        pytest.param(
            (G("low", 1, a=9), G("high", 2, b=0)),
            "ab",
            ("b", "a"),
            id="the group's priority before the variant's",
        ),
        pytest.param(
            (G("g", 3, b=3, c=0), G("h", 3, a=3, d=1)),
            "abcd",
            ("ab", "d", "c"),
            id="groups of one priority merge",
        ),
        pytest.param(
            (G("low", 1, a=1, b=1), G("high", 2, a=1)),
            "ab",
            ("a", "b"),
            id="in two groups, emitted where it comes first",
        ),
        pytest.param(
            (G("g", 1, a=1, b=0), G("h", 1, a=0)), "ab", ("a", "b"), id="twice at one priority"
        ),
        pytest.param((G("g", 2, a=1), G("h", 1, a=1)), "a", ("a",), id="no empty batch"),
        pytest.param((G("g", 1, a=-1, b=0),), "ab", ("b",), id="negative drops a variant"),
        pytest.param(
            (G("g", 2, a=-1), G("h", 1, a=3, b=0)), "ab", ("b",), id="dropped from all groups"
        ),
        pytest.param((G("g", -1, a=5), G("h", 0, b=0)), "ab", ("b",), id="negative drops a group"),
        pytest.param(
            (G("g", -1, a=5), G("h", 0, a=0, b=1)),
            "ab",
            ("b", "a"),
            id="other groups keep what a dropped group had",
        ),
        pytest.param((G("g", -1, a=5),), "a", (), id="all dropped"),
        pytest.param(
            (G("g", 1, b=1, c=0),), "abc", ("ab", "c"), id="without a group, the first batch"
        ),
        pytest.param((), "ab", ("ab",), id="no group at all"),
        pytest.param((G("g", -1, a=0),), "ab", ("b",), id="without a group, all others dropped"),
        pytest.param((G("g", 1, x=5, a=0),), "a", ("a",), id="members that there are not"),
        pytest.param((G("g", 1, a=0),), "aa", ("a",), id="a variant named twice"),
        pytest.param(
            (G("g", -5, a=0), G("h", 10**30, b=-7, c=10**30)), "abc", ("c",), id="any integer"
        ),
    ],
)
def test_merge(groups, variants, batches):
    expected = tuple(tuple(batch) for batch in batches)
    assert merge(groups, variants, CONTEXT) == expected
    assert merge(groups[::-1], variants, CONTEXT) == expected


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            (Group("g", lambda context: 1.5, ()),),
            "The priority of group 'g' is 1.5; it must be an integer.",
        ),
        (
            (Group("g", always(1), (("a", lambda context: None),)),),
            "The priority of variant 'a' is None; it must be an integer.",
        ),
        (
            (Group("g", always(True), (("a", always(0)),)),),
            "The priority of group 'g' is True; it must be an integer.",
        ),
    ],
)
def test_priorities_are_integers(groups, message):
    with pytest.raises(InvalidPolicy) as caught:
        merge(groups, "a", CONTEXT)
    assert str(caught.value) == message


def test_priorities_see_the_context():
    seen = []
    policy = Policy(
        "watching",
        ("a",),
        (Group("g", lambda context: seen.append(context) or 1, (("a", always(0)),)),),
    )
    make_plan(PROBLEM, TARGET, policy, memory_bytes=7)
    assert set(seen) == {Context(KEY, TARGET, 7, PROBLEM)}


NAMES = "abcdef"
PRIORITIES = st.integers(-2, 3)
GROUPS = st.lists(
    st.builds(
        lambda priority, members: group("g", priority, **members),
        PRIORITIES,
        st.dictionaries(st.sampled_from(NAMES), PRIORITIES, max_size=4),
    ),
    max_size=4,
)


@given(GROUPS, st.permutations(NAMES))
@settings(max_examples=80, deadline=None)
def test_everything_that_is_not_dropped_is_emitted_once(groups, variants):
    batches = merge(groups, variants, CONTEXT)
    emitted = [name for batch in batches for name in batch]
    own, kept = {}, set()
    for g in groups:
        for name, priority in g.members:
            own.setdefault(name, []).append(priority(CONTEXT))
            if g.priority(CONTEXT) >= 0:
                kept.add(name)
    wanted = {n for n in NAMES if n not in own or (min(own[n]) >= 0 and n in kept)}
    assert len(emitted) == len(set(emitted))
    assert set(emitted) == wanted
    assert all(batches)
    for batch in batches:
        assert list(batch) == sorted(batch, key=variants.index)


def test_make_plan():
    policy = Policy("mine", ("a", "b", "c", "d"), (G("g", 1, a=0, b=-1, c=2), G("h", -1, d=3)))
    plan = make_plan(PROBLEM, TARGET, policy, ("z", "a"), memory_bytes=0)
    assert plan == make_plan(KEY, TARGET, policy, ("z", "a"), memory_bytes=0)
    assert (plan.key, plan.target, plan.policy) == (KEY, TARGET, "mine")
    assert plan.batches == (("c", "z"), ("a",))
    assert plan.dropped == ("b", "d")


def test_scores_are_counted_on_the_call_where_it_is_known():
    assert CONTEXT.score_bytes == 4 * 2 * 64 * 64
    assert dataclasses.replace(CONTEXT, problem=PROBLEM).score_bytes == 4 * 2 * 60 * 60


def test_a_policy_names_nothing_twice():
    for what, variants, groups in (
        ("variant", ("a", "b", "a"), ()),
        ("group", (), (G("a", 0), G("a", 1))),
    ):
        with pytest.raises(InvalidPolicy) as caught:
            Policy("mine", variants, groups)
        assert str(caught.value) == f"The policy 'mine' names the {what} 'a' twice; name it once."


def test_memory_is_a_share_of_what_is_free(monkeypatch, tmp_path):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable:    4000 kB\n")
    # The package has a function of the module's name.
    plan_module = importlib.import_module("attentune.plan")
    monkeypatch.setattr(plan_module, "Path", lambda path: info)
    assert memory_budget() == 1000 * 1024
    info.unlink()
    monkeypatch.setattr(
        plan_module.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 8}.get, raising=False
    )
    assert memory_budget() == 4096 * 8 // 4
