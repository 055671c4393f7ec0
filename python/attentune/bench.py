"""The benchmark: our kernels beside TVM's own lowering and PyTorch, interleaved.

Contestants take turns, round after round, in one process: a slow minute of the machine hits all of
them alike. Between two turns nothing runs for a moment, because the thread pool of whoever was
just called keeps its cores busy for a while, waiting for more. Each number of threads has a
process of its own, so that no library has made up its mind about threads before.

Run as a module it is such a process: a job comes as JSON on its standard input, and a line of JSON
goes out for each result.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from attentune import api, arguments, reference
from attentune.accuracy import mismatch
from attentune.arrays import to_numpy
from attentune.database import Database
from attentune.errors import AttentuneError, InvalidParameters, RecordNotFound, Unsupported
from attentune.group import Policy
from attentune.problem import AttentionProblem
from attentune.search.inputs import random_inputs
from attentune.search.roofline import work
from attentune.target import Target
from attentune.threads import available_cores

if TYPE_CHECKING:
    from attentune.dispatch import Kernel

AGAINST = ("torch", "tvm", "math")
OURS = "attentune"
ROUNDS = 5
BLOCK_SECONDS = 0.1
# PyTorch's OpenMP keeps its threads spinning for up to 0.2 s after a call.
GAP_SECONDS = 0.3
# What stands for -inf in a baseline that makes NaN of a row that is masked out.
MASKED = {"float32": -1e30, "bfloat16": -1e30, "float16": -6e4}

Arrays = Mapping[str, np.ndarray[Any, Any]]


class Unavailable(Exception):
    """A baseline cannot compute a problem; the message says why."""


@dataclass(frozen=True)
class Contestant:
    """Something to time.

    Attributes
    ----------
    name : str
        Short name.
    how : str
        What is called, for a person.
    call : Callable
        Computes the problem once and returns the output as it comes.
    output : Callable
        Turns that output into an array ``[batch, q_heads, seq_q, value_dim]``.
    around : Callable
        Gives the context in which it is called.
    """

    name: str
    how: str
    call: Callable[[], Any]
    output: Callable[[Any], Any] = field(default=lambda out: out)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Timing:
    """The seconds of a contestant's calls, a tuple for each round."""

    blocks: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> float:
        """Median of all calls."""
        return statistics.median(self._all)

    @property
    def spread(self) -> float:
        """Half of the calls lie in a range of this size, relative to the median."""
        if len(self._all) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self._all, n=4, method="inclusive")
        return (high - low) / self.seconds

    def ratio(self, other: Timing) -> float:
        """Return how many times as long this takes as the other: the median over the rounds."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)

    @property
    def _all(self) -> list[float]:
        return [sample for block in self.blocks for sample in block]


def interleave(
    contestants: Sequence[Contestant],
    *,
    rounds: int = ROUNDS,
    block_seconds: float = BLOCK_SECONDS,
    gap_seconds: float = GAP_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Timing]:
    """Time contestants in turn.

    Parameters
    ----------
    contestants : sequence of Contestant
        In the order of their turns.
    rounds : int
        Turns of each.
    block_seconds : float
        Length of a turn: one call that is not counted, then calls until the time is up, one at
        least. In later rounds a call that alone is longer than this is counted at once.
    gap_seconds : float
        Rest before each turn.
    clock, sleep : Callable
        For tests.
    """
    blocks: dict[str, list[tuple[float, ...]]] = {one.name: [] for one in contestants}
    for number in range(rounds):
        for one in contestants:
            sleep(gap_seconds)
            with one.around():
                samples: list[float] = []
                begin = now = clock()
                warm = number > 0 and min(blocks[one.name][-1]) > block_seconds
                while not samples or now - begin < block_seconds:
                    start = clock()
                    one.call()
                    now = clock()
                    if warm:
                        samples.append(now - start)
                    warm = True
            blocks[one.name].append(tuple(samples))
    return {name: Timing(tuple(taken)) for name, taken in blocks.items()}


@dataclass(frozen=True)
class Job:
    """What one process of the benchmark does.

    Attributes
    ----------
    problems : sequence of str
        Problems as text.
    target : str
        Canonical text of the target.
    database : str or None
        Where tuned records are.
    threads : int
        How many threads everybody gets.
    variants : sequence of str
        Variants of ours to time, with default parameters unless the record is theirs; the one
        that `attention` would take if empty.
    against : sequence of str
        Baselines.
    dispatch : bool
        Whether to time the cost of a dispatched call instead.
    rounds, block_seconds, gap_seconds
        As `interleave` takes them.
    seed : int
        Of the inputs.
    """

    problems: Sequence[str]
    target: str
    database: str | None = None
    threads: int = 1
    variants: Sequence[str] = ()
    against: Sequence[str] = AGAINST
    dispatch: bool = False
    rounds: int = ROUNDS
    block_seconds: float = BLOCK_SECONDS
    gap_seconds: float = GAP_SECONDS
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.against:
            if name not in AGAINST:
                raise InvalidParameters(
                    f"There is no baseline {name!r}; choose from {', '.join(AGAINST)}."
                )
        if not 1 <= self.threads <= available_cores():
            raise InvalidParameters(
                f"threads is {self.threads}; this process may use 1 to {available_cores()}."
            )
        if self.rounds < 1:
            raise InvalidParameters(f"rounds is {self.rounds}; it must be at least 1.")


def run_in_child(job: Job) -> Iterator[dict[str, Any]]:
    """Run a job in a process of its own and yield its results, one a problem.

    Raises
    ------
    AttentuneError
        With what the process says, or how it ended.
    """
    threads = str(job.threads)
    environment = {
        **os.environ, "TVM_NUM_THREADS": threads, "OMP_NUM_THREADS": threads,
        "TVM_BIND_THREADS": "0",
    }  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-m", "attentune.bench"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    with child:
        if child.stdin is None or child.stdout is None:
            raise AttentuneError("The benchmark's process has no pipes; run it again.")
        try:
            child.stdin.write(json.dumps(asdict(job)))
            child.stdin.close()
            for line in child.stdout:
                result = json.loads(line)
                if "error" in result:
                    raise AttentuneError(result["error"])
                yield result
        finally:
            if child.poll() is None and sys.exc_info()[0] is not None:
                child.kill()
    if child.returncode != 0:
        raise AttentuneError(
            f"The benchmark's process with {threads} threads ended with the code "
            f"{child.returncode}; run it for one problem at a time to see which."
        )


def run_job(job: Job) -> Iterator[dict[str, Any]]:
    """Run a job in this process and yield its results, one a problem."""
    from attentune.threads import use_cores

    for text in job.problems:
        problem = AttentionProblem.parse(text)
        inputs = random_inputs(problem, job.seed)
        target = Target.parse(job.target)
        if job.dispatch:
            yield _dispatch(problem, inputs, target, job)
            continue
        contestants = [
            ours(problem, inputs, target, job.database, name) for name in job.variants or (None,)
        ]
        left_out: dict[str, str] = {}
        for name in job.against:
            try:
                contestants.append(BASELINES[name](problem, inputs, target, job.threads))
            except Unavailable as reason:
                left_out[name] = str(reason)
        use_cores(job.threads)
        yield compare(problem, inputs, contestants, job, left_out)


def compare(
    problem: AttentionProblem,
    inputs: Arrays,
    contestants: Sequence[Contestant],
    job: Job,
    left_out: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Check and time contestants; the first is what the others are compared with.

    Returns
    -------
    dict
        problem, threads, flops (of `attentune.search.roofline.work`), unavailable (reasons by
        name), and results: name, how, seconds (median), spread, gflops, ratio (how many times as
        long as the first), wrong (None, or what differs from the reference) and samples (a list
        for each round).
    """
    expected = reference.expected(problem, inputs)
    wrong = {}
    for one in contestants:
        with one.around():
            wrong[one.name] = difference(problem, inputs, one.output(one.call()), expected)
    timings = interleave(
        contestants,
        rounds=job.rounds,
        block_seconds=job.block_seconds,
        gap_seconds=job.gap_seconds,
    )
    flops = work(problem).flops
    first = timings[contestants[0].name]
    results = []
    for one in contestants:
        timing = timings[one.name]
        results.append(
            {
                "name": one.name,
                "how": one.how,
                "seconds": timing.seconds,
                "spread": timing.spread,
                "gflops": flops / timing.seconds / 1e9,
                "ratio": timing.ratio(first),
                "wrong": wrong[one.name],
                "samples": [list(block) for block in timing.blocks],
            }
        )
    return {
        "problem": str(problem),
        "threads": job.threads,
        "flops": flops,
        "unavailable": dict(left_out or {}),
        "results": results,
    }


