"""Groups of variants, and the policies that give them priorities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from attentune.errors import InvalidPolicy
from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.target import Target


@dataclass(frozen=True)
class Context:
    """What a priority may depend on.

    Parameters
    ----------
    key : AttentionKey
        What is planned for.
    target : Target
        What it would run on.
    memory_bytes : int
        What materialized scores may take.
    problem : AttentionProblem, optional
        The exact call, where there is one.
    """

    key: AttentionKey
    target: Target
    memory_bytes: int
    problem: AttentionProblem | None = None

    @cached_property
    def score_bytes(self) -> int:
        """Bytes of all scores in float32: of the call where it is known, else of the key."""
        if self.problem is not None:
            p = self.problem
            return 4 * p.batch * p.q_heads * p.seq_q * p.seq_kv
        return 4 * self.key.total_batches * self.key.seq_q * self.key.seq_kv


Priority = Callable[[Context], int]


def always(priority: int) -> Priority:
    """Return a priority that depends on nothing."""
    return lambda context: priority


@dataclass(frozen=True)
class Group:
    """A named set of variants with a priority.

    Parameters
    ----------
    name : str
        For people.
    priority : Callable
        Gives the group's priority; a negative one drops the group.
    members : tuple of (str, Callable)
        Names of variants, each with its priority inside the group; a negative one drops the
        variant for that key, whatever other groups it is in.
    """

    name: str
    priority: Priority
    members: tuple[tuple[str, Priority], ...]


@dataclass(frozen=True)
class Policy:
    """Which variants are tried, and in which order.

    Parameters
    ----------
    name : str
        For people and records.
    variants : tuple of str
        The variants that it knows, in the order that breaks ties.
    groups : tuple of Group
        Their groups. A variant without a group joins the first batch.

    Raises
    ------
    InvalidPolicy
        If a name occurs twice.
    """

    name: str
    variants: tuple[str, ...]
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        for what, names in (
            ("variant", self.variants),
            ("group", [group.name for group in self.groups]),
        ):
            twice = next((name for name in names if list(names).count(name) > 1), None)
            if twice is not None:
                raise InvalidPolicy(
                    f"The policy {self.name!r} names the {what} {twice!r} twice; name it once."
                )
