"""TVM's thread pool, sized by the target and not pinned.

On its own TVM takes half of an x86 machine's logical cores and pins the calling thread to one of
them, for good: everything else in the process, PyTorch's threads among it, then shares that core.
"""

from __future__ import annotations

import os
import threading
from itertools import cycle, islice

_this_thread = threading.local()
_ANY_LISTED_CORE = -3  # TVM's affinity mode in which threads may run on every core of the list


def use_cores(count: int) -> None:
    """Let kernels that this thread calls run on a number of threads.

    Parameters
    ----------
    count : int
        Threads, the caller's among them.
    """
    import tvm_ffi

    _this_thread.count = count
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    listed = [str(core) for core in islice(cycle(range(available_cores())), count)]
    tvm_ffi.get_global_func("runtime.config_threadpool")(_ANY_LISTED_CORE, count, listed)


def ensure_cores(count: int) -> None:
    """Do so where nobody has for this thread: TVM keeps a pool for each thread that calls."""
    if not hasattr(_this_thread, "count"):
        use_cores(count)


def available_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