def difference(
    problem: AttentionProblem, inputs: Arrays, output: Any, expected: np.ndarray[Any, Any]
) -> str | None:
    """Say how an output differs from the reference, None if it agrees."""
    magnitude = float(abs(inputs["value"].astype("float32")).max(initial=0.0))
    return mismatch(output, expected, problem.dtype, magnitude)


def ours(
    problem: AttentionProblem,
    inputs: Arrays,
    target: Target,
    database: Database | str | os.PathLike[str] | None = None,
    variant: str | None = None,
) -> Contestant:
    """Return a kernel of ours, called as `attention` calls it once it has chosen.

    Parameters
    ----------
    problem, inputs, target
        What to compute, and on what.
    database : Database or path, optional
        Where tuned records are.
    variant : str, optional
        A variant by name; the one that `attention` takes if None.
    """
    kernel, tuned = find_kernel(problem, target, database, variant)
    return contestant(kernel, problem, inputs, tuned, variant or OURS)


def contestant(
    kernel: Kernel,
    problem: AttentionProblem,
    inputs: Arrays,
    tuned: bool,
    name: str = OURS,
) -> Contestant:
    """Return a compiled kernel as a contestant."""
    values = {one: inputs.get(one) for one in ("query", "key", "value", "mask", "bias")}
    scalars = arguments.scalars(kernel.spec, problem)
    chosen = " ".join(f"{one}={value}" for one, value in kernel.parameters.items())
    return Contestant(
        name,
        f"{kernel.variant} {chosen}, {'tuned' if tuned else 'not tuned'}",
        lambda: kernel.run(problem, values, scalars),
    )


