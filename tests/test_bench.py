"""The benchmark's arithmetic, its turns by a fake clock, and what its baselines compute."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest

from attentune import bench, reference
from attentune.bench import Contestant, Job, Timing, Unavailable, interleave
from attentune.errors import AttentuneError, InvalidParameters, Unsupported
from attentune.problem import AttentionProblem
from attentune.search.inputs import random_inputs
from attentune.target import Target

NATIVE = Target.parse("native")
SMALL = "1,2,1,5,7,16,8:float32"


class Clock:
    """Time that passes only by sleeping and by calls."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.log.append("sleep")

    def contestant(self, name, *durations):
        """Return one whose calls take these times in turn, the last one ever after."""
        left = list(durations)

        def call():
            self.now += left.pop(0) if len(left) > 1 else left[0]
            self.log.append(name)

        return Contestant(name, "", call)


def run(clock, *contestants, **options):
    settings = {"rounds": 2, "block_seconds": 1.0, "gap_seconds": 0.5, **options}
    return interleave(contestants, clock=clock, sleep=clock.sleep, **settings)


def test_contestants_take_turns_with_a_rest_before_each():
    clock = Clock()
    run(clock, clock.contestant("a", 0.5), clock.contestant("b", 1.0))
    turn_a, turn_b = ["sleep", "a", "a"], ["sleep", "b", "b"]
    assert clock.log == turn_a + turn_b + turn_a + turn_b


def test_first_call_of_a_turn_is_not_counted():
    clock = Clock()
    timings = run(clock, clock.contestant("a", 0.75, 0.25), rounds=1)
    assert timings["a"].blocks == ((0.25,),)


def test_turn_lasts_as_long_as_it_should():
    clock = Clock()
    timings = run(clock, clock.contestant("a", 0.25), rounds=3)
    assert [len(block) for block in timings["a"].blocks] == [3, 3, 3]


def test_slow_call_is_warmed_up_once():
    clock = Clock()
    timings = run(clock, clock.contestant("slow", 9.0, 4.0), rounds=3)
    assert timings["slow"].blocks == ((4.0,),) * 3
    assert clock.log.count("slow") == 4


def test_contestants_run_in_their_context():
    entered = []

    @contextlib.contextmanager
    def around():
        entered.append(True)
        yield
        entered.pop()

    clock = Clock()
    one = dataclasses.replace(clock.contestant("a", 1.0), around=around)
    inside = []
    one = dataclasses.replace(one, call=lambda: (inside.append(bool(entered)), clock.sleep(1.0)))
    run(clock, one)
    assert inside
    assert all(inside)
    assert entered == []


def test_median_and_spread_are_over_all_calls():
    timing = Timing(((1.0, 2.0), (3.0, 4.0, 5.0)))
    assert timing.seconds == 3.0
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert Timing(((2.0,),)).spread == 0.0


def test_ratio_pairs_the_rounds():
    # The machine was ten times slower in the second round, for both.
    ours = Timing(((1.0,), (10.0,), (1.0,)))
    theirs = Timing(((3.0,), (30.0, 30.0, 30.0), (5.0,)))
    assert theirs.ratio(ours) == 3.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"against": ["torhc"]}, "torhc"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 10_000}, "threads is 10000"),
        ({"rounds": 0}, "rounds is 0"),
    ],
)
def test_job_says_what_is_wrong_with_it(options, words):
    with pytest.raises(InvalidParameters, match=words):
        Job([SMALL], str(NATIVE), **options)


def test_comparison_has_rates_and_ratios(monkeypatch):
    problem = AttentionProblem.parse("1,1,1,2,2,2,2:float32")
    inputs = random_inputs(problem)
    expected = reference.expected(problem, inputs)
    timings = {"a": Timing(((1e-9,), (2e-9,), (3e-9,))), "b": Timing(((4e-9,), (8e-9,), (9e-9,)))}
    monkeypatch.setattr(bench, "interleave", lambda contestants, **options: timings)
    contestants = [
        Contestant("a", "right", lambda: expected),
        Contestant("b", "wrong", lambda: expected + 1),
    ]
    job = Job([str(problem)], str(NATIVE))
    result = bench.compare(problem, inputs, contestants, job, {"torch": "why"})
    json.dumps(result)
    # 4 pairs of 3 operations, and 2 rows of 3 for each of 2 values.
    assert result["flops"] == 24
    assert result["unavailable"] == {"torch": "why"}
    first, second = result["results"]
    assert first["gflops"] == pytest.approx(12.0)
    assert (first["ratio"], second["ratio"]) == (1.0, 4.0)
    assert first["wrong"] is None
    assert "an error of" in second["wrong"]
    assert second["samples"] == [[4e-9], [8e-9], [9e-9]]


