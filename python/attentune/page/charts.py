"""The report's two charts, as SVG that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attentune.page.markup import Markup, join, tag
from attentune.report import duration
from attentune.search.roofline import Peaks, Work

WIDTH = 360
ROW = 30
BAR = 10
LEFT, RIGHT, TOP, BOTTOM = 44, 20, 12, 34
ROOF_HEIGHT = 240


@dataclass(frozen=True)
class Bar:
    """A candidate's time.

    Parameters
    ----------
    label : str
        Who.
    seconds : float
        Median.
    samples : sequence of float
        What it is the median of; the whisker goes from the least to the greatest.
    winner : bool
        Whether it won.
    """

    label: str
    seconds: float
    samples: Sequence[float] = ()
    winner: bool = False


def bars(rows: Sequence[Bar]) -> Markup:
    """Return horizontal bars of medians with whiskers, the label above each."""
    longest = max(max((row.seconds, *row.samples)) for row in rows)
    scale = (WIDTH - 2) / longest
    parts = [_bar(row, index * ROW, scale) for index, row in enumerate(rows)]
    names = ", ".join(f"{row.label} {duration(row.seconds)}" for row in rows)
    return _svg(ROW * len(rows), f"Median times: {names}", parts)


def _bar(row: Bar, top: float, scale: float) -> Markup:
    middle = top + 15 + BAR / 2
    parts = [
        tag("text", row.label, x=0, y=top + 11),
        tag("text", duration(row.seconds), x=WIDTH, y=top + 11, class_="end"),
        tag(
            "rect", x=0, y=top + 15, width=row.seconds * scale, height=BAR,
            class_="bar winner" if row.winner else "bar",
        ),
    ]  # fmt: skip
    if len(row.samples) > 1:
        low, high = min(row.samples) * scale, max(row.samples) * scale
        parts.append(
            tag(
                "path", class_="whisker",
                d=f"M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8"
                  f"M{high:.1f} {middle - 4}v8",
            )
        )  # fmt: skip
    return join(parts)


def roofline(work: Work, peaks: Peaks, points: Sequence[tuple[str, float]]) -> Markup:
    """Return the machine's roofline, logarithmic, with each variant's best at its place.

    Parameters
    ----------
    work : Work
        Of the problem that was measured.
    peaks : Peaks
        Of the machine.
    points : sequence of (str, float)
        Variants with their seconds, the winner first.
    """
    intensity = work.flops / work.bytes
    ridge = peaks.flops_per_second / peaks.bytes_per_second
    rates = [work.flops / seconds for _, seconds in points]
    across = _decades(min(intensity, ridge) / 4, max(intensity, ridge) * 4)
    up = _decades(min(rates) / 2, peaks.flops_per_second * 1.5)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * _share(x, across),
            ROOF_HEIGHT - BOTTOM - (ROOF_HEIGHT - TOP - BOTTOM) * _share(y, up),
        )

    # Where the slanting part comes in from the left or from below.
    foot = max(10.0 ** across[0], 10.0 ** up[0] / peaks.bytes_per_second)
    corners = [
        at(foot, foot * peaks.bytes_per_second),
        at(ridge, peaks.flops_per_second),
        at(10.0 ** across[1], peaks.flops_per_second),
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    roof = tag("polyline", points=line, class_="roof")
    named = [(name, rate) for (name, _), rate in zip(points, rates, strict=True)]
    marks = _marks([(name, *at(intensity, rate)) for name, rate in named])
    shown = ", ".join(f"{name} {rate / 1e9:.3g} GFLOP/s" for name, rate in named)
    title = (
        f"Roofline: peak {peaks.flops_per_second / 1e9:.4g} GFLOP/s, "
        f"{peaks.bytes_per_second / 1e9:.4g} GB/s; at {intensity:.3g} FLOP/byte: {shown}"
    )
    return _svg(ROOF_HEIGHT, title, [*_axes(across, up, at), roof, *marks])


def _marks(places: Sequence[tuple[str, float, float]]) -> list[Markup]:
    """Return the points; labels that would lie on each other move apart."""
    parts: list[Markup] = []
    above = math.inf
    left_side = places[0][1] > WIDTH / 2
    for index, (name, x, y) in enumerate(sorted(places, key=lambda place: -place[2])):
        text_y = min(y + 4, above - 13) if index else y + 4
        above = text_y
        winner = name == places[0][0]
        parts += [
            tag("circle", cx=x, cy=y, r=5, class_="point winner" if winner else "point"),
            tag("text", name, x=x - 9 if left_side else x + 9, y=text_y,
                class_="end" if left_side else None),
        ]  # fmt: skip
    return parts


def _axes(
    across: tuple[int, int], up: tuple[int, int], at: Callable[[float, float], tuple[float, float]]
) -> list[Markup]:
    parts = []
    bottom, left = 10.0 ** up[0], 10.0 ** across[0]
    for power in range(across[0], across[1] + 1):
        x, y = at(10.0**power, bottom)
        parts += [
            tag("path", d=f"M{x:.1f} {TOP}V{y:.1f}", class_="grid"),
            tag("text", f"{10.0**power:g}", x=x, y=y + 14, class_="middle"),
        ]
    for power in range(up[0], up[1] + 1):
        x, y = at(left, 10.0**power)
        parts += [
            tag("path", d=f"M{x:.1f} {y:.1f}H{WIDTH - RIGHT}", class_="grid"),
            tag("text", f"{10.0 ** (power - 9):g}", x=x - 4, y=y + 4, class_="end"),
        ]
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(tag("text", "FLOP/byte (across), GFLOP/s (up)", x=middle, y=ROOF_HEIGHT - 4,
                     class_="middle"))  # fmt: skip
    return parts


def _decades(low: float, high: float) -> tuple[int, int]:
    return math.floor(math.log10(low)), math.ceil(math.log10(high))


def _share(value: float, decades: tuple[int, int]) -> float:
    return (math.log10(value) - decades[0]) / (decades[1] - decades[0])


def _svg(height: float, title: str, parts: Sequence[Markup]) -> Markup:
    return tag(
        "svg", tag("title", title), *parts,
        viewBox=f"0 0 {WIDTH} {height}", role="img", class_="chart",
    )  # fmt: skip