def find_kernel(
    problem: AttentionProblem,
    target: Target,
    database: Database | str | os.PathLike[str] | None = None,
    variant: str | None = None,
) -> tuple[Kernel, bool]:
    """Return the kernel that serves a problem, and whether it comes from a record.

    Raises
    ------
    Unsupported
        If a variant was asked for that cannot serve the problem.
    """
    if database is not None:
        with contextlib.suppress(RecordNotFound):
            kernel = api.build(problem, target, database, "error")
            if variant in (None, kernel.variant):
                return kernel, True
    if variant is None:
        return api.build(problem, target), False
    # A variant without a group joins the first batch, in the order in which it is named.
    kernel = api.build(problem, target, policy=Policy(f"only {variant}", (variant,), ()))
    if kernel.variant != variant:
        raise Unsupported(
            f"The variant {variant!r} cannot serve {problem}, or is unknown; see attentune plan."
        )
    return kernel, False


def tvm_lowering(
    problem: AttentionProblem, inputs: Arrays, target: Target, threads: int = 1
) -> Contestant:
    """Return TVM's own lowering of the same call.

    Its layout is ``[batch, seq, heads, dim]``, and heads that share keys are given keys of their
    own, since it pairs them in another order; both is done beforehand. Masks are given to it as a
    bias.

    Raises
    ------
    Unavailable
        If it has no such option, or computes something else.
    """
    import tvm
    from tvm import relax

    p = problem
    if p.softcap is not None or p.window is not None:
        what = "softcap" if p.softcap is not None else "window"
        raise Unavailable(f"its lowering has no {what}")
    if p.is_causal and p.causal_alignment == "bottom_right" and p.seq_q > p.seq_kv:
        raise Unavailable("its BottomRight is another diagonal where there are more queries")
    arrays = {name: inputs[name] for name in ("query", "key", "value")}
    for name in ("key", "value"):
        arrays[name] = np.repeat(arrays[name], p.group, axis=1)
    given = [np.ascontiguousarray(one.swapaxes(1, 2)) for one in arrays.values()]
    added = _added(p, inputs)
    if added is not None:
        given.append(added.astype(given[0].dtype))

    variables = [
        relax.Var(name, relax.TensorType(one.shape, p.dtype))
        for name, one in zip(("query", "key", "value", "bias"), given, strict=False)
    ]
    causal = None
    if p.is_causal:
        causal = "BottomRight" if p.causal_alignment == "bottom_right" else "TopLeft"
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        call = relax.op.nn.attention(*variables, scale=p.scale, causal_mask=causal)
        builder.emit_func_output(builder.emit(call))
    compiled = tvm.compile(builder.finalize(), target=target.to_tvm())
    machine = relax.VirtualMachine(compiled, tvm.cpu())
    # Its code relies on TVM's alignment, which NumPy's arrays do not have.
    tensors = [tvm.runtime.tensor(one) for one in given]
    function = machine["main"]
    op = "attention" if added is None else "attention_bias"
    return Contestant(
        "tvm",
        f"relax.op.nn.{op} through LegalizeOps and tvm.compile, layout [B, S, H, D]",
        lambda: function(*tensors),
        lambda out: to_numpy(out).swapaxes(1, 2),
    )


