"""The final ranking: measure the best candidates again, side by side, and put them in order.

A search's own measurements are taken minutes apart and do not rank. Here every candidate is
measured in turn, round after round, so that a slow minute of the machine hits all of them alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from attentune.record import counted

T = TypeVar("T")

WARM_UPS = 1
MIN_SAMPLES = 3
MAX_SAMPLES = 10
# A candidate this far behind, at its best and in every single round, will not come back by
# measuring it more often. Its best alone proves little: in a burst of noise, whoever has the one
# quiet moment is far ahead of everybody.
DROP_RATIO = 1.5
# With a single one left there would be nothing to interleave it with.
SURVIVORS = 2
# Two rounds in a row in which nobody's best falls by more than this end the sampling.
SETTLED_GAIN = 0.02
SETTLED_ROUNDS = 2
# Scores closer than this are a tie, whatever the samples' spread: a second run may swap them.
MIN_NOISE = 0.02
# However noisy the machine, a candidate further behind than this is slower.
MAX_NOISE = 0.05


class MeasurementFailed(Exception):
    """A candidate could not be measured and is out, whatever it measured before.

    Parameters
    ----------
    outcome : str
        Class of the failure, one of a loser's outcomes in a record, such as ``"crash"``.
    reason : str
        What happened, for a person.
    """

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(f"{outcome}: {reason}")
        self.outcome = outcome
        self.reason = reason


@dataclass(frozen=True)
class Contender(Generic[T]):
    """A candidate that enters the final, with what decides a tie.

    Parameters
    ----------
    candidate : T
        What `measure` is called with.
    order : int
        Place in the order of registration; of two equals the earlier wins.
    memory_bytes : int
        Memory that the candidate needs beside its arguments; of two equally fast the smaller wins.
    """

    candidate: T
    order: int
    memory_bytes: int = 0


@dataclass(frozen=True)
class Standing(Generic[T]):
    """How one contender came out.

    Parameters
    ----------
    contender : Contender
        Who.
    samples : tuple of float
        Seconds of every sample in the order taken, without the warm-up.
    score : float or None
        Seconds; see `score`. None where the contender failed.
    outcome : str or None
        None for the winner, ``"slower"`` for who lost by time, else the class of the failure.
    reason : str
        Why it lost; empty for the winner.
    dropped : bool
        Whether it lost by being more than `DROP_RATIO` behind, and so was sampled less.
    """

    contender: Contender[T]
    samples: tuple[float, ...]
    score: float | None
    outcome: str | None
    reason: str
    dropped: bool = False

    @property
    def seconds(self) -> float | None:
        """Median of the samples that count, in seconds; None where there is none."""
        return statistics.median(counted(self.samples)) if self.samples else None


@dataclass(frozen=True)
class Ranking(Generic[T]):
    """The contenders in order: the winner, those still in at the end, the dropped, the failed.

    Parameters
    ----------
    standings : tuple of Standing
        Every contender once.
    """

    standings: tuple[Standing[T], ...]

    @property
    def winner(self) -> Standing[T] | None:
        """The first, unless every contender failed."""
        first = self.standings[0] if self.standings else None
        return first if first is not None and first.outcome is None else None

    @property
    def losers(self) -> tuple[Standing[T], ...]:
        """Everybody but the winner, in order."""
        return self.standings if self.winner is None else self.standings[1:]


def spread(samples: Sequence[float]) -> float:
    """Return the population standard deviation of the counted samples over their mean."""
    kept = counted(samples)
    return statistics.pstdev(kept) / statistics.fmean(kept)


def score(samples: Sequence[float]) -> float:
    """Return ``(0.8 min + 0.2 median) (1 + stddev / mean)`` of the counted samples, in seconds.

    The minimum is what the kernel can do, the median what a caller gets, and the last factor
    charges a candidate for being erratic.

    Parameters
    ----------
    samples : sequence of float
        Seconds, at least one, in the order taken.
    """
    kept = counted(samples)
    return (0.8 * min(kept) + 0.2 * statistics.median(kept)) * (1 + spread(samples))


def noise(samples: Sequence[float]) -> float:
    """Return how far above the best score, relative to it, another is still a tie with it.

    Parameters
    ----------
    samples : sequence of float
        Seconds measured by the holder of the best score. Only its own spread matters: that of a
        challenger is in the challenger's score already, and must not help it to a tie.
    """
    return min(max(spread(samples), MIN_NOISE), MAX_NOISE)


def rank(
    contenders: Iterable[Contender[T]],
    measure: Callable[[T], float],
    *,
    enough: Callable[[Sequence[float]], bool] | None = None,
) -> Ranking[T]:
    """Measure the contenders in turn until their times settle, and put them in order.

    Everybody has `WARM_UPS` unrecorded runs and `MIN_SAMPLES` to `MAX_SAMPLES` samples, one a
    round. From the round `MIN_SAMPLES` on, whoever's best is over `DROP_RATIO` times the leader's
    sits out, save the fastest `SURVIVORS`. A place goes to the lowest score; among those that tie
    with it (see `noise`) to the lowest memory, then to the first registered.

    Parameters
    ----------
    contenders : iterable of Contender
        Who competes, in the order in which a round measures them.
    measure : callable
        Runs a candidate once and returns its time in seconds. It may raise `MeasurementFailed`, at
        any sample and in the warm-up, which disqualifies the candidate. Other exceptions pass.
    enough : callable, optional
        Called after each sample with the samples so far of the contender just measured. True ends
        the sampling with the round in progress: a budget is spent, or a roofline reached.

    Returns
    -------
    Ranking
        Every contender once, with all its samples and, save for the winner, why it lost.
    """
    entries = [_Entry(contender) for contender in contenders]
    for _ in range(WARM_UPS):
        for entry in entries:
            entry.run(measure)

    stop = False
    quiet_rounds = 0
    for taken in range(1, MAX_SAMPLES + 1):
        # Taken afresh each round: when a leader fails, those that only it had outrun are back.
        running, _ = _divide(entries)
        gains = []
        for entry in running:
            before = entry.best
            seconds = entry.run(measure)
            if seconds is None:
                gains.append(math.inf)  # The field has changed, so nothing is settled.
                continue
            entry.samples.append(seconds)
            gains.append(1 - entry.best / before)
            if enough is not None and enough(entry.samples):
                stop = True
        settled = taken > 1 and max(gains, default=0.0) < SETTLED_GAIN
        quiet_rounds = quiet_rounds + 1 if settled else 0
        if stop or not running or (taken >= MIN_SAMPLES and quiet_rounds >= SETTLED_ROUNDS):
            break
    return Ranking(_standings(entries))


@dataclass(eq=False)
class _Entry(Generic[T]):
    """A contender while it is being measured."""

    contender: Contender[T]
    samples: list[float] = field(default_factory=list)
    failure: MeasurementFailed | None = None

    @property
    def best(self) -> float:
        return min(counted(self.samples), default=math.inf)

    def behind(self, leader: _Entry[T]) -> bool:
        """Return whether it is over `DROP_RATIO` behind, at its best and round by round."""
        rounds = zip(counted(self.samples), counted(leader.samples), strict=False)
        return self.best > DROP_RATIO * leader.best and all(
            ours > DROP_RATIO * theirs for ours, theirs in rounds
        )

    def run(self, measure: Callable[[T], float]) -> float | None:
        """Measure once; None, now and ever after, when that fails."""
        if self.failure is not None:
            return None
        try:
            seconds = measure(self.contender.candidate)
            if not (math.isfinite(seconds) and seconds > 0):
                raise MeasurementFailed("crash", f"it reported a time of {seconds!r} s")
        except MeasurementFailed as failure:
            self.failure = failure
            return None
        return seconds


def _divide(entries: Sequence[_Entry[T]]) -> tuple[list[_Entry[T]], list[_Entry[T]]]:
    """Part those that have not failed into the ones in the running and the ones outrun."""
    valid = [entry for entry in entries if entry.failure is None]
    if any(len(entry.samples) < MIN_SAMPLES for entry in valid):
        return valid, []
    fastest = sorted(valid, key=lambda entry: entry.best)
    outrun = [entry for entry in fastest[SURVIVORS:] if entry.behind(fastest[0])]
    return [entry for entry in valid if entry not in outrun], outrun


def _in_order(entries: Sequence[_Entry[T]]) -> Iterator[_Entry[T]]:
    """Give each place to the lowest score or to whoever wins the tie with it."""
    left = list(entries)
    while left:
        place = min(_tied(left), key=lambda e: (e.contender.memory_bytes, e.contender.order))
        left.remove(place)
        yield place


def _tied(entries: Sequence[_Entry[T]]) -> list[_Entry[T]]:
    lowest = min(entries, key=lambda entry: score(entry.samples))
    bound = score(lowest.samples) * (1 + noise(lowest.samples))
    return [entry for entry in entries if score(entry.samples) <= bound]


def _standings(entries: Sequence[_Entry[T]]) -> tuple[Standing[T], ...]:
    running, outrun = _divide(entries)
    leader = min((entry.best for entry in running), default=math.nan)
    tied = _tied(running) if running else []
    winner: _Entry[T] | None = None
    standings: list[Standing[T]] = []

    def place(entry: _Entry[T], outcome: str | None, reason: str, dropped: bool = False) -> None:
        result = score(entry.samples) if entry.failure is None else None
        samples = tuple(entry.samples)
        standings.append(Standing(entry.contender, samples, result, outcome, reason, dropped))

    for entry in _in_order(running):
        if winner is None:
            winner = entry
            place(entry, None, "")
        elif entry in tied:
            place(entry, "slower", _tie_lost(entry, winner))
        else:
            ours, best = score(entry.samples), score(winner.samples)
            place(
                entry,
                "slower",
                f"its score, {_time(ours)}, is {ours / best:.2f} times the winner's {_time(best)}",
            )
    for entry in _in_order(outrun):
        place(
            entry,
            "slower",
            f"dropped after {len(entry.samples)} samples: its best, {_time(entry.best)}, is "
            f"{entry.best / leader:.2f} times the leader's {_time(leader)}",
            dropped=True,
        )
    for entry in sorted(entries, key=lambda entry: entry.contender.order):
        if entry.failure is not None:
            place(entry, entry.failure.outcome, entry.failure.reason)
    return tuple(standings)


def _tie_lost(entry: _Entry[T], winner: _Entry[T]) -> str:
    ours, theirs = score(entry.samples), score(winner.samples)
    tie = f"its score, {_time(ours)}, and the winner's, {_time(theirs)}, are within the noise; it "
    memory = entry.contender.memory_bytes - winner.contender.memory_bytes
    if memory:
        return f"{tie}needs {memory} bytes more"
    return f"{tie}was registered later"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"
