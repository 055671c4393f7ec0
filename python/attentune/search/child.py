"""A child process that runs candidates: they may crash, hang or take all memory.

The process that a candidate brings down is started again for the next one, and so is one in which
a candidate failed in any other way: TVM's pools keep what they had allocated, and the next
candidate must not pay for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tvm.support.popen_pool import PopenWorker, kill_child_processes

from attentune.interrupt import uninterrupted
from attentune.search.failure import Failure, classify


class CandidateFailed(Exception):
    """A candidate failed in its child process; ``failure`` says how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Child:
    """A child process, started at its first call.

    Parameters
    ----------
    memory_bytes : int, optional
        Address space that it may use.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        self.restarts = 0
        self._process = _Worker(initializer=limit_memory, initargs=(memory_bytes,))

    def call(
        self, stage: str, seconds: float, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Return what a function returns in the child.

        Parameters
        ----------
        stage : str
            Class of a failure that is of no other class; see `failure.classify`.
        seconds : float
            Time after which the call counts as hung, without that for the start of the process.
        function : Callable
            Of a module that the child can import.
        *arguments
            Of the function.

        Raises
        ------
        CandidateFailed
            Where it raised, crashed or hung. The process is gone then, with all it held.
        """
        try:
            self._process.send(function, arguments, timeout=seconds)
            return self._process.recv()
        except TimeoutError:
            failure = Failure("timeout", f"it took longer than {seconds:g} s")
        except ChildProcessError:
            failure = Failure("crash", "it brought its process down")
        except Exception as error:  # whatever a candidate raised in the child
            failure = classify(f"{type(error).__name__}: {error}", stage)
        self.restart()
        raise CandidateFailed(failure)

    def restart(self) -> None:
        """Have the next call start a new process."""
        self.restarts += 1
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        with uninterrupted():
            self._process.kill()


class _Worker(PopenWorker):
    """A worker whose process is not lost to a Ctrl-C between its start and its being noted."""

    def _start(self) -> None:
        with uninterrupted():
            super()._start()


def stop(worker: PopenWorker) -> None:
    """Kill the process of a worker that another thread uses, and leave the rest to that thread.

    Closing its pipes would wait for the thread, which waits for a build to end; and the thread may
    just be starting the process, before there are any pipes.
    """
    process = worker._proc
    if process is not None:
        kill_child_processes(process.pid)
        process.kill()


def limit_memory(memory_bytes: int | None) -> None:
    """Keep this process, a child, from taking more address space than it was given."""
    if memory_bytes is None or sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
