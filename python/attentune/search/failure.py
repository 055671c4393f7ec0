"""Why a candidate lost, told from what its child process said."""

from __future__ import annotations

from dataclasses import dataclass

_SIGNS = (
    ("timeout", ("timeout", "timed out")),
    ("memory", ("memoryerror", "bad_alloc", "out of memory", "cannot allocate")),
    ("crash", ("subprocess terminated",)),
)


@dataclass(frozen=True)
class Failure:
    """A class of failure, as records name it, and what happened, for a person."""

    outcome: str
    reason: str

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}"


def classify(message: str, otherwise: str) -> Failure:
    """Return the failure that an error message of a child process speaks of.

    Parameters
    ----------
    message : str
        All of it; the reason is its last line that says something.
    otherwise : str
        The class where the message gives no other: the stage that failed.
    """
    stated, _, reason = message.partition(": ")
    if stated in {name for name, _ in _SIGNS}:  # a `Failure` that was made into text
        return Failure(stated, reason)
    lowered = message.lower()
    outcome = next(
        (name for name, signs in _SIGNS if any(sign in lowered for sign in signs)), otherwise
    )
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return Failure(outcome, lines[-1] if lines else "no message")
