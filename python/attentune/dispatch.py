"""From a key to a kernel: its record, or a heuristic, compiled once and kept."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from attentune.call import CallableKernel, Caller
from attentune.compile import compile_module
from attentune.database import Database
from attentune.errors import (
    AttentuneError,
    InvalidParameters,
    RecordNotFound,
    Unsupported,
)
from attentune.group import Policy
from attentune.kernels.spec import KernelSpec
from attentune.key import AttentionKey
from attentune.plan import make_plan, memory_budget
from attentune.problem import AttentionProblem
from attentune.record import Record, stale_reason
from attentune.target import Target
from attentune.threads import use_cores
from attentune.variant import Variant
from attentune.versions import current_versions

logger = logging.getLogger("attentune.dispatch")

ON_MISS = ("heuristic", "tune", "error")
LAST_RESORT = "flash_unit"


class Kernel(CallableKernel):
    """A candidate that was compiled here.

    Parameters
    ----------
    key : AttentionKey
        What it serves.
    target : Target
        What it is compiled for.
    variant : Variant
        Its variant.
    parameters : Mapping
        Its parameters.
    problem : AttentionProblem, optional
        Where scale, cap and window come from when a call does not give them.
    """

    def __init__(
        self,
        key: AttentionKey,
        target: Target,
        variant: Variant,
        parameters: Mapping[str, int],
        problem: AttentionProblem | None = None,
    ) -> None:
        checked = variant.check(key, target, parameters)
        self._module = variant.scheduled(key, target, checked)
        self._built = compile_module(self._module, target)
        run = self._built["main"] if target.is_cpu else _refuse
        super().__init__(key, variant.name, checked, run, target.num_cores, problem)
        self.target = target
        self._variant = variant
        if target.is_cpu:
            use_cores(target.num_cores)

    @property
    def source(self) -> str:
        """The scheduled kernel as TVMScript."""
        return str(self._module.script())

    @property
    def assembly(self) -> str:
        """What became of it: a CPU's machine code as assembly, or CUDA C."""
        if self.target.is_cpu:
            return str(self._built.inspect_source("s"))
        return str(self._built.imports[0].inspect_source())

    def workspace(self, problem: AttentionProblem) -> int:
        """Return the bytes that a call needs beside its arrays."""
        return self._variant.workspace(problem, self.target, self._parameters)


def _refuse(*_arguments: Any) -> None:
    raise Unsupported(
        "Kernels for a GPU are generated here and not called; build one for 'native', or read its "
        "source or its assembly."
    )