BASELINES = [
    SMALL,
    "2,4,2,9,9,16,16:float32:causal",
    "1,2,2,5,9,16,16:float32:causal",
    "1,2,2,5,9,16,16:float32:causal:top_left",
    "1,2,1,5,9,16,16:float32:mask=padding:scale=0.3",
    "1,2,1,5,9,16,16:float32:mask=padding:bias",
    "1,2,2,8,8,16,16:float32:bias=1x1x8x8:bshd",
    "1,2,2,8,8,16,16:bfloat16",
    "1,2,2,8,8,16,16:float16:mask=padding",
]


@pytest.mark.parametrize("text", BASELINES)
@pytest.mark.parametrize("name", bench.AGAINST)
def test_baseline_computes_the_same(name, text):
    if name != "tvm":
        pytest.importorskip("torch")
    problem = AttentionProblem.parse(text)
    inputs = random_inputs(problem)
    one = bench.BASELINES[name](problem, inputs, NATIVE, 1)
    with one.around():
        output = one.output(one.call())
    assert bench.difference(problem, inputs, output, reference.expected(problem, inputs)) is None


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("tvm", "1,2,2,5,7,16,8:float32:softcap=5", "softcap"),
        ("tvm", "1,2,2,5,7,16,8:float32:window=2/2", "window"),
        ("tvm", "1,2,2,9,7,16,8:float32:causal", "diagonal"),
        ("torch", "1,2,2,5,7,16,8:float32:softcap=5", "softcap"),
    ],
)
def test_baseline_says_what_it_cannot_do(name, text, why):
    problem = AttentionProblem.parse(text)
    with pytest.raises(Unavailable, match=why):
        bench.BASELINES[name](problem, random_inputs(problem), NATIVE, 1)


def test_missing_pytorch_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    problem = AttentionProblem.parse(SMALL)
    with pytest.raises(Unavailable, match=r"pip install attentune\[torch\]"):
        bench.BASELINES["math"](problem, random_inputs(problem), NATIVE, 1)


@pytest.mark.parametrize("name", ["fallback", "flash_unit"])
def test_variant_is_taken_by_name(name):
    problem = AttentionProblem.parse(SMALL)
    kernel, tuned = bench.find_kernel(problem, NATIVE, None, name)
    assert kernel.variant == name
    assert not tuned


def test_unknown_variant_is_never_another_one():
    with pytest.raises(Unsupported, match="flash_unti"):
        bench.find_kernel(AttentionProblem.parse(SMALL), NATIVE, None, "flash_unti")


def test_job_in_a_process_of_its_own():
    quick = {"rounds": 1, "block_seconds": 0.001, "gap_seconds": 0.0}
    job = Job([SMALL], str(NATIVE), against=["tvm"], **quick)
    (result,) = bench.run_in_child(job)
    assert (result["problem"], result["threads"]) == (SMALL, 1)
    assert [one["name"] for one in result["results"]] == ["attentune", "tvm"]
    for one in result["results"]:
        assert one["wrong"] is None
        assert one["seconds"] == np.median([s for block in one["samples"] for s in block])

    (result,) = bench.run_in_child(Job([SMALL], str(NATIVE), dispatch=True, **quick))
    assert set(result) == {
        "problem", "threads", "variant", "kernel_seconds", "call_seconds", "overhead_seconds",
    }  # fmt: skip


def test_error_of_the_process_is_ours():
    job = Job([SMALL], str(NATIVE), variants=["nobody"], against=[])
    with pytest.raises(AttentuneError, match="nobody"):
        list(bench.run_in_child(job))
