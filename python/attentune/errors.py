"""One class per cause; each message says what is wrong, the value, and what to do.

Examples
--------
>>> import attentune
>>> try:
...     attentune.plan("1,8,8,64,64,64,64:float32", policy="defualt")
... except attentune.errors.AttentuneError as error:
...     print(f"{type(error).__name__}: {error}")
UnknownName: There is no policy 'defualt'; did you mean 'default'?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AttentuneError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidProblem(AttentuneError, ValueError):
    """A problem, or the arrays of a call, do not fit together."""


class InvalidKey(AttentuneError, ValueError):
    """A text is not an attention key, or a level of anchoring is unknown."""


class InvalidTarget(AttentuneError, ValueError):
    """A target is unknown or incomplete."""


class InvalidParameters(AttentuneError, ValueError):
    """A parameter of a candidate, or of a call to the engine, is not allowed."""


class InvalidPolicy(AttentuneError, ValueError):
    """A policy or group is not well formed."""


class UnknownName(AttentuneError, LookupError):
    """There is no model, policy or variant of a name."""


class UnsupportedArray(AttentuneError, TypeError):
    """An array is of a kind, or on a device, that cannot be used."""


class Unsupported(AttentuneError):
    """No variant can serve a problem here, or one that was asked for cannot."""


class RecordNotFound(AttentuneError, LookupError):
    """The database has no usable record, and the caller asked for one."""


class IncompatibleVersions(AttentuneError, ImportError):
    """TVM and its FFI are missing or not the pair that works together."""


class DatabaseError(AttentuneError):
    """A database cannot be used."""


class CorruptDatabase(DatabaseError):
    """A database file is damaged."""


class CorruptRecord(DatabaseError, ValueError):
    """A record's data is not what the schema says."""


class ForeignDatabase(DatabaseError):
    """A file is not a database of this package."""


class FullDatabase(DatabaseError):
    """There is no room for another record."""


class NewerSchema(DatabaseError):
    """A database was written by a later version."""


class ReadOnlyDatabase(DatabaseError):
    """A database cannot be written."""


class LibraryError(AttentuneError):
    """An exported library cannot be used."""


class LibraryNotFound(LibraryError, LookupError):
    """There is no readable file of a library's name."""


class ForeignLibrary(LibraryError):
    """A file is not a library of this package, or its end is missing."""


class CorruptLibrary(LibraryError):
    """A library is damaged, or its manifest is not its own."""


class NewerLibrary(LibraryError):
    """A library has a format or schema that this version does not know."""


class UnsupportedMachine(LibraryError):
    """A library's code is for another instruction set, or needs features that this CPU lacks."""


class MissingToolchain(AttentuneError):
    """A compiler or linker that is needed is not installed, or failed."""


class NoValidCandidate(AttentuneError):
    """Every candidate of every batch failed.

    Parameters
    ----------
    key : AttentionKey
        What was tuned.
    losers : sequence of Loser
        Every candidate with its reason.
    """

    def __init__(self, key: Any, losers: Sequence[Any]) -> None:
        self.key = key
        self.losers = tuple(losers)
        reasons = "; ".join(
            f"{loser.variant} {loser.outcome}: {loser.reason}" for loser in self.losers
        )
        super().__init__(
            f"No candidate for {key} is valid; mend one of these or add a variant: "
            f"{reasons or 'the plan has no batch'}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is made anew from its message alone.
        return type(self), (self.key, self.losers)
