"""Ctrl-C: a command ends at once, with no child process left and no traceback.

A signal that arrives while TVM computes would be taken for a candidate's error, or wait for the
computation; and the children, who get it too, would each print a traceback. So the signal is
blocked, which children inherit, and a thread of its own waits for it.

A call of the library ends with `KeyboardInterrupt`, as calls do; see `kept_apart`.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

EXIT_CODE = 130  # what shells expect of a program that Ctrl-C ended
GRACE_SECONDS = 1.0


def end_children() -> None:
    """Kill all processes that this one started, and theirs."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


class Interruption:
    """Whether Ctrl-C was pressed, and what has to happen then.

    Parameters
    ----------
    message : str
        The line to end with.
    scratch : str, optional
        A folder to remove.
    """

    def __init__(self, message: str, scratch: str | None = None) -> None:
        self.message = message
        self.scratch = scratch
        self._asked = threading.Event()
        self._finishing = threading.Lock()

    @property
    def asked(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._asked.is_set()

    def begin(self) -> None:
        """Stop the children, so that nobody waits for them, and give the program a moment."""
        if not self._asked.is_set():
            self._asked.set()
            threading.Thread(target=self._press, daemon=True).start()

    def _press(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            end_children()  # again and again: a search starts new ones for those that died
            time.sleep(0.02)
        self.finish()

    def finish(self) -> None:
        """End the process: waiting for threads, as Python does, could take minutes."""
        self._finishing.acquire()  # and never released: whoever comes second waits for the end
        end_children()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a progress bar hides the cursor
        sys.stderr.write(f"{self.message}\n")
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(EXIT_CODE)


@contextlib.contextmanager
def interruptible(message: str) -> Iterator[Interruption]:
    """Watch for Ctrl-C while the block runs, and end the process with one line if it comes.

    Parameters
    ----------
    message : str
        The line to end with.
    """
    with _scratch() as scratch:
        watch = Interruption(message, scratch)
        with _watched(watch):
            yield watch


@contextlib.contextmanager
def kept_apart() -> Iterator[Callable[[], bool]]:
    """Yield whether Ctrl-C was pressed, and let nothing else than `KeyboardInterrupt` come of it.

    What is raised inside a callback of TVM leaves it as an error of some other class, or is taken
    for a candidate's failure.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: False
        return
    pressed = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        if _put_off:
            _put_off[-1] = True
        else:
            before(number, frame)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: pressed
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


# For each `uninterrupted` block that the main thread is in, whether Ctrl-C was pressed.
_put_off: list[bool] = []


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within `kept_apart`, put Ctrl-C off until the block ends.

    A process that was started and not noted, or one of several that are being ended, would stay.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals interrupt the main thread alone
        return
    _put_off.append(False)
    try:
        yield
    finally:
        pressed = _put_off.pop()
        if pressed and _put_off:
            _put_off[-1] = True
    if pressed and not _put_off:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """Give this process and its children a folder of their own for temporary files.

    Candidates that are killed leave their files behind.
    """
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="attentune-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"], tempfile.tempdir = folder, None
        try:
            yield folder
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
            tempfile.tempdir = None


@contextlib.contextmanager
def _watched(watch: Interruption) -> Iterator[None]:
    waits = hasattr(signal, "pthread_sigmask") and hasattr(signal, "sigwait")
    if threading.current_thread() is not threading.main_thread() or not waits:
        yield
        return

    def on_signal(_number: int, _frame: Any) -> None:
        watch.begin()
        raise KeyboardInterrupt

    def wait() -> None:
        while signal.sigwait({signal.SIGINT, signal.SIGUSR1}) == signal.SIGINT:
            watch.begin()
            _thread.interrupt_main()

    before = signal.signal(signal.SIGINT, on_signal)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    try:
        yield
    except BaseException:
        if watch.asked:
            watch.finish()
        raise
    finally:
        signal.pthread_kill(waiter.ident or 0, signal.SIGUSR1)
        waiter.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
