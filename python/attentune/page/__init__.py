"""The report: one HTML page that shows a database's records, and why each winner won.

It needs no network and loads nothing: style, script and pictures are in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attentune.page.charts import Bar, bars, roofline
from attentune.page.markup import Markup, join, tag
from attentune.page.trace import trace_lines
from attentune.record import Loser, Record, counted
from attentune.report import duration, settings, short_target, size
from attentune.search.roofline import Peaks, ideal, work

# Nothing from anywhere, even if a record's text found a way past the escaping.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
Names = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A record and what the page says about it beside.

    Parameters
    ----------
    record : Record
        The record.
    stale : str or None
        Why it is not served, None if it is.
    batches : tuple of tuples of str
        The batches of today's plan for its key.
    peaks : Peaks or None
        Of the machine that it was measured on, where they are known.
    source : str or None
        The winner's kernel as TVMScript, where it is still the one that was measured.
    other : Record or None
        The other database's record of the same key and target.
    """

    record: Record
    stale: str | None = None
    batches: tuple[Names, ...] = ()
    peaks: Peaks | None = None
    source: str | None = None
    other: Record | None = None

    @property
    def share(self) -> float | None:
        """The share of the roofline that the winner reaches."""
        if self.peaks is None:
            return None
        least = ideal(work(self.record.key.representative()), self.peaks)
        return least / self.record.seconds


def page(
    title: str,
    entries: Sequence[Entry],
    against: str | None = None,
    only_other: Sequence[Record] = (),
) -> str:
    """Return the page.

    Parameters
    ----------
    title : str
        Of the page, the database's name.
    entries : sequence of Entry
        What to show.
    against : str, optional
        The name of the database that it is compared with.
    only_other : sequence of Record
        Records that only the other database has.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"attentune: {title}"),
        tag("style", _file("style.css")),
    )
    versus = "" if against is None else f", compared with {against}"
    body = tag(
        "body",
        tag("h1", title),
        tag("p", f"{len(entries)} records{versus}. Times are medians.", class_="quiet"),
        _front(entries, against, only_other),
        *(_section(entry, f"key-{index}", against) for index, entry in enumerate(entries)),
        tag("script", _file("script.js")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _file(name: str) -> Markup:
    return Markup(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _front(entries: Sequence[Entry], against: str | None, only_other: Sequence[Record]) -> Markup:
    columns = ["problem", "target", "variant", "median", "of roofline"]
    columns += [] if against is None else ["other's variant", "other's median", "other / this"]
    columns += ["tuned", "state"]
    head = tag("tr", *(_header(name) for name in columns))
    rows = [_row(entry, f"key-{index}", against) for index, entry in enumerate(entries)]
    rows += [_row_of_other(record) for record in only_other]
    search = tag(
        "div",
        tag("label", "Filter", for_="search"),
        tag("input", id="search", type="search", placeholder="words, such as float16 causal"),
        tag("span", id="count", aria_live="polite", class_="quiet"),
        class_="filter",
        role="search",
    )
    table = tag("table", tag("thead", head), tag("tbody", *rows), id="front")
    return join([search, tag("div", table, class_="scroll")])


def _header(name: str) -> Markup:
    numeric = name in ("median", "of roofline", "other's median", "other / this")
    button = tag("button", name, type="button")
    return tag("th", button, scope="col", aria_sort="none", class_="number" if numeric else None)


def _cell(text: str | None, value: float | str | None = None, class_: str | None = None) -> Markup:
    """Return a cell that sorts by a value, by default its text."""
    key = text if value is None and class_ != "number" else value
    key = repr(key) if isinstance(key, float) else key
    return tag("td", text or "-", data_value=key or "", class_=class_)


def _row(entry: Entry, anchor: str, against: str | None) -> Markup:
    record, other = entry.record, entry.other
    problem = str(record.key.representative())
    cells = [
        tag("td", tag("a", problem, href=f"#{anchor}"), data_value=problem, class_="problem"),
        _cell(short_target(record.target)),
        _cell(record.variant),
        _cell(duration(record.seconds), record.seconds, "number"),
        _cell(_percent(entry.share), entry.share, "number"),
    ]
    if against is not None:
        theirs = None if other is None else other.seconds
        ratio = None if theirs is None else theirs / record.seconds
        cells += [
            _cell(None if other is None else other.variant),
            _cell(duration(theirs), theirs, "number"),
            _cell(None if ratio is None else f"{ratio:.2f}", ratio, "number"),
        ]
    cells += [_cell(record.created), _state(entry.stale)]
    return tag("tr", *cells, data_key=anchor)


def _row_of_other(record: Record) -> Markup:
    """Return the row of a key that only the other database has."""
    return tag(
        "tr",
        _cell(str(record.key.representative()), class_="problem"),
        _cell(short_target(record.target)),
        *(_cell(None) for _ in range(3)),
        _cell(record.variant),
        _cell(duration(record.seconds), record.seconds, "number"),
        _cell(None),
        _cell(record.created),
        _cell("only in the other"),
    )


def _state(stale: str | None) -> Markup:
    if stale is None:
        return _cell("served")
    return _cell(f"stale: {stale}", class_="stale")


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f} %"


def _section(entry: Entry, anchor: str, against: str | None) -> Markup:
    record = entry.record
    problem = str(record.key.representative())
    summary = tag(
        "summary",
        tag("code", problem),
        f" {record.variant}, {duration(record.seconds)} on {short_target(record.target)}",
    )
    ranked = sorted(
        (one for one in record.losers if one.seconds is not None), key=lambda one: one.seconds or 0
    )
    return tag(
        "details",
        summary,
        _facts(entry, against),
        tag("h3", "Batches of the plan"),
        _batches(entry),
        tag("h3", "Times"),
        tag("div", _bars(record, ranked), _roof(entry, ranked), class_="charts"),
        tag("h3", "Candidates"),
        tag("div", _candidates(record, ranked), class_="scroll"),
        _folded("Schedule trace", "\n".join(trace_lines(record.trace)) if record.trace else None),
        _folded("Source of the winner, TVMScript", entry.source),
        id=anchor,
        class_="key",
    )


def _facts(entry: Entry, against: str | None) -> Markup:
    record, other = entry.record, entry.other
    facts: dict[str, str] = {
        "key": str(record.key),
        "target": record.target,
        "winner": f"{record.variant} ({settings(record.parameters)})",
        "workspace": size(record.workspace_bytes),
        "score": f"{duration(record.score)}, what it was ranked by over its whole bucket",
        "samples": ", ".join(duration(one) for one in record.seconds_all),
        "machine": record.machine,
        "versions": _pairs(record.versions),
        "tuned": record.created,
        "state": "served" if entry.stale is None else f"stale, not served: {entry.stale}",
    }
    if against is not None:
        facts["other"] = (
            f"{against} has no record of it"
            if other is None
            else f"{other.variant} ({settings(other.parameters)}), {duration(other.seconds)}, "
            f"{other.seconds / record.seconds:.2f} times this, on {other.machine} with "
            f"{_pairs(other.versions)}"
        )
    pairs = [join([tag("dt", name), tag("dd", text)]) for name, text in facts.items()]
    return tag("dl", *pairs)


def _pairs(texts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def _batches(entry: Entry) -> Markup:
    """Return the plan's batches and what became of each."""
    record = entry.record
    if record.batch not in entry.batches:
        names = ", ".join(record.batch)
        return tag("p", f"It won the batch {names}, which today's default plan does not have.")
    won = entry.batches.index(record.batch)
    items = []
    for index, batch in enumerate(entry.batches):
        if index == won:
            outcome = "the winner is from here"
        elif index < won:
            outcome = "every candidate failed"
        else:
            outcome = "not tried, as an earlier one held a valid candidate"
        items.append(
            tag(
                "li",
                tag("span", ", ".join(batch), class_="chosen" if index == won else None),
                f": {outcome}",
            )
        )
    return tag("ol", *items)


