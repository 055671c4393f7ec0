"""TVM's thread pool, sized by the target and not pinned.

On its own TVM takes half of an x86 machine's logical cores and pins the calling thread to one of
them, for good: everything else in the process, PyTorch's threads among it, then shares that core.
"""

from __future__ import annotations

import os
from itertools import cycle, islice

_ANY_LISTED_CORE = -3  # TVM's affinity mode in which threads may run on every core of the list


def use_cores(count: int) -> None:
    """Let kernels that this thread calls run on a number of threads.

    Parameters
    ----------
    count : int
        Threads, the caller's among them.
    """
    import tvm_ffi

    os.environ.setdefault("TVM_BIND_THREADS", "0")
    listed = [str(core) for core in islice(cycle(range(available_cores())), count)]
    tvm_ffi.get_global_func("runtime.config_threadpool")(_ANY_LISTED_CORE, count, listed)


def available_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