def _added(problem: AttentionProblem, inputs: Arrays) -> np.ndarray[Any, Any] | None:
    """Return mask and bias as one array that is added to the scores."""
    mask, bias = inputs.get("mask"), inputs.get("bias")
    if mask is None:
        return bias
    hidden = MASKED[problem.dtype]
    return np.where(mask, 0.0 if bias is None else bias.astype(np.float32), hidden)


def _torch(problem: AttentionProblem, inputs: Arrays, target: Target, threads: int) -> Contestant:
    """Return PyTorch's attention with the backend that it chooses."""
    return _scaled_dot_product(problem, inputs, threads, "torch")


def _math(problem: AttentionProblem, inputs: Arrays, target: Target, threads: int) -> Contestant:
    """Return PyTorch's attention with scores materialized."""
    return _scaled_dot_product(problem, inputs, threads, "math")


def _scaled_dot_product(
    problem: AttentionProblem, inputs: Arrays, threads: int, name: str
) -> Contestant:
    try:
        import torch
    except ModuleNotFoundError:
        raise Unavailable("PyTorch is not installed; pip install attentune[torch]") from None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    p = problem
    if p.softcap is not None:
        raise Unavailable("it has no softcap")
    torch.set_num_threads(threads)

    def tensor(array: np.ndarray[Any, Any]) -> Any:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    query, key, value = (tensor(inputs[one]) for one in ("query", "key", "value"))
    options: dict[str, Any] = {"scale": p.scale, "enable_gqa": p.group > 1}
    plain = p.seq_q == p.seq_kv and p.window is None and not {"mask", "bias"} & set(inputs)
    if p.is_causal and plain:
        options["is_causal"] = True
    else:
        mask = _visible(p, inputs)
        if "bias" in inputs:
            bias = tensor(inputs["bias"]).to(query.dtype)
            bias = bias if mask is None else bias.masked_fill(~torch.from_numpy(mask), -torch.inf)
            options["attn_mask"] = bias
        elif mask is not None:
            options["attn_mask"] = torch.from_numpy(mask)
    attention = torch.nn.functional.scaled_dot_product_attention
    said = [option for option in options if option != "scale" and options[option] is not False]
    backend = ["SDPBackend.MATH"] if name == "math" else []
    return Contestant(
        name,
        ", ".join(
            [f"scaled_dot_product_attention of PyTorch {torch.__version__}", *backend, *said]
        ),
        lambda: attention(query, key, value, **options),
        lambda out: out.to(torch.float32).numpy(),
        (lambda: sdpa_kernel(SDPBackend.MATH)) if name == "math" else contextlib.nullcontext,
    )


