"""An exported library, loaded and called without the compiler."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attentune import manifest as manifests
from attentune.call import CallableKernel, Caller
from attentune.errors import CorruptLibrary, RecordNotFound, Unsupported, UnsupportedMachine
from attentune.key import AttentionKey
from attentune.manifest import Choice, Entry, Manifest
from attentune.plan import memory_budget
from attentune.problem import AttentionProblem
from attentune.runtime import load_runtime
from attentune.target import native
from attentune.threads import available_cores, use_cores

logger = logging.getLogger("attentune.library")

ON_MISS = ("heuristic", "error")
# Workspace that is granted without asking how much memory is free, which takes longer than a call.
GRANTED_BYTES = 1 << 26


class Library(Mapping[AttentionKey, CallableKernel]):
    """Kernels by key, callable like `attentune.attention`.

    It may be called from many threads at once. Use `attentune.load_library`.

    Parameters
    ----------
    path : path
        The library's file.
    threads : int, optional
        Threads of a call, this process's cores by default.
    on_miss : str
        What a call does whose key the library lacks: "heuristic" takes the nearest key's kernel,
        "error" raises.
    memory_bytes : int, optional
        What a kernel may take as workspace; a share of the free memory by default.

    Attributes
    ----------
    path : Path
        The library's file.
    manifest : Manifest
        What it holds.
    steps : Counter
        How often a choice was not the key's first kernel, by reason.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        threads: int | None = None,
        on_miss: str = "heuristic",
        memory_bytes: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.manifest = manifests.read(self.path)
        check_machine(self.manifest, self.path)
        self.on_miss = on_miss
        self.memory_bytes = memory_bytes
        self.steps: Counter[str] = Counter()
        self._cores = threads or available_cores()
        self._codes = {code.symbol: code for code in self.manifest.codes}
        self._functions = self._load()
        self._keys = {
            entry.key: self._kernel(entry.key, entry.choices[0]) for entry in self.manifest.entries
        }
        use_cores(self._cores)
        self._call = Caller(self._choose)

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        bias: Any = None,
        is_causal: bool = False,
        causal_alignment: str = "bottom_right",
        window: Sequence[int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: str = "strict",
        out: Any = None,
    ) -> Any:
        """Compute attention, as `attentune.attention` does.

        Parameters
        ----------
        query, key, value, mask, bias, is_causal, causal_alignment, window, scale, softcap, precision
            As `attentune.attention` takes them.
        out : array, optional
            Where the result goes; allocated by default.

        Returns
        -------
        array
            ``[batch, q_heads, seq_q, value_dim]``, of the query's kind and type.

        Raises
        ------
        InvalidProblem, UnsupportedArray
            If arrays and options do not fit together.
        RecordNotFound
            If no kernel of the library serves the call.
        """  # noqa: E501 - numpydoc wants the names of one entry on one line
        return self._call(
            query, key, value, mask, bias,
            is_causal, causal_alignment, window, scale, softcap, precision, out=out,
        )  # fmt: skip

    def __getitem__(self, key: AttentionKey) -> CallableKernel:
        return self._keys[key]

    def __iter__(self) -> Iterator[AttentionKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<attentune library {self.path} with {len(self)} keys>"

    def kernel(self, problem: AttentionProblem) -> CallableKernel:
        """Return the kernel that serves a problem.

        Raises
        ------
        RecordNotFound
            If the library has none.
        """
        return self._choose(problem).serving(problem=problem)

    def _load(self) -> dict[str, Any]:
        load_runtime()
        import tvm_ffi

        try:
            module = tvm_ffi.load_module(str(self.path.resolve()))
        except Exception as error:  # whatever the FFI makes of the system's loader
            raise CorruptLibrary(
                f"The library {self.path} cannot be loaded ({' '.join(str(error).split())}); "
                "export it anew on this system."
            ) from None
        for symbol in self._codes:
            if not module.implements_function(symbol):
                raise CorruptLibrary(
                    f"The library {self.path} lacks the kernel {symbol} that its manifest names; "
                    "export it anew."
                )
        return {symbol: module.get_function(symbol) for symbol in self._codes}

    def _kernel(self, key: AttentionKey, choice: Choice) -> CallableKernel:
        code = self._codes[choice.symbol]
        function = self._functions[choice.symbol]
        return CallableKernel(key, code.variant, code.parameters, function, self._cores)

    def _choose(self, problem: AttentionProblem) -> CallableKernel:
        key = AttentionKey.from_problem(problem, self.manifest.level)
        found = self.manifest.choose(key)
        if found is None or (self.on_miss == "error" and not found[1]):
            raise RecordNotFound(
                f"The library {self.path} has no kernel for {key}; export one for this key."
            )
        entry, own = found
        if not own:
            self._step("miss", f"{key} is not in {self.path}; {entry.key} serves it")
        for choice in entry.choices:
            if self._fits(choice, entry, problem):
                return self._kernel(entry.key, choice)
            self._step(
                f"{self._codes[choice.symbol].variant}: memory",
                f"{choice.symbol} needs more workspace for {problem} than is free",
            )
        raise Unsupported(
            f"No kernel of {self.path} has the memory that {problem} needs; free some, or raise "
            "memory_bytes."
        )

    def _fits(self, choice: Choice, entry: Entry, problem: AttentionProblem) -> bool:
        needed = workspace(choice, entry, problem)
        if self.memory_bytes is None and needed <= GRANTED_BYTES:
            return True
        return needed <= (memory_budget() if self.memory_bytes is None else self.memory_bytes)

    def _step(self, reason: str, message: str) -> None:
        self.steps[reason] += 1
        if self.steps[reason] == 1:
            logger.warning("stepping down (%s): %s", reason, message)


def workspace(choice: Choice, entry: Entry, problem: AttentionProblem) -> int:
    """Return the bytes that a kernel needs for a problem beside its tensors."""
    scores = problem.batch * problem.q_heads * problem.seq_q * problem.seq_kv
    return choice.fixed_bytes + -(-choice.bytes * scores // max(entry.scores, 1))


def check_machine(manifest: Manifest, path: Path) -> None:
    """Check that a library's code runs on this machine.

    Raises
    ------
    UnsupportedMachine
        Naming the instruction set, or the features that are missing.
    """
    here = native()
    if manifest.arch != here.arch:
        raise UnsupportedMachine(
            f"The library {path} is for {manifest.arch}, and this machine is {here.arch}; export "
            "one for this machine."
        )
    missing = sorted(set(manifest.cpu_flags) - here.cpu_flags)
    if missing:
        raise UnsupportedMachine(
            f"The library {path} needs the CPU features {', '.join(missing)}, which this CPU "
            "lacks; export one for this CPU."
        )
