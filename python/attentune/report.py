"""What the command line shows: progress while tuning, rankings, plans and records."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.table import Table
from rich.text import Text

from attentune.plan import Plan
from attentune.record import Loser, Record

if TYPE_CHECKING:
    from attentune.doctor import Finding

# Output that goes to a file or a pipe is not folded to a terminal's 80 columns.
PIPE_WIDTH = 140

Event = Mapping[str, Any]

# Every event of `tune --json`, one JSON object a line, with all its fields beside "event".
EVENTS: dict[str, dict[str, str]] = {
    "key": {"key": "canonical text of the key that comes next", "target": "canonical JSON"},
    "batch": {"index": "of the batch in the plan, from 0", "variants": "names in the batch"},
    "measured": {
        "variant": "name",
        "parameters": "object of whole numbers",
        "seconds": "time at the representative, null if it failed",
        "guess": "cost model's score of it before, the greater the faster; null if untrained",
        "outcome": "null, or the class of the failure",
    },
    "lost": {
        "variant": "name",
        "parameters": "object of whole numbers, as many as were chosen",
        "outcome": "unsupported, build, timeout, crash, memory, wrong or slower",
        "reason": "for a person",
    },
    "final": {"candidates": "how many are measured again, side by side"},
    "record": {
        "record": "the record, as `show --json` prints it",
        "found": "true if the database had it and nothing was tuned",
    },
}


def make_console(stream: Any = None, *, stderr: bool = False) -> Console:
    """Return a console for a stream, wide where nobody looks through a window."""
    console = Console(file=stream, stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(
        file=stream, stderr=stderr, highlight=False, width=PIPE_WIDTH
    )  # fmt: skip


def duration(seconds: float | None) -> str:
    """Return a time with a unit that suits it."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def size(count: int) -> str:
    """Return a number of bytes with a unit that suits it."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << bits:
            return f"{count / (1 << bits):.1f} {unit}"
    return f"{count} B"


def settings(parameters: Mapping[str, int]) -> str:
    """Return parameters by name."""
    return ", ".join(f"{name} {value}" for name, value in parameters.items()) or "-"


class Watcher:
    """Follows a search: called with every event, closed by its ``with`` block.

    Attributes
    ----------
    measured, finalists : int
        Candidates that were built and measured by the search, and again in a final.
    """

    def __init__(self) -> None:
        self.measured = 0
        self.finalists = 0

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        if event["event"] == "measured":
            self.measured += 1
        elif event["event"] == "final":
            self.finalists += event["candidates"]

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave nothing open."""


class JsonLines(Watcher):
    """Prints one line of JSON for each event; `EVENTS` is its schema."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def __call__(self, event: Event) -> None:
        """Print an event."""
        super().__call__(event)
        print(json.dumps(event, sort_keys=True), file=self.console.file, flush=True)


class _Best:
    """The best candidate of a batch so far."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.variant = ""

    def take(self, event: Event) -> bool:
        """Look at a measured candidate and return whether it is better."""
        seconds = event["seconds"]
        if seconds is None or (self.seconds is not None and seconds >= self.seconds):
            return False
        self.seconds, self.variant = seconds, event["variant"]
        return True

    def __str__(self) -> str:
        return "none yet" if self.seconds is None else f"{self.variant} {duration(self.seconds)}"


class PlainLines(Watcher):
    """Prints a line for what matters: batches, each better candidate, failures, the final."""

    def __init__(self, console: Console, trials: int) -> None:
        super().__init__()
        self.console = console
        self.trials = trials
        self.start = time.monotonic()
        self.count = 0
        self.best = _Best()

    def __call__(self, event: Event) -> None:
        """Print an event."""
        super().__call__(event)
        name = event["event"]
        if name == "batch":
            self.count, self.best = 0, _Best()
            self._say(f"batch {event['index'] + 1}: {', '.join(event['variants'])}")
        elif name == "measured":
            self.count += 1
            if self.best.take(event):
                chosen = settings(event["parameters"])
                self._say(f"trial {self.count}/{self.trials}: best {self.best} ({chosen})")
        elif name == "lost" and event["outcome"] != "slower":
            self._say(f"{event['variant']} {event['outcome']}: {event['reason']}")
        elif name == "final":
            self._say(f"final: {event['candidates']} candidates measured again, side by side")

    def _say(self, text: str) -> None:
        self.console.print(Text(f"[{time.monotonic() - self.start:6.1f} s] {text}"), soft_wrap=True)


