"""The command line: plan, tune, show, report, run, export, bench, doctor, completion, demo."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.text import Text

from attentune import api, completion, models, reference, report
from attentune.database import Database, default_path
from attentune.errors import AttentuneError, InvalidParameters, InvalidTarget, RecordNotFound
from attentune.interrupt import interruptible
from attentune.key import LEVELS, AttentionKey
from attentune.problem import AttentionProblem
from attentune.record import Record, stale_reason
from attentune.search.remote import Tracker
from attentune.target import Target, native
from attentune.threads import available_cores

if TYPE_CHECKING:
    from attentune.call import CallableKernel
    from attentune.page import Entry
    from attentune.search.roofline import Peaks

DEMO_MODELS = ("bert-base", "llama-3-8b-prefill")
DEMO_DATABASE = "attentune-demo.sqlite"
# Enough to come within a few percent of the best, and two keys in half of the six minutes that
# the demo may take.
DEMO_TRIALS = 64
# Next to nothing to compute, so that the cost of a call is not lost in the kernel's noise.
DISPATCH_PROBLEM = "1,8,8,1,64,64,64:float32"
RUN_SECONDS = 0.5

PROBLEM_HELP = """\
a problem is written B,Hq,Hkv,Sq,Skv,D,Dv:dtype[:option...], as in
  1,32,8,512,512,128,128:bfloat16:causal
options: causal, top_left, mask, mask=padding, mask=1x1x384x384, bias, bias=1x8x64x64@float32,
  softcap=50, window=4095/0, scale=0.1, relaxed, bshd, strided
"""


class _Parser(argparse.ArgumentParser):
    """Ends with one line and exit code 1, as every other error does."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and what may have been meant."""
        self.exit(1, f"attentune: {message}{_nearest(self, message)}; see {self.prog} --help\n")


def _nearest(parser: argparse.ArgumentParser, message: str) -> str:
    """Return the valid name nearest to the one that a message of argparse's complains about."""
    _, _, choices = message.partition("(choose from ")
    known = re.findall(r"[\w-]+", choices)
    wrong = re.search(r"invalid choice: '([^']*)'", message)
    if wrong is None:
        wrong = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        commands = completion.subcommands(parser).values()
        known = [name for one in commands for action in one._actions
                 for name in action.option_strings]  # fmt: skip
    near = difflib.get_close_matches(wrong[1], known, n=1) if wrong else []
    return f"; did you mean {near[0]}?" if near else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments, those of the process by default.

    Returns
    -------
    int
        0; 1 after an error or a wrong result, which one line on stderr explains.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    kept = "attentune: interrupted; what was finished is kept"
    try:
        with interruptible(kept):
            return int(arguments.command(arguments))
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is left must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except AttentuneError as error:
        return _fail(str(error))
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        return _fail(f"cannot use{where}: {error.strerror or error}; check the path.")
    except MemoryError:
        return _fail("the arrays of the problem do not fit in memory; choose a smaller one.")