def _visible(problem: AttentionProblem, inputs: Arrays) -> np.ndarray[Any, Any] | None:
    """Return mask, diagonal and window as one boolean mask."""
    mask = inputs.get("mask")
    lower, upper = problem.bounds
    if lower is None and upper is None:
        return mask
    offset = np.arange(problem.seq_kv)[None, :] - np.arange(problem.seq_q)[:, None]
    seen = np.ones(offset.shape, bool)
    if lower is not None:
        seen &= offset >= lower
    if upper is not None:
        seen &= offset <= upper
    return seen if mask is None else seen & mask


BASELINES: dict[str, Callable[[AttentionProblem, Arrays, Target, int], Contestant]] = {
    "torch": _torch,
    "tvm": tvm_lowering,
    "math": _math,
}


def _dispatch(
    problem: AttentionProblem, inputs: Arrays, target: Target, job: Job
) -> dict[str, Any]:
    """Time `attention` against the bare function that it ends in.

    Returns
    -------
    dict
        problem, threads, variant, kernel_seconds and call_seconds (medians), and
        overhead_seconds: the median over the rounds of the difference of their medians.
    """
    from attentune.threads import use_cores

    kernel, _ = find_kernel(problem, target, job.database)
    shape = (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim)
    out = np.empty(shape, inputs["query"].dtype)
    bare = [
        *arguments.tensors(kernel.spec, problem, inputs, out),
        *arguments.scalars(kernel.spec, problem),
    ]
    function = kernel._run
    options: dict[str, Any] = {
        "mask": inputs.get("mask"),
        "bias": inputs.get("bias"),
        "is_causal": problem.is_causal,
        "causal_alignment": problem.causal_alignment,
        "window": problem.window,
        "scale": problem.scale,
        "softcap": problem.softcap,
        "precision": problem.precision,
        "target": str(target),
        "database": job.database,
    }
    arrays = [inputs[name] for name in ("query", "key", "value")]
    contestants = [
        Contestant("kernel", "the compiled function", lambda: function(*bare)),
        Contestant("call", "attentune.attention", lambda: api.attention(*arrays, **options)),
    ]
    for one in contestants:
        one.call()  # builds what it needs, and sets the threads
    use_cores(job.threads)
    timings = interleave(
        contestants,
        rounds=job.rounds,
        block_seconds=job.block_seconds,
        gap_seconds=job.gap_seconds,
    )
    rounds = zip(timings["call"].blocks, timings["kernel"].blocks, strict=True)
    return {
        "problem": str(problem),
        "threads": job.threads,
        "variant": kernel.variant,
        "kernel_seconds": timings["kernel"].seconds,
        "call_seconds": timings["call"].seconds,
        "overhead_seconds": statistics.median(
            statistics.median(call) - statistics.median(bare_call) for call, bare_call in rounds
        ),
    }


def main() -> int:
    """Run the job on the standard input, a line of JSON for each result."""
    output = sys.stdout
    # Whatever a library prints must not end up between the results.
    sys.stdout = sys.stderr
    try:
        for result in run_job(Job(**json.load(sys.stdin))):
            print(json.dumps(result), file=output, flush=True)
    except AttentuneError as error:
        print(json.dumps({"error": str(error)}), file=output, flush=True)
    except MemoryError:
        message = "The arrays of a problem do not fit in memory; choose a smaller one."
        print(json.dumps({"error": message}), file=output, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