class LiveProgress(Watcher):
    """A progress bar on a terminal: batch, variant, trials, best so far, time left."""

    def __init__(self, console: Console, trials: int) -> None:
        super().__init__()
        self.trials = trials
        self.count = 0
        self.best = _Best()
        self.batch = ""
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            Remaining(),
            console=console,
            transient=True,
        )
        self.task: Any = None

    def __enter__(self) -> LiveProgress:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        self.progress.stop()

    def __call__(self, event: Event) -> None:
        """Move the bar."""
        super().__call__(event)
        name = event["event"]
        if name == "batch":
            self._drop()
            self.count, self.best = 0, _Best()
            self.batch = f"batch {event['index'] + 1}"
            self.task = self.progress.add_task(self.batch, total=self.trials, best="")
        elif name == "measured" and self.task is not None:
            self.best.take(event)
            self.count += 1
            self.progress.update(
                self.task, advance=1, description=f"{self.batch} {event['variant']}",
                best=f"best {self.best}",
            )  # fmt: skip
            if self.count == self.trials:
                self._pulse("building and checking the best")
        elif name == "final":
            self._pulse(f"final of {event['candidates']}")
        elif name == "record":
            self._drop()

    def _pulse(self, text: str) -> None:
        """Show that something goes on whose end is not known."""
        for task in self.progress.tasks:
            task.total = None
            self.progress.update(task.id, description=f"{self.batch} {text}")

    def _drop(self) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
            self.task = None


def plan_view(title: str, plan: Plan, unsupported: Callable[[str], str | None]) -> RenderableType:
    """Return a plan's batches, with the reason of each variant that cannot serve the key."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for index, batch in enumerate(plan.batches, 1):
        for position, name in enumerate(batch):
            reason = unsupported(name)
            table.add_row(
                "" if position else f"  batch {index}",
                name,
                "" if reason is None else f"unsupported: {reason}",
            )
    for name in plan.dropped:
        table.add_row("  dropped", name, f"the policy {plan.policy} does not want it for this key")
    return Group(Text(title), table)


def ranking(
    record: Record,
    *,
    memory: Callable[[str, Mapping[str, int]], int | None],
    ideal: float | None = None,
) -> RenderableType:
    """Return the ranking of a record's batch: who won, who lost and why.

    Parameters
    ----------
    record : Record
        The winner with its losers.
    memory : Callable
        Gives the bytes that a variant with parameters needs beside its arrays, None if unknown.
    ideal : float, optional
        Seconds that the roofline allows at the key's representative.
    """
    table = Table(title_justify="left", expand=False)
    table.add_column("#", justify="right")
    table.add_column("variant", no_wrap=True)
    table.add_column("parameters", overflow="fold")
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    if ideal is not None:
        table.add_column("roofline", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("why it lost", overflow="fold", min_width=24)

    ranked, rest = _by_time(record.losers)
    rows = [
        (record.variant, record.parameters, record.seconds, ""),
        *((one.variant, one.parameters, one.seconds, one.reason) for one in ranked),
    ]
    for place, (variant, parameters, seconds, reason) in enumerate(rows, 1):
        needed = memory(variant, parameters)
        cells = [
            str(place),
            variant,
            _values(parameters),
            duration(seconds),
            f"{seconds / record.seconds:.2f}" if seconds else "-",
            *([] if ideal is None else [f"{100 * ideal / seconds:.0f} %" if seconds else "-"]),
            "-" if needed is None else size(needed),
            reason,
        ]
        table.add_row(*cells, style="bold" if place == 1 else None)
    for (variant, outcome, reason), count in rest.items():
        times = "" if count == 1 else f" ({count} candidates)"
        cells = ["-", variant, "-", "-", "-", *([] if ideal is None else ["-"]), "-"]
        table.add_row(*cells, f"{outcome}: {reason}{times}")
    legends = dict.fromkeys(tuple(sorted(parameters)) for _, parameters, _, _ in rows)
    lines = [Text(f"  parameters: {'/'.join(names)}") for names in legends if names]
    return Group(table, *lines)


def _values(parameters: Mapping[str, int]) -> str:
    """Return the values alone, in the order of their names."""
    return "/".join(str(parameters[name]) for name in sorted(parameters)) or "-"


def _by_time(losers: Sequence[Loser]) -> tuple[list[Loser], Counter[tuple[str, str, str]]]:
    """Part losers into those with a time, fastest first, and the rest, alike ones counted."""
    timed = [one for one in losers if one.seconds is not None and one.outcome == "slower"]
    rest = Counter((one.variant, one.outcome, one.reason) for one in losers if one not in timed)
    return sorted(timed, key=lambda one: one.seconds or 0.0), rest


def records_view(
    records: Iterable[Record], stale: Callable[[Record], str | None]
) -> RenderableType:
    """Return a table of records: what for, who won, and whether they are served."""
    table = Table(expand=False)
    for name in ("largest problem of the key", "target", "variant", "parameters"):
        table.add_column(name, overflow="fold")
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("tuned", no_wrap=True)
    table.add_column("state", overflow="fold")
    for record in records:
        reason = stale(record)
        table.add_row(
            str(record.key.representative()),
            short_target(record.target),
            record.variant,
            _values(record.parameters),
            duration(record.seconds),
            record.created,
            "served" if reason is None else f"stale: {reason}",
        )
    return table


def explanation(record: Record, stale: str | None) -> RenderableType:
    """Return where a record comes from, why this batch, and whether it is served."""
    earlier = [one for one in record.losers if one.variant not in record.batch]
    if earlier:
        failed = ", ".join(dict.fromkeys(one.variant for one in earlier))
        why = f"every candidate of the batches before it failed ({failed})"
    else:
        why = "it is the plan's first, and holds a valid candidate"
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    for name, text in (
        ("key", str(record.key)),
        ("measured at", str(record.key.representative())),
        ("target", record.target),
        ("winner", f"{record.variant} ({settings(record.parameters)})"),
        ("time", f"{duration(record.seconds)}, the median of {len(record.seconds_all)} samples"),
        ("batch", f"{', '.join(record.batch)}: {why}"),
        ("tuned", f"{record.created} on {record.machine}, with {versions}"),
        ("state", "served" if stale is None else f"stale, not served: {stale}; tune it again"),
    ):
        table.add_row(name, text)
    return table


def short_target(target: str) -> str:
    """Return the parts of a target's JSON that tell machines apart at a glance."""
    config = json.loads(target)
    known = [config.get(name) for name in ("kind", "mcpu", "arch")]
    cores = config.get("num-cores")
    return " ".join([*map(str, filter(None, known)), *([f"x {cores}"] if cores else [])])