def _fail(message: str) -> int:
    print(f"attentune: {' '.join(message.split())}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="attentune",
        description="Generate, tune, store and run attention kernels for Apache TVM.",
        epilog="attentune COMMAND --help has examples.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(
        name: str, function: Callable[[argparse.Namespace], int], text: str, epilog: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(command=function)
        return command

    plan = add(
        "plan", _plan, "say which variants would be tried, batch after batch",
        "examples:\n  attentune plan --model bert-base\n"
        "  attentune plan --problem 1,8,8,512,512,64,64:float16 --target cuda:sm_80 "
        f"--policy seed\n\n{PROBLEM_HELP}",
    )  # fmt: skip
    _add_problems(plan)
    _add_target(plan)
    _add_policy(plan)
    _add_json(plan, "one JSON object a problem")

    tune = add(
        "tune", _tune, "find the best kernel for each problem's key and keep it",
        "examples:\n  attentune tune --model bert-base\n"
        "  attentune tune --problem 1,32,8,512,512,128,128:float32:causal --trials 128 "
        f"--database records.sqlite\n\n{PROBLEM_HELP}\n{_events_help()}",
    )  # fmt: skip
    _add_problems(tune)
    _add_target(tune)
    _add_database(tune)
    _add_policy(tune)
    _add_level(tune)
    tune.add_argument("--trials", type=int, default=64, metavar="N",
                      help="candidates to measure for a batch (default: 64)")  # fmt: skip
    tune.add_argument("--seconds", type=float, metavar="S",
                      help="time for each key, all included")  # fmt: skip
    tune.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (default: 0)")
    tune.add_argument("--retune", action="store_true", help="tune even where a record is")
    tune.add_argument("--memory", type=int, metavar="BYTES",
                      help="address space of a process that runs candidates")  # fmt: skip
    tune.add_argument("--tracker", metavar="HOST:PORT",
                      help="measure on the machines of this tracker of TVM's")  # fmt: skip
    tune.add_argument("--rpc-key", metavar="NAME", help="of the tracker's machines to measure on")
    _add_json(tune, "one JSON object an event, see below")

    show = add(
        "show", _show, "list the records of a database, or explain those of a problem",
        "examples:\n  attentune show\n  attentune show --model bert-base --database "
        f"records.sqlite\n\n{PROBLEM_HELP}",
    )  # fmt: skip
    _add_problems(show)
    _add_target(show)
    _add_database(show)
    _add_level(show)
    _add_json(show, "one JSON object a record, with the reason why it is stale or null")

    page = add(
        "report", _report, "write one HTML page that shows a database and why each winner won",
        "The page needs no network. Sort its table by a click on a column, filter it by words.\n\n"
        "examples:\n  attentune report records.sqlite -o report.html\n"
        "  attentune report records.sqlite --against older.sqlite -o report.html",
    )  # fmt: skip
    page.add_argument("database", metavar="DATABASE", nargs="?",
                      help="where records are kept (default: as for show)")  # fmt: skip
    page.add_argument("-o", "--output", metavar="PATH", default="report.html",
                      help="the page's file (default: report.html)")  # fmt: skip
    page.add_argument("--against", metavar="PATH", help="another database to compare it with")

    run = add(
        "run", _run, "run the kernel of a problem on random inputs and check its result",
        "Exit code 1 if the result is wrong.\n\nexamples:\n  attentune run --model bert-base\n"
        f"  attentune run --problem 2,8,2,100,333,80,64:bfloat16:mask:bias\n\n{PROBLEM_HELP}",
    )  # fmt: skip
    _add_problems(run)
    _add_target(run)
    _add_database(run)
    run.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs (default: 0)")
    _add_json(run, "one JSON object a problem")

    run.add_argument("--library", metavar="PATH",
                     help="run an exported library, without the compiler")  # fmt: skip

    export = add(
        "export", _export, "write one shared library with the kernels of problems or a database",
        "Without problems: all keys that the database has for the target.\n\nexamples:\n"
        "  attentune export --output attention.so\n"
        "  attentune export --model bert-base --model llama-3-8b-decode --output models.so\n"
        "  attentune run --model bert-base --library models.so\n\n"
        f"{PROBLEM_HELP}",
    )  # fmt: skip
    _add_problems(export)
    _add_target(export)
    _add_database(export)
    _add_level(export)
    export.add_argument("--output", metavar="PATH", default="attention.so",
                        help="the library's file (default: attention.so)")  # fmt: skip
    export.add_argument("--on-miss", choices=("heuristic", "error"), default="heuristic",
                        help="for problems without a record (default: heuristic)")  # fmt: skip
    export.add_argument("--compiler", metavar="COMMAND",
                        help="what links, as in aarch64-linux-gnu-gcc (default: found on PATH)"
                        )  # fmt: skip
    _add_json(export, "the manifest as one JSON object")

    bench = add(
        "bench", _bench, "time our kernels beside TVM's own lowering and PyTorch, interleaved",
        "Without problems: those of the demo.\n\nexamples:\n  attentune bench\n"
        "  attentune bench --model vit-b16 --threads 1 --against torch\n"
        "  attentune bench --model bert-base --variant fallback --against math\n"
        f"  attentune bench --dispatch\n\n{PROBLEM_HELP}",
    )  # fmt: skip
    _add_problems(bench)
    _add_target(bench)
    _add_database(bench)
    bench.add_argument("--against", type=_names, default=["torch", "tvm", "math"], metavar="NAMES",
                       help="baselines: torch, tvm, math (PyTorch's, with scores materialized) "
                            "(default: torch,tvm,math)")  # fmt: skip
    bench.add_argument("--threads", type=_counts, default=[], metavar="COUNTS",
                       help="numbers of threads, each in a process of its own (default: 1,2)"
                       )  # fmt: skip
    bench.add_argument("--variant", action="append", default=[], metavar="NAME",
                       help="a variant to time in place of the best; may be repeated")  # fmt: skip
    bench.add_argument("--rounds", type=int, default=5, metavar="N",
                       help="turns of each contestant (default: 5)")  # fmt: skip
    bench.add_argument("--seed", type=int, default=0, metavar="N",
                       help="of the inputs (default: 0)")  # fmt: skip
    bench.add_argument("--dispatch", action="store_true",
                       help="time what a call of attention() costs beyond its kernel")  # fmt: skip
    bench.add_argument(
        "--regret",
        action="store_true",
        help="how records do at other members of their buckets, instead",
    )
    bench.add_argument(
        "--search",
        action="store_true",
        help="what the search finds and costs, against random draws, instead",
    )
    bench.add_argument(
        "--trials",
        type=int,
        default=64,
        metavar="N",
        help="candidates to measure with --regret and --search (default: 64)",
    )
    _add_json(bench, "one JSON object a problem and number of threads")

    doctor = add(
        "doctor", _doctor, "say what this machine has, and what each of it enables",
        "Exit code 1 if something is wrong without which nothing works.\n\n"
        "examples:\n  attentune doctor\n  attentune doctor --json",
    )  # fmt: skip
    _add_json(doctor, "one JSON object a finding")

    complete = add(
        "completion", _completion, "print a script that completes commands in a shell",
        "examples:\n  source <(attentune completion bash)\n"
        "  attentune completion zsh > ~/.attentune-completion",
    )  # fmt: skip
    complete.add_argument("shell", choices=completion.SHELLS, help="which shell")

    demo = add(
        "demo", _demo, "tune two model shapes on this CPU, compare with TVM's lowering, check",
        "A second run finds the records of the first and tunes nothing.",
    )  # fmt: skip
    demo.add_argument("--database", metavar="PATH", default=DEMO_DATABASE,
                      help=f"where records are kept (default: ./{DEMO_DATABASE})")  # fmt: skip
    demo.add_argument("--trials", type=int, default=DEMO_TRIALS, metavar="N",
                      help=f"candidates to measure for a batch (default: {DEMO_TRIALS})"
                      )  # fmt: skip
    demo.set_defaults(
        json=False,
        seconds=None,
        seed=0,
        policy="default",
        level="balanced",
        retune=False,
        memory=None,
    )
    return parser


def _add_problems(command: argparse.ArgumentParser) -> None:
    command.add_argument("--problem", action="append", default=[], metavar="TEXT",
                         help="an attention call as text, see below; may be repeated")  # fmt: skip
    command.add_argument("--model", action="append", default=[], metavar="NAME",
                         help="the calls of a model; may be repeated: "
                              + ", ".join(models.NAMED))  # fmt: skip


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", default="native", metavar="TARGET",
                         help="native (this CPU, the default), cuda:sm_80, or a TVM target as "
                              "JSON or tag")  # fmt: skip


