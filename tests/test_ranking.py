from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from attentune.search import ranking
from attentune.search.ranking import Contender, MeasurementFailed, Ranking, rank, score


class Clock:
    """Plays each candidate's times back, the last for ever, and notes who was measured when.

    The first time of each is the warm-up's.
    """

    def __init__(self, **times: list[float | MeasurementFailed]) -> None:
        self.times: dict[str, Iterator[float | MeasurementFailed]] = {
            name: iter(values) for name, values in times.items()
        }
        self.last: dict[str, float | MeasurementFailed] = {}
        self.calls: list[str] = []

    def measure(self, name: str) -> float:
        self.calls.append(name)
        value = self.last[name] = next(self.times[name], self.last.get(name, math.nan))
        if isinstance(value, MeasurementFailed):
            raise value
        return value


def run(clock: Clock, memory: dict[str, int] | None = None, **options) -> Ranking[str]:
    memory = memory or {}
    names = list(clock.times)
    contenders = [Contender(n, order, memory.get(n, 0)) for order, n in enumerate(names)]
    return rank(contenders, clock.measure, **options)


def order(result: Ranking[str]) -> list[str]:
    return [standing.contender.candidate for standing in result.standings]


def standing(result: Ranking[str], name: str) -> ranking.Standing[str]:
    return next(s for s in result.standings if s.contender.candidate == name)


CRASH = MeasurementFailed("crash", "signal 11")


def test_no_contenders_give_an_empty_ranking():
    result = rank([], Clock().measure)
    assert result.standings == ()
    assert result.winner is None


def test_one_contender_wins():
    result = run(Clock(a=[9.0, 1.0]))
    assert order(result) == ["a"]
    assert result.winner is result.standings[0]
    assert result.winner.samples == (1.0, 1.0, 1.0)
    assert (result.winner.score, result.winner.seconds, result.winner.reason) == (1.0, 1.0, "")
    assert result.losers == ()


def test_measures_in_turn_after_one_warm_up_each():
    clock = Clock(a=[9.0, 1.0], b=[9.0, 1.2], c=[9.0, 1.4])
    result = run(clock)
    assert clock.calls == ["a", "b", "c"] * 4
    assert 9.0 not in {t for s in result.standings for t in s.samples}


def test_takes_the_fastest_first_and_says_by_how_much_the_others_lost():
    result = run(Clock(slow=[1.4], fast=[1.0], middle=[1.2]))
    assert order(result) == ["fast", "middle", "slow"]
    assert [s.outcome for s in result.standings] == [None, "slower", "slower"]
    assert standing(result, "middle").reason == "its score, 1.2 s, is 1.20 times the winner's 1 s"
    assert not any(s.dropped for s in result.standings)


# Sampling


def test_settles_after_two_rounds_that_gain_under_two_percent():
    # Bests of the counted samples: 1.0, 0.9 (-10 %), 0.9, then 0.5 unless sampling has ended.
    clock = Clock(a=[9.0, 1.0, 0.9, 0.895, 0.89, 0.5], b=[1.0])
    assert standing(run(clock), "a").samples == (1.0, 0.9, 0.895, 0.89)


def test_a_gain_between_two_quiet_rounds_starts_the_count_again():
    clock = Clock(a=[9.0, 1.0, 1.0, 0.9, 0.9, 0.9, 0.1], b=[1.0])
    assert standing(run(clock), "a").samples == (1.0, 1.0, 0.9, 0.9, 0.9)


def test_a_gain_of_any_contender_keeps_all_being_sampled():
    clock = Clock(a=[1.0], b=[9.0, 1.4, 1.3, 1.2, 1.1, 1.1])
    result = run(clock)
    assert len(standing(result, "a").samples) == len(standing(result, "b").samples) == 6


@pytest.mark.parametrize(("gain", "samples"), [(0.019, 3), (0.021, 10)])
def test_the_threshold_is_two_percent(gain, samples):
    falling = [(1 - gain) ** n for n in range(20)]
    assert len(standing(run(Clock(a=[9.0, *falling])), "a").samples) == samples


def test_at_most_ten_samples():
    clock = Clock(a=[9.0, *(0.9**n for n in range(50))], b=[1.0])
    result = run(clock)
    assert [len(s.samples) for s in result.standings] == [10, 10]
    assert clock.calls.count("a") == 11


def test_enough_ends_the_sampling_with_the_round():
    seen = []

    def enough(samples):
        seen.append(list(samples))
        return len(samples) == 2 and max(samples) < 1.1

    clock = Clock(a=[9.0, 1.0], b=[9.0, 2.0])
    result = run(clock, enough=enough)
    assert clock.calls == ["a", "b"] * 3
    assert seen == [[1.0], [2.0], [1.0, 1.0], [2.0, 2.0]]
    assert order(result) == ["a", "b"]


