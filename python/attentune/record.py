"""What tuning found: the winner of a key, its times, and why every other candidate lost."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attentune.errors import CorruptRecord
from attentune.key import AttentionKey

SCHEMA = 1
OUTCOMES = ("unsupported", "build", "timeout", "crash", "memory", "wrong", "slower")
# Versions that generated code depends on; a change of one makes a record stale.
CODE_VERSIONS = ("tvm", "llvm")


@dataclass(frozen=True)
class Loser:
    """A candidate that did not win.

    Parameters
    ----------
    variant : str
        Its variant.
    parameters : Mapping
        Its parameters, as many as were chosen when it failed.
    outcome : str
        One of `OUTCOMES`.
    reason : str
        What happened, for a person.
    seconds : float, optional
        Its median time, where it has one.
    seconds_all : tuple of float
        The samples of the final ranking that it is the median of, in seconds, in the order taken.
    """

    variant: str
    parameters: Mapping[str, int]
    outcome: str
    reason: str
    seconds: float | None = None
    seconds_all: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise CorruptRecord(
                f"A loser's outcome is {self.outcome!r}; it must be one of {', '.join(OUTCOMES)}."
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        data = {
            "variant": self.variant,
            "parameters": dict(self.parameters),
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": self.seconds,
        }
        # Most losers never get that far, and neither did those of the first records.
        return {**data, "seconds_all": list(self.seconds_all)} if self.seconds_all else data


@dataclass(frozen=True)
class Record:
    """The winner of one key on one target.

    Parameters
    ----------
    key : AttentionKey
        What it serves.
    target : str
        Canonical text of the target.
    variant : str
        Its variant.
    parameters : Mapping
        All its parameters by name.
    seconds_all : tuple of float
        Every sample of the final ranking, in seconds, in the order taken.
    score : float
        What it was ranked by, in seconds.
    losers : tuple of Loser
        Every other candidate that was looked at.
    versions : Mapping
        Versions it was measured with.
    fingerprint : str
        Digest of the sources of kernel and schedule.
    created : str
        When, in UTC, ISO 8601.
    machine : str
        On what kind of machine.
    batch : tuple of str
        The plan's batch that it won.
    trace : optional
        The schedule's trace as JSON data: evidence, never replayed at another size.
    workspace_bytes : int
        What it needs beside its tensors at the representative.

    Examples
    --------
    >>> import attentune
    >>> key = attentune.AttentionKey.from_problem(
    ...     attentune.AttentionProblem.parse("1,2,2,64,64,32,32:float32")
    ... )
    >>> record = attentune.Record(
    ...     key, target='{"kind":"llvm"}', variant="flash_unit", parameters={"block_q": 64},
    ...     seconds_all=(2e-3, 1e-3, 3e-3), score=2e-3, losers=(), versions={}, fingerprint="",
    ...     created="2026-01-01T00:00:00Z", machine="x86_64", batch=("flash_unit",),
    ... )
    >>> record.seconds
    0.002
    >>> attentune.Record.loads(record.dumps()) == record
    True
    """

    key: AttentionKey
    target: str
    variant: str
    parameters: Mapping[str, int]
    seconds_all: tuple[float, ...]
    score: float
    losers: tuple[Loser, ...]
    versions: Mapping[str, str]
    fingerprint: str
    created: str
    machine: str
    batch: tuple[str, ...]
    trace: Any = None
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "trace", _plain(self.trace))

    @property
    def seconds(self) -> float:
        """Median of the samples that count: the first does not, once there are three."""
        return statistics.median(counted(self.seconds_all))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data, with the schema's version."""
        return {
            "schema": SCHEMA,
            "key": str(self.key),
            "target": self.target,
            "variant": self.variant,
            "parameters": dict(self.parameters),
            "seconds": list(self.seconds_all),
            "score": self.score,
            "losers": [loser.to_json() for loser in self.losers],
            "versions": dict(self.versions),
            "fingerprint": self.fingerprint,
            "created": self.created,
            "machine": self.machine,
            "batch": list(self.batch),
            "trace": self.trace,
            "workspace_bytes": self.workspace_bytes,
        }

    def dumps(self) -> str:
        """Return it as one line of JSON: the same record, the same bytes."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Return the record that JSON data holds.

        Raises
        ------
        CorruptRecord
            Naming the field that is missing or of another type.
        """
        if not isinstance(data, Mapping):
            raise CorruptRecord(f"A record is {type(data).__name__}; it must be a JSON object.")
        if data.get("schema") != SCHEMA:
            raise CorruptRecord(
                f"A record has the schema {data.get('schema')!r}, and this version reads {SCHEMA}; "
                "export it with the version that wrote it."
            )
        for name, kind in _TYPES.items():
            if not isinstance(data.get(name), kind) or isinstance(data.get(name), bool):
                raise CorruptRecord(
                    f"A record's field {name} is {data.get(name)!r}; it must be {_NAMES[kind]}."
                )
        if not data["seconds"] or not all(_is_time(s) for s in data["seconds"]):
            raise CorruptRecord(
                f"A record's field seconds is {data['seconds']!r}; it must hold a number or more, "
                "each finite and above zero."
            )
        if not _is_time(data["score"]):
            raise CorruptRecord(
                f"A record's field score is {data['score']!r}; it must be finite and above zero."
            )
        return cls(
            key=AttentionKey.parse(data["key"]),
            target=data["target"],
            variant=data["variant"],
            parameters=_parameters(data["parameters"]),
            seconds_all=tuple(float(s) for s in data["seconds"]),
            score=float(data["score"]),
            losers=tuple(_loser(one) for one in data["losers"]),
            versions={str(k): str(v) for k, v in data["versions"].items()},
            fingerprint=data["fingerprint"],
            created=data["created"],
            machine=data["machine"],
            batch=tuple(str(name) for name in data["batch"]),
            trace=data.get("trace"),
            workspace_bytes=data["workspace_bytes"],
        )

    @classmethod
    def loads(cls, text: str) -> Record:
        """Return the record of a line of JSON."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise CorruptRecord(f"A record is not JSON: {error}.") from None
        return cls.from_json(data)


def counted(samples: Sequence[float]) -> Sequence[float]:
    """Return the samples that count: all but the first, once there are three.

    The first one still pays for caches and clocks that the warm-up did not settle.
    """
    return samples[1:] if len(samples) >= 3 else samples


def stale_reason(
    record: Record, fingerprints: Mapping[str, str], versions: Mapping[str, str]
) -> str | None:
    """Say why a record must not be served any more.

    Parameters
    ----------
    record : Record
        The record.
    fingerprints : Mapping
        Digests of today's variants by name.
    versions : Mapping
        Today's versions.

    Returns
    -------
    str or None
        None if it is as good as new.
    """
    if record.variant not in fingerprints:
        return f"there is no variant {record.variant} any more"
    if record.fingerprint != fingerprints[record.variant]:
        return f"the sources of {record.variant} have changed"
    for name in CODE_VERSIONS:
        old, new = record.versions.get(name), versions.get(name)
        if old != new:
            return f"it was measured with {name} {old}, and this is {new}"
    return None


_TYPES: dict[str, Any] = {
    "key": str,
    "target": str,
    "variant": str,
    "parameters": Mapping,
    "seconds": list,
    "score": (int, float),
    "losers": list,
    "versions": Mapping,
    "fingerprint": str,
    "created": str,
    "machine": str,
    "batch": list,
    "workspace_bytes": int,
}
_NAMES: dict[Any, str] = {
    str: "text",
    Mapping: "an object",
    list: "a list",
    (int, float): "a number",
    int: "a whole number",
}


def _loser(data: Any) -> Loser:
    if not isinstance(data, Mapping) or not all(
        isinstance(data.get(name), str) for name in ("variant", "outcome", "reason")
    ):
        raise CorruptRecord(
            f"A record's loser is {data!r}; it must be an object with variant, outcome and reason."
        )
    seconds = data.get("seconds")
    if seconds is not None and not _is_time(seconds):
        raise CorruptRecord(f"A loser's field seconds is {seconds!r}; it must be a time or null.")
    samples = data.get("seconds_all", [])
    if not isinstance(samples, list) or not all(_is_time(one) for one in samples):
        raise CorruptRecord(f"A loser's field seconds_all is {samples!r}; it must hold times.")
    return Loser(
        data["variant"],
        _parameters(data.get("parameters", {})),
        data["outcome"],
        data["reason"],
        seconds,
        tuple(samples),
    )


def _parameters(data: Any) -> dict[str, int]:
    if not isinstance(data, Mapping) or not all(
        isinstance(v, int) and not isinstance(v, bool) for v in data.values()
    ):
        raise CorruptRecord(f"A record's parameters are {data!r}; they must be whole numbers.")
    return {str(name): value for name, value in data.items()}


def _is_time(value: Any) -> bool:
    """Return whether a value is a time: a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value > 0 and value <= sys.float_info.max


def _plain(data: Any) -> Any:
    """Return data of TVM's containers as lists, dicts and scalars."""
    if data is None or isinstance(data, (str, bool, int, float)):
        return data
    if isinstance(data, Mapping):
        return {str(k): _plain(v) for k, v in data.items()}
    if isinstance(data, Sequence) or hasattr(data, "__iter__"):
        return [_plain(one) for one in data]
    # TVM's boxed numbers, such as those of a trace's decisions.
    value = getattr(data, "value", None)
    return value if isinstance(value, (int, float)) else str(data)