def _add_database(command: argparse.ArgumentParser) -> None:
    command.add_argument("--database", metavar="PATH",
                         help="where records are kept (default: $ATTENTUNE_DATABASE or "
                              "attentune/records.sqlite in the user's data folder)")  # fmt: skip


def _add_policy(command: argparse.ArgumentParser) -> None:
    command.add_argument("--policy", default="default", metavar="NAME",
                         help="which variants, in which batches: default or seed")  # fmt: skip


def _add_level(command: argparse.ArgumentParser) -> None:
    command.add_argument("--level", default="balanced", choices=LEVELS,
                         help="how coarsely lengths share a record (default: balanced)"
                         )  # fmt: skip


def _add_json(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--json", action="store_true", help=text)


def _events_help() -> str:
    lines = ['events of --json, each with its name as "event":']
    for name, fields in report.EVENTS.items():
        lines += [f"  {name}", *(f"    {field}: {text}" for field, text in fields.items())]
    return "\n".join(lines)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


_counts.__name__ = "list of counts"  # what argparse calls it in its error


def _problems(arguments: argparse.Namespace) -> list[AttentionProblem]:
    """Return the problems that a command was given, each once."""
    found = [AttentionProblem.parse(text) for text in arguments.problem]
    for name in arguments.model:
        found += models.get(name)
    return list(dict.fromkeys(found))


def _some_problems(arguments: argparse.Namespace) -> list[AttentionProblem]:
    problems = _problems(arguments)
    if not problems:
        raise InvalidParameters(
            "There is nothing to do; name an attention call with --problem TEXT or --model NAME."
        )
    return problems


def _local_target(text: str) -> Target:
    """Return a target whose code this machine can run."""
    target = Target.parse(text)
    here = native()
    missing = sorted(target.features - here.features)
    if not target.is_cpu:
        raise InvalidTarget(
            f"The target {text!r} is no CPU, and only a CPU's kernels are run here; use native."
        )
    if target.arch != here.arch:
        raise InvalidTarget(
            f"The target {text!r} is for {target.arch}, and this is {here.arch}; use native."
        )
    if missing:
        raise InvalidTarget(
            f"The target {text!r} has {', '.join(missing)}, and this CPU does not; use native."
        )
    return target


def _existing_database(arguments: argparse.Namespace) -> Path | None:
    """Return the database that was named, or the user's own if there is one."""
    if arguments.database is not None:
        return _existing(arguments.database)
    path = default_path()
    return path if path.exists() else None


def _existing(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise RecordNotFound(f"There is no database {path}; tune into it first.")
    return path


def _reading(path: Path | None) -> contextlib.AbstractContextManager[Database | None]:
    return contextlib.nullcontext() if path is None else Database(path, read_only=True)


def _known() -> Mapping[str, Any]:
    """Return the variants that ship, by name."""
    from attentune.schedules import VARIANTS

    return {variant.name: variant for variant in VARIANTS}


def _staleness() -> Callable[[Record], str | None]:
    from attentune.versions import current_versions

    fingerprints = {name: variant.fingerprint() for name, variant in _known().items()}
    return lambda record: stale_reason(record, fingerprints, current_versions())


def _unsupported(key: AttentionKey, target: Target) -> Callable[[str], str | None]:
    """Return a function that says why a variant cannot serve a key."""
    known = _known()

    def reason(name: str) -> str | None:
        if name not in known:
            return f"this version has no kernel of it for {target.kind} targets"
        return known[name].supports(key, target)

    return reason


def _dump(data: Mapping[str, Any]) -> None:
    print(json.dumps(data, sort_keys=True), flush=True)


def _plan(arguments: argparse.Namespace) -> int:
    console = report.make_console()
    for problem in _some_problems(arguments):
        made = api.plan(problem, arguments.target, arguments.policy)
        unsupported = _unsupported(made.key, made.target)
        if arguments.json:
            names = [name for batch in made.batches for name in batch]
            reasons = {name: unsupported(name) for name in names}
            _dump(
                {
                    "problem": str(problem),
                    "key": str(made.key),
                    "target": str(made.target),
                    "policy": made.policy,
                    "batches": [list(batch) for batch in made.batches],
                    "dropped": list(made.dropped),
                    "unsupported": {n: r for n, r in reasons.items() if r is not None},
                }
            )
        else:
            where = report.short_target(str(made.target))
            title = f"{problem} on {where}, policy {made.policy}"
            console.print(report.plan_view(title, made, unsupported))
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    problems = _some_problems(arguments)
    tracker = _tracker(arguments)
    target = Target.parse(arguments.target) if tracker else _local_target(arguments.target)
    path = Path(arguments.database) if arguments.database else default_path()
    console = report.make_console()
    with Database(path) as database:
        _tune_each(problems, target, database, arguments, console, tracker)
    if not arguments.json:
        console.print(Text(f"records: {path}"), soft_wrap=True)
    return 0


def _tune_each(
    problems: Sequence[AttentionProblem],
    target: Target,
    database: Database,
    arguments: argparse.Namespace,
    console: Console,
    tracker: Tracker | None = None,
) -> tuple[int, int]:
    """Tune problems one by one, showing how it goes; return what was measured and how often."""
    measured = finalists = 0
    seen: set[AttentionKey] = set()
    for problem in problems:
        key = AttentionKey.from_problem(problem, arguments.level)
        if key in seen:
            continue
        seen.add(key)
        watcher = _watcher(arguments, console)
        if not arguments.json:
            console.print(Text(f"\n{problem}", style="bold"), soft_wrap=True)
        found: list[bool] = []

        def on_event(event: Mapping[str, Any], watch: Any = watcher, hits: Any = found) -> None:
            if event["event"] == "record":
                hits.append(bool(event["found"]))
            watch(event)

        with watcher:
            record = api.tune(
                problem,
                target,
                database,
                trials=arguments.trials,
                seconds=arguments.seconds,
                seed=arguments.seed,
                runner=tracker,
                policy=arguments.policy,
                memory_bytes=arguments.memory,
                level=arguments.level,
                retune=arguments.retune,
                on_event=on_event,
            )[0]
        measured += watcher.measured
        finalists += watcher.finalists
        if not arguments.json:
            note = "found in the database" if found == [True] else "tuned"
            console.print(Text(f"{note}: batch {', '.join(record.batch)}"), soft_wrap=True)
            _print_ranking(record, target, console)
    return measured, finalists


def _tracker(arguments: argparse.Namespace) -> Tracker | None:
    if (arguments.tracker is None) != (arguments.rpc_key is None):
        raise InvalidParameters("--tracker and --rpc-key go together; give both or neither.")
    if arguments.tracker is None:
        return None
    return Tracker.parse(arguments.tracker, arguments.rpc_key)


def _watcher(arguments: argparse.Namespace, console: Console) -> report.Watcher:
    if arguments.json:
        return report.JsonLines(console)
    if console.is_terminal:
        return report.LiveProgress(console, arguments.trials)
    return report.PlainLines(console, arguments.trials)


def _print_ranking(record: Record, target: Target, console: Console) -> None:
    known = _known()
    representative = record.key.representative()

    def memory(variant: str, parameters: Mapping[str, int]) -> int | None:
        if variant not in known:
            return None
        return known[variant].workspace(representative, target, parameters)

    console.print(report.ranking(record, memory=memory, ideal=_ideal(record, target)))


def _ideal(record: Record, target: Target) -> float | None:
    """Return what the roofline allows a record, None if it was not measured on this machine."""
    from attentune.search import roofline

    peaks = _peaks(record, target)
    if peaks is None:
        return None
    return roofline.ideal(roofline.work(record.key.representative()), peaks)


def _peaks(record: Record, target: Target) -> Peaks | None:
    """Return this machine's peaks, None if a record was not measured on it."""
    from attentune.search.peaks import machine_peaks
    from attentune.versions import machine_name

    if record.machine != machine_name() or str(target) != str(native()):
        return None
    try:
        return machine_peaks(target)
    except OSError:  # nowhere to keep them
        return None


def _show(arguments: argparse.Namespace) -> int:
    path = _existing_database(arguments)
    if path is None:
        raise RecordNotFound(
            f"There is no database {default_path()} yet; tune into it, or name one with --database."
        )
    stale = _staleness()
    console = report.make_console()
    problems = _problems(arguments)
    with Database(path, read_only=True) as database:
        if not problems:
            records = database.records()
            if arguments.json:
                for record in records:
                    _dump({**record.to_json(), "stale": stale(record)})
            else:
                console.print(report.records_view(records, stale))
            return 0
        target = Target.parse(arguments.target)
        for problem in problems:
            key = AttentionKey.from_problem(problem, arguments.level)
            found = database.get(key, str(target))
            if found is None:
                raise RecordNotFound(
                    f"{path} has no record of {problem} on {report.short_target(str(target))}; "
                    "tune it, or list what there is with: attentune show"
                )
            if arguments.json:
                _dump({**found.to_json(), "stale": stale(found)})
            else:
                console.print(report.explanation(found, stale(found)))
                _print_ranking(found, target, console)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from attentune import page

    path = _existing_database(arguments)
    if path is None:
        raise RecordNotFound(
            f"There is no database {default_path()} yet; tune into it, or name another."
        )
    with Database(path, read_only=True) as database:
        records = database.records()
    others: dict[tuple[AttentionKey, str], Record] = {}
    if arguments.against is not None:
        with Database(_existing(arguments.against), read_only=True) as database:
            others = {(one.key, one.target): one for one in database.records()}
    stale = _staleness()
    entries = [
        _entry(record, stale(record), others.pop((record.key, record.target), None))
        for record in records
    ]
    text = page.page(path.name, entries, arguments.against, list(others.values()))
    Path(arguments.output).write_text(text, encoding="utf-8")
    report.make_console().print(
        Text(f"{arguments.output}: {len(entries)} records, {report.size(len(text.encode()))}"),
        soft_wrap=True,
    )
    return 0


def _entry(record: Record, stale: str | None, other: Record | None) -> Entry:
    """Return what the report's page shows of a record."""
    from attentune.page import Entry

    target = Target.parse(record.target)
    known = _known()
    source = None
    # A stale record's source is not what was measured.
    if stale is None:
        variant = known[record.variant]
        source = str(variant.scheduled(record.key, target, record.parameters).script())
    return Entry(
        record,
        stale,
        api.plan(record.key, target).batches,
        _peaks(record, target),
        source,
        other,
    )


def _export(arguments: argparse.Namespace) -> int:
    problems = _problems(arguments)
    path = _existing_database(arguments)
    if not problems and path is None:
        raise RecordNotFound(
            f"There is no database {default_path()} yet; tune into it, or name what to export "
            "with --problem TEXT or --model NAME."
        )
    with _reading(path) as database:
        manifest = api.export_library(
            problems or database,  # type: ignore[arg-type]
            arguments.target,
            arguments.output,
            database=database,
            on_miss=arguments.on_miss,
            level=arguments.level,
            compiler=shlex.split(arguments.compiler) if arguments.compiler else None,
        )
    if arguments.json:
        _dump(json.loads(manifest.dumps()))
        return 0
    console = report.make_console()
    size = os.path.getsize(arguments.output)
    console.print(
        Text(
            f"{arguments.output}: {len(manifest.entries)} keys, {len(manifest.codes)} kernels, "
            f"{report.size(size)}"
        ),
        soft_wrap=True,
    )
    return 0


def _run_library(arguments: argparse.Namespace) -> int:
    """Check a library's results; the reference needs no compiler either."""
    from attentune.call import OPTIONS
    from attentune.search.inputs import random_inputs

    library = api.load_library(arguments.library)
    console = report.make_console()
    right = True
    for problem in _some_problems(arguments):
        inputs = random_inputs(problem, arguments.seed)
        kernel = library.kernel(problem)
        options: dict[str, Any] = {name: getattr(problem, name) for name in OPTIONS}
        arrays: dict[str, Any] = {
            name: inputs.get(name) for name in ("query", "key", "value", "mask", "bias")
        }
        begin = time.perf_counter()
        out = library(**arrays, **options)
        seconds = time.perf_counter() - begin
        tuned = library.steps["miss"] == 0
        result = _outcome(problem, kernel, tuned, inputs, out, seconds)
        right &= result["wrong"] is None
        if arguments.json:
            _dump(result)
        else:
            verdict = "right" if result["wrong"] is None else f"WRONG: {result['wrong']}"
            console.print(
                Text(
                    f"{problem}: {kernel.variant} of {arguments.library}, first call "
                    f"{report.duration(seconds)}, {verdict}"
                ),
                soft_wrap=True,
            )
    return 0 if right else 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.library is not None:
        return _run_library(arguments)
    problems = _some_problems(arguments)
    target = _local_target(arguments.target)
    path = _existing_database(arguments)
    console = report.make_console()
    right = True
    with _reading(path) as database:
        for problem in problems:
            result = _check(problem, target, database, arguments.seed)
            right &= result["wrong"] is None
            if arguments.json:
                _dump(result)
            else:
                console.print(Text(_run_line(result)), soft_wrap=True)
    return 0 if right else 1


def _run_line(result: Mapping[str, Any]) -> str:
    source = "tuned" if result["tuned"] else "not tuned"
    verdict = (
        f"right, greatest error {result['error']:.2e}"
        if result["wrong"] is None
        else f"WRONG: {result['wrong']}"
    )
    return (
        f"{result['problem']}: {result['variant']} ({report.settings(result['parameters'])}; "
        f"{source}), {report.duration(result['seconds'])} a call, {verdict}"
    )


def _check(
    problem: AttentionProblem, target: Target, database: Database | None, seed: int = 0
) -> dict[str, Any]:
    """Build the kernel of a problem, run it on random inputs, and compare with the reference.

    Returns
    -------
    dict
        problem, variant, parameters, tuned (whether a record was served), seconds (median of a
        call), error (greatest difference from the reference) and wrong (what differs, or None).
    """
    from attentune import bench
    from attentune.search.inputs import random_inputs

    inputs = random_inputs(problem, seed)
    kernel, tuned = bench.find_kernel(problem, target, database)
    one = bench.contestant(kernel, problem, inputs, tuned)
    out = one.call()
    timing = bench.interleave([one], rounds=1, block_seconds=RUN_SECONDS, gap_seconds=0.0)
    return _outcome(problem, kernel, tuned, inputs, out, timing[one.name].seconds)


def _outcome(
    problem: AttentionProblem,
    kernel: CallableKernel,
    tuned: bool,
    inputs: Mapping[str, Any],
    out: Any,
    seconds: float,
) -> dict[str, Any]:
    """Return what a run of a kernel came to, compared with the reference; see `_check`."""
    import numpy as np

    from attentune import bench

    expected = reference.expected(problem, inputs)
    error = np.abs(np.asarray(out, np.float64) - expected)
    return {
        "problem": str(problem),
        "variant": kernel.variant,
        "parameters": kernel.parameters,
        "tuned": tuned,
        "seconds": seconds,
        "error": float(error.max(initial=0.0)),
        "wrong": bench.difference(problem, inputs, out, expected),
    }


def _bench(arguments: argparse.Namespace) -> int:
    from attentune import bench

    if arguments.regret or arguments.search:
        return _study(arguments)
    problems = _problems(arguments)
    if not problems:
        names = (DISPATCH_PROBLEM,) if arguments.dispatch else ()
        problems = [AttentionProblem.parse(text) for text in names]
        problems += [] if names else [one for name in DEMO_MODELS for one in models.get(name)]
    target = _local_target(arguments.target)
    path = _existing_database(arguments)
    jobs = [
        bench.Job(
            problems=[str(problem) for problem in problems],
            target=str(target),
            database=None if path is None else str(path),
            threads=threads,
            variants=arguments.variant,
            against=arguments.against,
            dispatch=arguments.dispatch,
            rounds=arguments.rounds,
            seed=arguments.seed,
        )
        for threads in arguments.threads or sorted({1, min(2, available_cores())})
    ]
    console = report.make_console()
    right = True
    for job in jobs:
        for result in bench.run_in_child(job):
            if arguments.json:
                _dump(result)
            elif arguments.dispatch:
                console.print(report.dispatch_line(result), soft_wrap=True)
            else:
                console.print(report.comparison(result))
            # Baselines may be wrong in ways of their own; ours may not.
            ours = result.get("results", [])[: max(len(arguments.variant), 1)]
            right &= all(one["wrong"] is None for one in ours)
    return 0 if right else 1


def _study(arguments: argparse.Namespace) -> int:
    from attentune import study

    console = report.make_console()
    target = _local_target(arguments.target)
    given = _problems(arguments)
    results: Iterable[dict[str, Any]]
    if arguments.regret:
        problems = given or [AttentionProblem.parse(text) for text in study.REGRET_PROBLEMS]
        path = _existing_database(arguments)
        with contextlib.ExitStack() as stack:
            database = None if path is None else stack.enter_context(Database(path))
            results = list(study.regret(problems, target, database, arguments.trials))
        table = report.regrets
    else:
        problems = given or [AttentionProblem.parse(text) for text in study.STRATEGY_PROBLEMS]
        results = [
            *study.strategies(problems, target, arguments.trials),
            *(study.overhead(problem, target, arguments.trials) for problem in problems),
        ]
        table = report.strategies
    if arguments.json:
        for result in results:
            _dump(result)
    else:
        console.print(table(results))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from attentune.doctor import examine

    findings = examine()
    if arguments.json:
        for one in findings:
            _dump(asdict(one))
    else:
        report.make_console().print(report.findings(findings))
    return 1 if any(one.wrong for one in findings) else 0


def _completion(arguments: argparse.Namespace) -> int:
    print(completion.script(_parser(), arguments.shell, models.NAMED), end="")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from attentune import bench

    console = report.make_console()
    target = native()
    begin = time.monotonic()
    problems = [problem for name in DEMO_MODELS for problem in models.get(name)]
    console.print(
        Text(f"attentune demo: {', '.join(DEMO_MODELS)} on {report.short_target(str(target))}")
    )
    path = Path(arguments.database)
    with Database(path) as database:
        measured, finalists = _tune_each(problems, target, database, arguments, console)
        right = True
        for problem in problems:
            inputs = bench.random_inputs(problem)
            contestants = [
                bench.ours(problem, inputs, target, database),
                bench.tvm_lowering(problem, inputs, target),
            ]
            job = bench.Job([str(problem)], str(target), threads=target.num_cores, rounds=3)
            result = bench.compare(problem, inputs, contestants, job)
            console.print(report.comparison(result))
            first, other = result["results"]
            right &= first["wrong"] is None
            console.print(
                Text(f"  {other['ratio']:.1f} times as fast as TVM's own lowering", style="bold")
            )
        library = path.with_name(f"{path.stem}.so")
        made = api.export_library(problems, target, library, database=database)
    right &= _serves(library, problems, console)
    console.print(
        Text(
            f"exported {library.resolve()}: {len(made.codes)} kernels, "
            f"{report.size(library.stat().st_size)}"
        ),
        soft_wrap=True,
    )
    builds = measured + finalists
    console.print(
        Text(
            f"\n{builds} builds and {builds} measurements of candidates; "
            f"{time.monotonic() - begin:.0f} s in all. The records are in {path.resolve()}"
        ),
        soft_wrap=True,
    )
    return 0 if right else 1


def _serves(library: Path, problems: Sequence[AttentionProblem], console: Console) -> bool:
    """Check a library in a fresh process, which has no compiler loaded."""
    named = [part for problem in problems for part in ("--problem", str(problem))]
    command = [sys.executable, "-m", "attentune.cli", "run", "--library", str(library), *named]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    console.print(Text((done.stdout + done.stderr).rstrip()), soft_wrap=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