# Elimination


def test_drops_whose_best_is_over_one_and_a_half_times_the_leaders():
    falling = [1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73]
    clock = Clock(lead=[9.0, *falling], near=[1.0], far=[9.0, 1.6, 1.55, 1.5, 0.1])
    result = run(clock)
    far = standing(result, "far")
    assert far.samples == (1.6, 1.55, 1.5)
    assert (far.outcome, far.dropped) == ("slower", True)
    assert far.reason == (
        "dropped after 3 samples: its best, 1.5 s, is 2.05 times the leader's 730 ms"
    )
    assert order(result) == ["lead", "near", "far"]
    assert len(standing(result, "near").samples) == 10


@pytest.mark.parametrize(("best", "dropped"), [(1.5, False), (1.501, True)])
def test_the_limit_is_one_and_a_half(best, dropped):
    result = run(Clock(a=[1.0], b=[1.1], c=[best]))
    assert standing(result, "c").dropped is dropped


def test_one_quiet_moment_in_a_burst_of_noise_drops_nobody():
    # All take twice as long for three rounds, but for the slowest one's second sample.
    clock = Clock(
        lucky=[9.0, 2.0, 1.0, 2.0, 1.0], second=[9.0, 1.8, 1.8, 1.8, 0.9],
        third=[9.0, 1.7, 1.7, 1.7, 0.8],
    )  # fmt: skip
    result = run(clock)
    assert order(result) == ["third", "second", "lucky"]
    assert not any(s.dropped for s in result.standings)


def test_nobody_is_dropped_before_three_samples():
    clock = Clock(a=[1.0], b=[1.0], c=[9.0, 5.0, 5.0, 1.0])
    result = run(clock)
    assert not standing(result, "c").dropped
    assert len(standing(result, "c").samples) > 3


def test_the_fastest_two_stay_however_far_apart():
    falling = [0.9**n for n in range(10)]
    result = run(Clock(a=[9.0, *falling], b=[50.0], c=[60.0]))
    assert [(len(s.samples), s.dropped) for s in result.standings] == [
        (10, False),
        (10, False),
        (3, True),
    ]


def test_when_the_leader_fails_those_that_only_it_had_outrun_are_back():
    falling = [1.0, 0.9, 0.8, 0.7]
    clock = Clock(
        lead=[9.0, *falling, CRASH],
        second=[9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.8],
        third=[9.0, 2.1, 2.1, 2.1, 1.2],
        far=[40.0],
    )
    result = run(clock)
    assert order(result) == ["third", "second", "far", "lead"]
    third = standing(result, "third")
    assert third.samples[:3] == (2.1, 2.1, 2.1)
    assert third.samples[3:] == (1.2,) * (len(third.samples) - 3) != ()
    assert standing(result, "far").samples == (40.0, 40.0, 40.0)


# Failures


@pytest.mark.parametrize("failing_call", [0, 1, 2, 3])
def test_a_failure_at_any_sample_disqualifies(failing_call):
    times: list[float | MeasurementFailed] = [0.1] * failing_call + [CRASH, 0.1]
    clock = Clock(a=times, b=[1.0])
    result = run(clock)
    a = standing(result, "a")
    assert order(result) == ["b", "a"]
    assert (a.outcome, a.reason, a.score) == ("crash", "signal 11", None)
    assert a.samples == (0.1,) * max(failing_call - 1, 0)
    assert clock.calls.count("a") == failing_call + 1


def test_a_late_failure_disqualifies_too():
    falling = [0.9**n for n in range(9)]
    result = run(Clock(a=[9.0, *falling, MeasurementFailed("timeout", "over 10 s")], b=[1.0]))
    a = standing(result, "a")
    assert (a.outcome, len(a.samples)) == ("timeout", 9)
    assert result.winner is standing(result, "b")


def test_a_failure_starts_the_count_of_quiet_rounds_again():
    result = run(Clock(a=[0.5, 0.5, 0.5, CRASH], b=[1.0], c=[1.1]))
    assert [len(s.samples) for s in result.standings] == [5, 5, 2]


def test_when_all_fail_nobody_wins():
    result = run(Clock(a=[MeasurementFailed("wrong", "off by 2")], b=[1.0, 1.0, CRASH]))
    assert result.winner is None
    assert [(s.outcome, s.reason) for s in result.losers] == [
        ("wrong", "off by 2"),
        ("crash", "signal 11"),
    ]


