"""What this machine can do at best, measured once and kept.

Two kernels: multiply-adds that never leave the registers, and a sum over more memory than any
cache holds. Together with the launch of an empty one they take well under a second.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tvm.s_tir import Schedule

from attentune.compile import compile_module
from attentune.kernels.probes import multiply_add, stream
from attentune.search.inputs import aligned
from attentune.search.roofline import Peaks
from attentune.target import Target
from attentune.threads import use_cores
from attentune.versions import machine_name

STEPS = 1 << 17  # multiply-adds that each accumulator takes
CHAINS = 12  # independent accumulators, enough to hide the latency on any CPU so far
STREAM_BYTES = 1 << 27  # a multiple of any last-level cache that tuning meets
REPEATS = 5


def measure(target: Target) -> Peaks:
    """Measure a CPU's peaks: float32 multiply-adds, reading memory, launching a kernel.

    Parameters
    ----------
    target : Target
        The CPU, its features and cores.
    """
    lanes, tasks = target.vector_bytes // 4, target.num_cores
    use_cores(tasks)
    halves = aligned(np.full(lanes, 0.5, np.float32))
    sums = aligned(np.empty((tasks, CHAINS, lanes), np.float32))
    shape = {"tasks": tasks, "chains": CHAINS, "lanes": lanes}
    add = _compiled(multiply_add(steps=STEPS, **shape), target)
    add_seconds = _best(lambda: add(halves, sums))
    steps = STREAM_BYTES // (tasks * CHAINS * lanes * 4)
    memory = aligned(np.ones((tasks, steps, CHAINS, lanes), np.float32))
    read = _compiled(stream(steps=steps, **shape), target)
    read_seconds = _best(lambda: read(memory, sums))
    nothing = _compiled(multiply_add(steps=0, **shape), target)
    launch_seconds = _best(lambda: nothing(halves, sums))
    return Peaks(
        flops_per_second=2 * tasks * STEPS * CHAINS * lanes / add_seconds,
        bytes_per_second=tasks * steps * CHAINS * lanes * 4 / read_seconds,
        launch_seconds=launch_seconds,
    )


def machine_peaks(target: Target) -> Peaks:
    """Return this machine's peaks, measured at the first call on it and kept in a file.

    The file lies below ``$XDG_CACHE_HOME``, or ``~/.cache``; one that cannot be read is measured
    anew and replaced.
    """
    path = _cache_path()
    name = f"{machine_name()} {target}"
    known = _read(path)
    if name in known:
        return Peaks(**known[name])
    peaks = measure(target)
    known[name] = asdict(peaks)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{os.getpid()}-{path.name}")
    partial.write_text(json.dumps(known, indent=2, sort_keys=True))
    os.replace(partial, path)
    return peaks


def _cache_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "attentune" / "peaks.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return known if isinstance(known, dict) else {}


def _compiled(func: Any, target: Target) -> Any:
    schedule = Schedule(func)
    schedule.parallel(schedule.get_loops(schedule.get_sblock("task"))[0])
    return compile_module(schedule.mod, target)["main"]


def _best(call: Callable[[], Any]) -> float:
    """Return the least of a few times: a peak is what the machine can do undisturbed."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