class Dispatcher(Caller):
    """Chooses and keeps kernels for one target, database and miss policy.

    Parameters
    ----------
    target : Target
        What kernels are compiled for.
    variants : Mapping
        Variants by name, in the order of registration.
    policy : Policy
        Whose plan is followed where no record is.
    database : Database, optional
        Where records are looked up.
    on_miss : str
        "heuristic", "tune" or "error".
    tune : Callable, optional
        Tunes a problem and returns its record; needed for "tune".
    memory_bytes : int, optional
        What a kernel may take as workspace; a share of this machine's memory by default.
    extra : tuple of str
        Variants beside those that the policy names.
    """

    def __init__(
        self,
        target: Target,
        variants: Mapping[str, Variant],
        policy: Policy,
        database: Database | None = None,
        on_miss: str = "heuristic",
        tune: Callable[[AttentionProblem], Record] | None = None,
        memory_bytes: int | None = None,
        extra: tuple[str, ...] = (),
    ) -> None:
        if on_miss not in ON_MISS:
            raise InvalidParameters(
                f"on_miss is {on_miss!r}; it must be one of {', '.join(ON_MISS)}."
            )
        super().__init__(self._kernel_for)
        self.target = target
        self.variants = variants
        self.policy = policy
        self.database = database
        self.on_miss = on_miss
        self.memory_bytes = memory_bytes
        self.extra = extra
        self.steps: Counter[str] = Counter()
        self._tune = tune
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._lock = threading.RLock()

    def kernel_for_key(self, key: AttentionKey) -> Kernel:
        """Return the kernel of a key, for calls that bring their own scale, cap and window."""
        return self._choose(key, key.representative())

    def kernel(self, problem: AttentionProblem) -> Kernel:
        """Return the kernel that serves a problem, compiled.

        Raises
        ------
        RecordNotFound
            With ``on_miss="error"``, where the database has no record that is not stale.
        Unsupported
            Where no variant can serve the problem.
        """
        return self._kernel_for(problem).serving(problem=problem)

    def _kernel_for(self, problem: AttentionProblem) -> Kernel:
        return self._choose(AttentionKey.from_problem(problem), problem)

    def _choose(self, key: AttentionKey, problem: AttentionProblem) -> Kernel:
        with self._lock:
            for position, (name, parameters) in enumerate(self.candidates(key, problem)):
                try:
                    return self._launchable(key, problem, name, parameters)
                except (AttentuneError, RuntimeError) as error:
                    self.steps[f"{name}: {type(error).__name__}"] += 1
                    logger.warning(
                        "stepping down from candidate %d, %s, for %s: %s",
                        position, name, key, error,
                    )  # fmt: skip
        raise Unsupported(
            f"No variant can serve {problem} on {self.target.kind}; the log says why each was "
            "refused, and a variant of your own can be added."
        )

    def candidates(
        self, key: AttentionKey, problem: AttentionProblem
    ) -> list[tuple[str, Mapping[str, int] | None]]:
        """Return what to try in order: the record, its runners-up, the last resort.

        Parameters
        ----------
        key : AttentionKey
            What is to be served.
        problem : AttentionProblem
            One of its problems, whose memory the plan looks at where there is no record.

        Returns
        -------
        list of (str, Mapping or None)
            Variants with their parameters, None for the default ones.
        """
        record = self._record(key)
        if record is None and self.on_miss == "error":
            raise RecordNotFound(
                f"The database has no record for {key} on {self.target}; tune it, or pass "
                "on_miss='heuristic'."
            )
        if record is None and self.on_miss == "tune" and self._tune is not None:
            record = self._tune(problem)
        if record is not None:
            runners_up = sorted(
                (loser for loser in record.losers if loser.seconds is not None),
                key=lambda loser: loser.seconds or math.inf,
            )
            chain: list[tuple[str, Mapping[str, int] | None]] = [
                (record.variant, record.parameters)
            ]
            chain += [
                (loser.variant, loser.parameters)
                for loser in runners_up
                if loser.variant != record.variant
            ]
            return [*chain[:2], (LAST_RESORT, None)]
        plan = make_plan(problem, self.target, self.policy, self.extra, self.memory_bytes)
        supported = [
            name
            for batch in plan.batches
            for name in sorted(
                (one for one in batch if self._supports(one, key)),
                key=lambda one: self._default_workspace(one, key, problem),
            )
        ]
        return [*((name, None) for name in supported), (LAST_RESORT, None)]

    def _supports(self, name: str, key: AttentionKey) -> bool:
        variant = self.variants.get(name)
        return variant is not None and variant.supports(key, self.target) is None

    def _default_workspace(self, name: str, key: AttentionKey, problem: AttentionProblem) -> int:
        """Return what decides between variants that tie where nothing was measured: memory.

        As in a ranking within noise; names of equal memory stay in the plan's order.
        """
        variant = self.variants[name]
        return variant.workspace(problem, self.target, variant.defaults(key, self.target))

    def _record(self, key: AttentionKey) -> Record | None:
        if self.database is None:
            return None
        fingerprints = {name: v.fingerprint() for name, v in self.variants.items()}
        return self.database.get(
            key,
            str(self.target),
            stale=lambda record: stale_reason(record, fingerprints, current_versions()),
        )

    def _launchable(
        self,
        key: AttentionKey,
        problem: AttentionProblem,
        name: str,
        parameters: Mapping[str, int] | None,
    ) -> Kernel:
        variant = self.variants.get(name)
        if variant is None:
            raise Unsupported(f"{name} is not among the variants of this version")
        reason = variant.supports(key, self.target)
        if reason is not None:
            raise Unsupported(f"{name} is unsupported: {reason}")
        chosen = variant.defaults(key, self.target) if parameters is None else parameters
        needed = variant.workspace(problem, self.target, chosen)
        allowed = memory_budget() if self.memory_bytes is None else self.memory_bytes
        if needed > allowed:
            raise Unsupported(f"{name} needs {needed} bytes of workspace, and {allowed} are free")
        identity = (name, KernelSpec.from_key(key), tuple(sorted(chosen.items())))
        if identity not in self._kernels:
            self._kernels[identity] = Kernel(key, self.target, variant, chosen)
        return self._kernels[identity].serving(key=key)
