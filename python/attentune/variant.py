"""A variant: one way to compute attention, as a kernel with a schedule template."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from attentune.errors import InvalidParameters
from attentune.kernels.spec import KernelSpec
from attentune.key import AttentionKey
from attentune.target import Target

Parameters = Mapping[str, int]
Domains = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Variant:
    """One way to compute attention.

    A candidate is a variant with parameters. Structural parameters choose the kernel, schedule
    parameters what is done to it; both are named integers with finite domains, in which the first
    value is the one to take when nothing was measured.

    Attributes
    ----------
    name : str
        What plans, records and users call it.
    supports : Callable
        ``supports(key, target)`` gives None, or the reason why it cannot serve the key.
    structure : Callable
        ``structure(key, target)`` gives the domains of the structural parameters.
    space : Callable
        ``space(key, target, structure)`` gives the domains of the schedule parameters.
    kernel : Callable
        ``kernel(spec, structure)`` gives the unscheduled PrimFunc with symbolic extents.
    schedule : Callable
        ``schedule(sch, spec, target, parameters)`` applies the template. Schedule parameters are
        integers, or MetaSchedule's random variables while a space is being described.
    workspace : Callable
        ``workspace(problem, target, parameters)`` gives the bytes it needs beside its tensors.
    allows : Callable
        ``allows(key, target, parameters)`` says whether a point of the product of the domains is
        a candidate at all.
    """

    name: str
    supports: Callable[[AttentionKey, Target], str | None]
    structure: Callable[[AttentionKey, Target], Domains]
    space: Callable[[AttentionKey, Target, Parameters], Domains]
    kernel: Callable[[KernelSpec, Parameters], Any]
    schedule: Callable[[Any, KernelSpec, Target, Mapping[str, Any]], None]
    workspace: Callable[[Any, Target, Parameters], int]
    allows: Callable[[AttentionKey, Target, Parameters], bool] = field(
        default=lambda key, target, parameters: True
    )

    def structures(self, key: AttentionKey, target: Target) -> tuple[dict[str, int], ...]:
        """Return every combination of structural parameters, the default first."""
        return tuple(_points(self.structure(key, target)))

    def defaults(self, key: AttentionKey, target: Target) -> dict[str, int]:
        """Return the parameters to take when nothing was measured."""
        for structure in self.structures(key, target):
            for point in self.points(key, target, structure):
                return point
        raise InvalidParameters(
            f"{self.name} has no candidate for {key}; use another variant for this key."
        )

    def points(
        self, key: AttentionKey, target: Target, structure: Parameters
    ) -> Iterator[dict[str, int]]:
        """Yield all candidates of one structure, structural and schedule parameters together."""
        for point in _points(self.space(key, target, structure)):
            parameters = {**structure, **point}
            if self.allows(key, target, parameters):
                yield parameters

    def check(self, key: AttentionKey, target: Target, parameters: Parameters) -> dict[str, int]:
        """Return parameters that were checked against the domains.

        Raises
        ------
        InvalidParameters
            If a name is missing or unknown, or a value is not in its domain.
        """
        domains = dict(self.structure(key, target))
        self._check_values({n: v for n, v in parameters.items() if n in domains}, domains)
        structure = {name: parameters[name] for name in domains}
        space = self.space(key, target, structure)
        unknown = sorted(set(parameters) - set(domains) - set(space))
        if unknown:
            raise InvalidParameters(
                f"{self.name} has no parameter {unknown[0]!r}; it has "
                f"{', '.join([*domains, *space])}."
            )
        self._check_values({n: v for n, v in parameters.items() if n in space}, space)
        checked = {**structure, **{name: parameters[name] for name in space}}
        if not self.allows(key, target, checked):
            raise InvalidParameters(
                f"{self.name} does not allow {checked} together; tune the key anew."
            )
        return checked

    def _check_values(self, values: Parameters, domains: Domains) -> None:
        for name, domain in domains.items():
            if name not in values:
                raise InvalidParameters(
                    f"{self.name} needs the parameter {name}, one of {list(domain)}."
                )
            if values[name] not in domain:
                raise InvalidParameters(
                    f"{self.name}'s parameter {name} is {values[name]!r}; it must be one of "
                    f"{list(domain)}."
                )

    def scheduled(self, key: AttentionKey, target: Target, parameters: Parameters) -> Any:
        """Return the symbolic kernel of a key with the template applied, as an IRModule."""
        from tvm.s_tir import Schedule

        spec = KernelSpec.from_key(key)
        checked = self.check(key, target, parameters)
        schedule = Schedule(self.kernel(spec, checked))
        self.schedule(schedule, spec, target, checked)
        return schedule.mod

    def fingerprint(self) -> str:
        """Return a digest of the sources that a candidate's code comes from."""
        return _fingerprint(self.schedule)


@cache
def _fingerprint(schedule: Callable[..., Any]) -> str:
    import attentune.compile
    import attentune.kernels
    import attentune.vector_math

    digest = hashlib.sha256()
    modules = [attentune.compile, attentune.vector_math]
    files = sorted(Path(attentune.kernels.__file__).parent.glob("*.py"))
    files += [Path(inspect.getfile(module)) for module in modules]
    files += _sources(schedule)
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _points(domains: Domains) -> Iterator[dict[str, int]]:
    for values in product(*domains.values()):
        yield dict(zip(domains, values, strict=True))


def _sources(function: Callable[..., Any]) -> Sequence[Path]:
    """Return the file of a schedule, and those beside it that it imports, as ``common``."""
    found: list[Path] = []
    waiting = [sys.modules[function.__module__]]
    while waiting:
        module = waiting.pop()
        file = Path(inspect.getfile(module))
        if file not in found:
            found.append(file)
            waiting += [
                value
                for value in vars(module).values()
                if inspect.ismodule(value)
                and Path(getattr(value, "__file__", None) or "").parent == file.parent
            ]
    return sorted(found)