@pytest.mark.parametrize("time", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_time_disqualifies(time):
    result = run(Clock(a=[1.0, 1.0, time], b=[2.0]))
    assert result.winner is standing(result, "b")
    assert standing(result, "a").outcome == "crash"
    assert repr(time) in standing(result, "a").reason


def test_other_exceptions_pass():
    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rank([Contender("a", 0)], interrupted)


# Score


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([2.0], 2.0),
        # Both count: min 2, median 3, standard deviation 1, mean 3.
        ([4.0, 2.0], 2.2 * (1 + 1 / 3)),
        # The first is discarded: min 2, median 3, standard deviation 1, mean 3.
        ([9.0, 2.0, 4.0], 2.2 * (1 + 1 / 3)),
        ([0.1, 2.0, 2.0, 2.0], 2.0),
    ],
)
def test_score(samples, expected):
    assert score(samples) == pytest.approx(expected)


def test_the_first_sample_is_kept_in_the_record():
    result = run(Clock(a=[9.0, 7.0, 1.0, 1.0, 1.0]))
    assert result.winner is not None
    assert result.winner.samples[0] == 7.0
    assert result.winner.seconds == 1.0


def test_a_steady_candidate_beats_a_noisy_one_with_the_lower_minimum():
    noisy = [9.0, 1.0, 0.9, 1.5, 0.9, 1.5, 0.9, 1.5]
    result = run(Clock(noisy=noisy, steady=[1.0]))
    assert min(standing(result, "noisy").samples) < 1.0
    assert order(result) == ["steady", "noisy"]


def test_a_noisy_candidate_that_is_far_faster_beats_a_steady_one():
    result = run(Clock(steady=[1.0], noisy=[9.0, 0.5, 0.5, 0.6, 0.5, 0.6, 0.5]))
    assert order(result) == ["noisy", "steady"]


# Ties


def test_within_noise_the_lower_memory_wins():
    result = run(Clock(a=[1.0], b=[1.015]), memory={"a": 2048, "b": 1024})
    assert order(result) == ["b", "a"]
    assert standing(result, "a").reason == (
        "its score, 1 s, and the winner's, 1.015 s, are within the noise; it needs 1024 bytes more"
    )


def test_within_noise_and_with_equal_memory_the_first_registered_wins():
    clock = Clock(late=[1.0], early=[1.015])
    contenders = [Contender("late", 1), Contender("early", 0)]
    result = rank(contenders, clock.measure)
    assert order(result) == ["early", "late"]
    assert standing(result, "late").reason.endswith("it was registered later")


def test_memory_comes_before_the_order_of_registration():
    result = run(Clock(a=[1.0], b=[1.0]), memory={"a": 1, "b": 0})
    assert order(result) == ["b", "a"]


def test_beyond_noise_memory_does_not_count():
    result = run(Clock(a=[1.0], b=[1.025]), memory={"a": 2048})
    assert order(result) == ["a", "b"]


def test_ties_do_not_chain():
    # b ties with a and c with b, but c does not with a.
    result = run(Clock(a=[1.0], b=[1.015], c=[1.03]), memory={"a": 3, "b": 2, "c": 1})
    assert order(result) == ["b", "a", "c"]
    assert standing(result, "c").reason.startswith("its score, 1.03 s, is 1.01 times")


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([1.0, 1.0, 1.0], 0.02), ([9.0, 0.96, 1.04], 0.04), ([9.0, 0.5, 1.5], 0.05)],
)
def test_noise_is_the_spread_between_two_and_five_percent(samples, expected):
    assert ranking.noise(samples) == pytest.approx(expected)


def test_a_wider_spread_of_the_leader_makes_a_wider_tie():
    # Sampled in pairs 0.97 and 1.03: spread 3 %, score 0.982 * 1.03 = 1.0115; 1.035 is 2.3 % off.
    wavering = [9.0, 1.03, 1.03, 0.97, 1.03, 0.97, 1.03]
    result = run(Clock(a=wavering, b=[1.035]), memory={"a": 1})
    samples = standing(result, "a").samples
    assert ranking.noise(samples) > 0.025
    assert score(samples) * 1.02 < 1.035 < score(samples) * (1 + ranking.noise(samples))
    assert order(result) == ["b", "a"]


def test_the_same_times_give_the_same_ranking():
    def once():
        clock = Clock(a=[9.0, 1.0, 0.9, 0.9], b=[9.0, 1.01, 0.91, 0.9], c=[3.0], d=[CRASH])
        return run(clock)

    assert once() == once()


def test_contenders_need_not_be_hashable_or_comparable():
    contenders = [Contender({"block": n}, n) for n in (2, 1)]
    result = rank(contenders, lambda candidate: float(candidate["block"]))
    assert result.winner is not None
    assert result.winner.contender.candidate == {"block": 1}


def test_times_read_in_a_unit_that_fits():
    result = run(Clock(a=[3e-5], b=[0.002], c=[4.0]))
    assert standing(result, "b").reason == "its score, 2 ms, is 66.67 times the winner's 30 us"