def comparison(result: Mapping[str, Any]) -> RenderableType:
    """Return a benchmark's result for one problem as a table."""
    title = f"{result['problem']}, {_threads(result)}"
    table = Table(title=title, title_justify="left", title_style="bold", expand=False)
    table.add_column("", no_wrap=True)
    for name in ("median", "spread", "GFLOP/s", "times the first"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("against the reference", overflow="fold")
    for one in result["results"]:
        table.add_row(
            one["name"],
            duration(one["seconds"]),
            f"{100 * one['spread']:.1f} %",
            f"{one['gflops']:.1f}",
            f"{one['ratio']:.2f}",
            "right" if one["wrong"] is None else f"wrong: {one['wrong']}",
        )
    lines = [Text(f"  {one['name']}: {one['how']}") for one in result["results"]]
    lines += [Text(f"  {n}: left out, {why}") for n, why in result["unavailable"].items()]
    return Group(table, *lines)


def _threads(result: Mapping[str, Any]) -> str:
    return f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}"


def findings(found: Iterable[Finding]) -> RenderableType:
    """Return what a machine has, topic by topic, and what each enables."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    topic = ""
    for one in found:
        what = one.enables if one.wrong is None else f"WRONG, {one.wrong}"
        first = "" if one.topic == topic else one.topic
        table.add_row(first, one.name, one.found or "none", what)
        topic = one.topic
    return table


def dispatch_line(result: Mapping[str, Any]) -> Text:
    """Return what a dispatched call costs, as one line."""
    return Text(
        f"{result['problem']}, {_threads(result)}: attention() takes "
        f"{duration(result['call_seconds'])} with {result['variant']}, "
        f"{duration(result['overhead_seconds'])} more than the kernel's "
        f"{duration(result['kernel_seconds'])}"
    )


def regrets(results: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return how records do at other members of their buckets, and the worst of it."""
    table = Table(title="regret of one record for a bucket", title_justify="left")
    table.add_column("member", overflow="fold")
    for name in ("record's kernel", "best candidate", "regret"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in results:
        table.add_row(
            one["problem"],
            duration(one["seconds"]),
            duration(one["best"]),
            f"{one['regret']:.3f}",
        )
    worst = max((one["regret"] for one in results), default=1.0)
    return Group(table, Text(f"  at most {worst:.3f} over {len(results)} members"))


def strategies(results: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return what each search strategy found, and what tuning cost beside building and timing."""
    table = Table(title="best after so many trials, median over seeds", title_justify="left")
    table.add_column("problem", overflow="fold")
    for name in ("strategy", "found", "of candidates", "seconds"):
        table.add_column(name, justify="right")
    lines = []
    for one in results:
        if "strategy" in one:
            found = " / ".join(duration(seconds) for seconds in one["found"])
            row = (one["problem"], one["strategy"], found, str(one["candidates"]))
            table.add_row(*row, f"{one['wall']:.1f}")
        else:
            lines.append(
                Text(
                    f"  {one['problem']}: {100 * one['overhead']:.0f} % of {one['wall']:.0f} s for "
                    f"{one['trials']} trials was neither building nor measuring"
                )
            )
    return Group(table, *lines)