def _name(one: Record | Loser) -> str:
    values = "/".join(str(one.parameters[name]) for name in sorted(one.parameters))
    return f"{one.variant} {values}".rstrip()


def _bars(record: Record, ranked: Sequence[Loser]) -> Markup:
    rows = [Bar(_name(record), record.seconds, counted(record.seconds_all), True)]
    rows += [Bar(_name(one), one.seconds or 0.0, counted(one.seconds_all)) for one in ranked]
    note = "Medians; whiskers from the least to the greatest sample that counts."
    return tag("div", bars(rows), tag("p", note, class_="quiet"))


def _roof(entry: Entry, ranked: Sequence[Loser]) -> Markup:
    if entry.peaks is None:
        return tag("p", "No roofline: it was measured on another machine than this one.")
    record = entry.record
    needed = work(record.key.representative())
    if not needed.flops:
        return tag("p", "No roofline: the problem has nothing to compute.")
    best = {record.variant: record.seconds}
    for one in ranked:
        best.setdefault(one.variant, one.seconds or 0.0)
    note = "Each variant's best. The roof is what this machine's peaks allow."
    return tag(
        "div", roofline(needed, entry.peaks, list(best.items())), tag("p", note, class_="quiet")
    )


def _candidates(record: Record, ranked: Sequence[Loser]) -> Markup:
    names = ("#", "variant", "parameters", "median", "ratio", "outcome", "reason")
    rows = [_candidate("1", record, record.seconds, 1.0, "won", "")]
    for place, one in enumerate(ranked, 2):
        seconds = one.seconds or 0.0
        ratio = seconds / record.seconds
        rows.append(_candidate(str(place), one, seconds, ratio, one.outcome, one.reason))
    rows += [
        _candidate("-", one, None, None, one.outcome, one.reason)
        for one in record.losers
        if one.seconds is None
    ]
    head = tag("tr", *(tag("th", name, scope="col") for name in names))
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="candidates")


def _candidate(
    place: str,
    one: Record | Loser,
    seconds: float | None,
    ratio: float | None,
    outcome: str,
    reason: str,
) -> Markup:
    return tag(
        "tr",
        tag("td", place),
        tag("td", one.variant),
        tag("td", settings(one.parameters), class_="parameters"),
        tag("td", duration(seconds), class_="number"),
        tag("td", "-" if ratio is None else f"{ratio:.2f}", class_="number"),
        tag("td", outcome),
        tag("td", reason, class_="reason"),
        class_="winner" if outcome == "won" else None,
    )


def _folded(title: str, text: str | None) -> Markup:
    if text is None:
        return tag("p", f"{title}: none.", class_="quiet")
    return tag("details", tag("summary", title), tag("pre", text, tabindex=0))
