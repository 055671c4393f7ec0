"""The plan: the batches of variants to try for a key, best hopes first.

A pure function of the key, the target and the policy. A later batch is only tried when every
candidate of the earlier ones failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attentune.errors import InvalidPolicy
from attentune.group import Context, Group, Policy, Priority
from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.target import Target

# Materialized scores may take this share of the memory that is free.
MEMORY_SHARE = 4
Batches = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plan:
    """What would be tried.

    Parameters
    ----------
    key : AttentionKey
        For what.
    target : Target
        On what.
    policy : str
        By which policy.
    batches : tuple of tuples of str
        Names of variants; one batch is tried at a time.
    dropped : tuple of str
        Variants that a negative priority, their own or their only groups', took out.
    """

    key: AttentionKey
    target: Target
    policy: str
    batches: Batches
    dropped: tuple[str, ...] = ()


def merge(groups: Sequence[Group], variants: Iterable[str], context: Context) -> Batches:
    """Return the batches that groups give.

    Groups are merged by the value of their priority, highest first; inside one value variants are
    ordered by their own priority, highest first, and those that tie are one batch. A negative
    priority drops a variant. A variant in several groups is emitted once, where it comes first. A
    variant in no group joins the first batch.

    Parameters
    ----------
    groups : sequence of Group
        The groups, in any order.
    variants : iterable of str
        What there is, in the order that breaks ties.
    context : Context
        What priorities depend on.

    Raises
    ------
    InvalidPolicy
        If a priority is not an integer.
    """
    order = list(dict.fromkeys(variants))
    dropped = _dropped(groups, context)
    batches: dict[tuple[int, int], set[str]] = {}
    grouped: set[str] = set()
    for group in groups:
        priority = _priority(group.priority, context, f"group {group.name!r}")
        for name, own in group.members:
            grouped.add(name)
            if priority >= 0 and name in order and name not in dropped:
                rank = (priority, _priority(own, context, f"variant {name!r}"))
                batches.setdefault(rank, set()).add(name)
    result: list[tuple[str, ...]] = []
    emitted: set[str] = set()
    for rank in sorted(batches, reverse=True):
        batch = tuple(n for n in order if n in batches[rank] and n not in emitted)
        emitted.update(batch)
        if batch:
            result.append(batch)
    free = {name for name in order if name not in grouped}
    if free:
        first = free | set(result[0] if result else ())
        result[:1] = [tuple(name for name in order if name in first)]
    return tuple(result)


def make_plan(
    problem_or_key: AttentionProblem | AttentionKey,
    target: Target,
    policy: Policy,
    variants: Sequence[str] = (),
    memory_bytes: int | None = None,
) -> Plan:
    """Return the plan for a problem or key.

    Parameters
    ----------
    problem_or_key : AttentionProblem or AttentionKey
        With a problem, rules on memory look at its own extents, not at its bucket's.
    target : Target
        What it would run on.
    policy : Policy
        Which variants, in which order.
    variants : sequence of str
        Further variants, after the policy's.
    memory_bytes : int, optional
        What materialized scores may take; a share of the memory that is free by default.
    """
    problem = problem_or_key if isinstance(problem_or_key, AttentionProblem) else None
    key = (
        problem_or_key
        if isinstance(problem_or_key, AttentionKey)
        else AttentionKey.from_problem(problem_or_key)
    )
    budget = memory_budget() if memory_bytes is None else memory_bytes
    context = Context(key, target, budget, problem)
    known = tuple(dict.fromkeys((*policy.variants, *variants)))
    batches = merge(policy.groups, known, context)
    emitted = {name for batch in batches for name in batch}
    dropped = tuple(name for name in known if name not in emitted)
    return Plan(key, target, policy.name, batches, dropped)


def memory_budget() -> int:
    """Return the bytes that materialized scores may take on this machine now."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 // MEMORY_SHARE
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MEMORY_SHARE
    return 1 << 30


def _dropped(groups: Sequence[Group], context: Context) -> set[str]:
    return {
        name
        for group in groups
        for name, own in group.members
        if _priority(own, context, f"variant {name!r}") < 0
    }


def _priority(priority: Priority, context: Context, whose: str) -> int:
    value = priority(context)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidPolicy(f"The priority of {whose} is {value!r}; it must be an integer.")
    return value
