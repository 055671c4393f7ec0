"""The front door: what ``import attentune`` offers.

TVM is loaded by the first call that compiles, so that planning, databases and the reference stay
light.
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attentune.database import Database
from attentune.errors import InvalidParameters, InvalidProblem, RecordNotFound, UnknownName
from attentune.group import Policy
from attentune.key import AttentionKey
from attentune.plan import Plan, make_plan
from attentune.problem import AttentionProblem
from attentune.record import Record, stale_reason
from attentune.target import Target
from attentune.versions import check_versions

if TYPE_CHECKING:
    from attentune.dispatch import Dispatcher, Kernel
    from attentune.library import Library
    from attentune.manifest import Manifest
    from attentune.search.remote import Tracker
    from attentune.variant import Variant

Problem = AttentionProblem | str
_DISPATCHERS: dict[Any, Any] = {}
_LOCK = threading.Lock()


def find_policy(policy: Policy | str) -> Policy:
    """Return a policy by name; a policy is returned as it is.

    Raises
    ------
    UnknownName
        If there is none of that name.
    """
    from attentune.schedules.policy import POLICIES

    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        near = difflib.get_close_matches(str(policy), POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(POLICIES)}."
        raise UnknownName(f"There is no policy {policy!r}; {hint}")
    return POLICIES[policy]


def as_problem(problem: Problem) -> AttentionProblem:
    """Return a problem, parsed where it is text."""
    return problem if isinstance(problem, AttentionProblem) else AttentionProblem.parse(problem)


def plan(
    problem_or_key: AttentionProblem | AttentionKey | str,
    target: Target | str | Mapping[str, Any] = "native",
    policy: Policy | str = "default",
    *,
    variants: Sequence[Variant] | None = None,
    memory_bytes: int | None = None,
) -> Plan:
    """Say which variants would be tried for a problem, batch after batch.

    Parameters
    ----------
    problem_or_key : AttentionProblem, AttentionKey or str
        What to plan for; text is parsed as a problem.
    target : Target, str or Mapping
        "native", "cuda:sm_80", or a TVM target as JSON or tag.
    policy : Policy or str
        "default", "seed", or a policy of your own.
    variants : sequence of Variant, optional
        Variants beside those that the policy names.
    memory_bytes : int, optional
        What materialized scores may take; a share of this machine's free memory by default.

    Returns
    -------
    Plan
        Its ``batches`` is a tuple of tuples of variant names.

    Examples
    --------
    >>> import attentune
    >>> attentune.plan("1,8,8,512,512,64,64:float16", "cuda:sm_80", policy="seed").batches[1:]
    (('flash_unit',), ('fallback',))
    """
    subject = as_problem(problem_or_key) if isinstance(problem_or_key, str) else problem_or_key
    chosen = find_policy(policy)
    return make_plan(subject, Target.parse(target), chosen, _names(variants), memory_bytes)


def tune(
    problems: Problem | Iterable[Problem],
    target: Target | str | Mapping[str, Any] = "native",
    database: Database | str | os.PathLike[str] | None = None,
    trials: int = 64,
    seconds: float | None = None,
    seed: int = 0,
    runner: Tracker | None = None,
    policy: Policy | str = "default",
    *,
    level: str = "balanced",
    variants: Sequence[Variant] | None = None,
    memory_bytes: int | None = None,
    retune: bool = False,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
) -> list[Record]:
    """Find the best kernel for each problem's key, and keep it.

    Parameters
    ----------
    problems : AttentionProblem, str, or an iterable of them
        What to tune. Problems of one key are tuned once.
    target : Target, str or Mapping
        What to tune for; it is measured on this machine unless a tracker is given.
    database : Database or path, optional
        Where records are kept. A key that has a record is not tuned again.
    trials : int
        Candidates to measure for a batch of the plan.
    seconds : float, optional
        Time for each key, building, checking and ranking included.
    seed : int
        Of the search.
    runner : Tracker, optional
        Whose machines measure; a child process of this one by default.
    policy : Policy or str
        Which variants, in which batches.
    level : str
        How coarsely lengths share a record: "minimal", "balanced", "extensive" or "full".
    variants : sequence of Variant, optional
        Variants of your own, beside those that ship.
    memory_bytes : int, optional
        Address space of a process that runs candidates.
    retune : bool
        Tune even where a record is.
    on_event : Callable, optional
        Told of everything that happens, as a mapping with the name ``event``.

    Returns
    -------
    list of Record
        One a key, in the order of the problems.

    Raises
    ------
    NoValidCandidate
        If every candidate of a key failed, with every reason.

    Examples
    --------
    >>> import attentune
    >>> (record,) = attentune.tune("1,2,2,64,64,32,32:float32", trials=2, database="tuned.sqlite")
    >>> record.variant in record.batch
    True
    """
    check_versions()
    from attentune.search.tuning import Options, tune_key

    if trials < 1:
        raise InvalidParameters(f"trials is {trials}; it must be at least 1.")
    resolved = Target.parse(target)
    chosen = find_policy(policy)
    known = _variants(variants)
    records: dict[AttentionKey, Record] = {}
    emit = on_event or (lambda event: None)
    many = [problems] if isinstance(problems, (str, AttentionProblem)) else list(problems)
    keys: dict[AttentionKey, AttentionProblem] = {}
    for problem in map(as_problem, many):
        if problem.is_empty or problem.seq_kv == 0:
            raise InvalidProblem(
                f"The problem {problem} has no query or no key; there is nothing to tune, leave it "
                "out."
            )
        keys.setdefault(AttentionKey.from_problem(problem, level), problem)
    store, owned = _open(database)
    try:
        for key in keys:
            emit({"event": "key", "key": str(key), "target": str(resolved)})
            found = None
            if store is not None and not retune:
                found = store.get(key, str(resolved), stale=_staleness(known))
            if found is None:
                representative = key.representative()
                made = make_plan(representative, resolved, chosen, _names(variants))
                options = Options(
                    trials, seconds, seed, memory_bytes=memory_bytes, level=level, tracker=runner,
                    cost_model=None if store is None else cost_model_path(store.path),
                )  # fmt: skip
                found = tune_key(key, representative, made, known, options, emit)
                if store is not None:
                    store.put(found)
                    _forget()
                emit({"event": "record", "record": found.to_json(), "found": False})
            else:
                emit({"event": "record", "record": found.to_json(), "found": True})
            records[key] = found
    finally:
        if owned and store is not None:
            store.close()
    return list(records.values())


def build(
    problem_or_key: AttentionProblem | AttentionKey | str,
    target: Target | str | Mapping[str, Any] = "native",
    database: Database | str | os.PathLike[str] | None = None,
    on_miss: str = "heuristic",
    *,
    policy: Policy | str = "default",
    variants: Sequence[Variant] | None = None,
) -> Kernel:
    """Compile the kernel of a problem or key.

    Parameters
    ----------
    problem_or_key : AttentionProblem, AttentionKey or str
        What the kernel is to serve; with a key, scale, softcap and window are arguments of the
        call.
    target, database, on_miss
        As `attention` takes them.
    policy : Policy or str
        Whose plan is followed where the database has no record.
    variants : sequence of Variant, optional
        Variants of your own, beside those that ship.

    Returns
    -------
    Kernel
        Callable as ``kernel(query, key, value, mask=None, bias=None)``, with ``.variant``,
        ``.parameters`` and ``.source``.

    Raises
    ------
    RecordNotFound
        With ``on_miss="error"``.
    Unsupported
        If no variant can serve the problem on the target.

    Examples
    --------
    >>> import numpy as np, attentune
    >>> kernel = attentune.build("1,2,2,16,16,8,8:float32:causal")
    >>> q = np.ones((1, 2, 10, 8), np.float32)
    >>> kernel(q, q, q).shape
    (1, 2, 10, 8)
    """
    dispatcher = _dispatcher(target, database, on_miss, policy, variants)
    if isinstance(problem_or_key, AttentionKey):
        return dispatcher.kernel_for_key(problem_or_key)
    return dispatcher.kernel(as_problem(problem_or_key))


def candidates(record: Record, *, variants: Sequence[Variant] | None = None) -> list[Kernel]:
    """Compile the winner of a record and the candidates that it was ranked against.

    Parameters
    ----------
    record : Record
        What tuning returned.
    variants : sequence of Variant, optional
        Variants of your own that took part.

    Returns
    -------
    list of Kernel
        The winner first, then those that were only slower, fastest first.
    """
    check_versions()
    from attentune.dispatch import Kernel

    known, target = _variants(variants), Target.parse(record.target)
    ranked = sorted(
        (loser for loser in record.losers if loser.outcome == "slower" and loser.seconds),
        key=lambda loser: loser.seconds or 0.0,
    )
    chosen = [(record.variant, record.parameters)]
    chosen += [(loser.variant, loser.parameters) for loser in ranked]
    return [
        Kernel(record.key, target, known[variant], parameters) for variant, parameters in chosen
    ]


def attention(
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
    target: Target | str | Mapping[str, Any] = "native",
    database: Database | str | os.PathLike[str] | None = None,
    on_miss: str = "heuristic",
) -> Any:
    r"""Compute attention with the kernel that was tuned for it.

    ``softmax(softcap * tanh(scale * Q K^T / softcap) + bias) V``, keys that are masked out, beyond
    the diagonal or outside the window taken out before the softmax. A query that sees no key
    gives 0.

    Parameters
    ----------
    query : array
        ``[batch, q_heads, seq_q, head_dim]``; NumPy, PyTorch or TVM; float32, float16, bfloat16.
    key, value : array
        ``[batch, kv_heads, seq_kv, head_dim]`` and ``[batch, kv_heads, seq_kv, value_dim]``, of the
        query's type. Query head h reads KV head ``h // (q_heads // kv_heads)``.
    mask : array of bool, optional
        True where a key takes part. Broadcasts from the right over
        ``[batch, q_heads, seq_q, seq_kv]``.
    bias : array of float, optional
        Added to the scores; broadcasts likewise.
    is_causal : bool
        Whether query i sees no key after the diagonal.
    causal_alignment : str
        Where the diagonal ends: "bottom_right" (key j visible when ``j <= i + seq_kv - seq_q``) or
        "top_left" (``j <= i``).
    window : (int or None, int or None), optional
        How many keys left and right of the diagonal are visible.
    scale : float, optional
        ``1 / sqrt(head_dim)`` by default.
    softcap : float, optional
        Bound that scores approach.
    precision : str
        "strict" or "relaxed".
    target : Target, str or Mapping
        What to compile for.
    database : Database or path, optional
        Where tuned records are.
    on_miss : str
        Without a record: "heuristic" takes the plan's first variant with default parameters,
        "tune" tunes now, "error" raises.

    Returns
    -------
    array
        ``[batch, q_heads, seq_q, value_dim]``, contiguous, of the query's kind and type. It carries
        no gradient.

    Raises
    ------
    InvalidProblem
        If the arrays and options do not fit together.
    UnsupportedArray
        If an array is of an unknown kind or on another device.
    RecordNotFound
        With ``on_miss="error"``.

    Examples
    --------
    >>> import numpy as np, attentune
    >>> q = np.zeros((1, 2, 3, 8), np.float32)
    >>> attentune.attention(q, q, q + 1)[0, 0, 0, 0].item()
    1.0
    """
    dispatcher = _dispatcher(target, database, on_miss, "default", None)
    return dispatcher(
        query, key, value, mask, bias,
        is_causal, causal_alignment, window, scale, softcap, precision,
    )  # fmt: skip


def export_library(
    database_or_keys: Database
    | str
    | os.PathLike[str]
    | AttentionKey
    | AttentionProblem
    | Iterable[AttentionKey | Problem],
    target: Target | str | Mapping[str, Any] = "native",
    path: str | os.PathLike[str] = "attention.so",
    *,
    database: Database | str | os.PathLike[str] | None = None,
    on_miss: str = "heuristic",
    level: str = "balanced",
    policy: Policy | str = "default",
    variants: Sequence[Variant] | None = None,
    compiler: Sequence[str] | None = None,
) -> Manifest:
    """Write one shared library that serves keys without the compiler.

    Parameters
    ----------
    database_or_keys : Database, path, or iterable of AttentionKey, AttentionProblem or str
        A database, all of whose keys for the target are exported; or what to serve.
    target : Target, str or Mapping
        What to compile for.
    path : path
        The library's file; its manifest is also written beside it, with ``.json`` appended.
    database : Database or path, optional
        Where the records of keys are.
    on_miss : str
        For keys without a record: "heuristic" or "error".
    level : str
        How coarsely the keys are anchored; a database's keys of other levels are left out.
    policy : Policy or str
        Whose plan is followed where there is no record.
    variants : sequence of Variant, optional
        Variants of your own, beside those that ship.
    compiler : sequence of str, optional
        The command that links, as in ``["aarch64-linux-gnu-gcc"]``; found on PATH by default.

    Returns
    -------
    Manifest
        What the library holds.

    Raises
    ------
    InvalidParameters
        If there is nothing to export.
    RecordNotFound
        With ``on_miss="error"``, for a key without a record.
    MissingToolchain
        If nothing that links for the target is found.

    Examples
    --------
    >>> import attentune
    >>> manifest = attentune.export_library(["1,2,2,16,16,8,8:float32"], path="attention.so")
    >>> [str(entry.key.representative()) for entry in manifest.entries]
    ['1,2,2,16,16,8,8:float32']
    """
    check_versions()
    from attentune.dispatch import Dispatcher
    from attentune.export import write_library

    resolved = Target.parse(target)
    known = _variants(variants)
    keys: list[AttentionKey] = []
    subject = database_or_keys
    if isinstance(subject, (Database, os.PathLike)) or (
        isinstance(subject, str) and "," not in subject
    ):
        database = subject
    elif isinstance(subject, (AttentionKey, AttentionProblem, str)):
        keys = [_as_key(subject, level)]
    else:
        keys = [_as_key(one, level) for one in subject]
    store, owned = _open(database)
    try:
        if database is subject and store is not None:
            stale = _staleness(known)
            keys = [
                record.key
                for record in store.records(str(resolved))
                if stale(record) is None and record.key.anchored(level) == record.key
            ]
            if not keys:
                raise RecordNotFound(
                    f"{store.path} has no record for {resolved} at the level {level} that is not "
                    "stale; tune some first."
                )
        dispatcher = Dispatcher(
            resolved, known, find_policy(policy), store, on_miss, extra=_names(variants)
        )  # fmt: skip
        return write_library(keys, Path(path), dispatcher, level, compiler)
    finally:
        if owned and store is not None:
            store.close()


def load_library(
    path: str | os.PathLike[str],
    threads: int | None = None,
    *,
    on_miss: str = "heuristic",
    memory_bytes: int | None = None,
) -> Library:
    """Load an exported library; the compiler is not needed, and not loaded.

    Parameters
    ----------
    path : path
        The file that `attentune.export_library` wrote.
    threads : int, optional
        Threads of a call, this process's cores by default.
    on_miss : str
        What a call does whose key the library lacks: "heuristic" takes the kernel of the nearest
        key with the same code and counts it in ``steps``, "error" raises `RecordNotFound`.
    memory_bytes : int, optional
        What a kernel may take as workspace; a share of the free memory by default.

    Returns
    -------
    Library
        A mapping from `AttentionKey` to kernels, callable like `attentune.attention`.

    Raises
    ------
    LibraryNotFound, ForeignLibrary, CorruptLibrary, NewerLibrary
        If the file cannot be used.
    UnsupportedMachine
        If its code is for another machine.

    Examples
    --------
    >>> import attentune
    >>> import numpy as np
    >>> _ = attentune.export_library(["1,2,2,16,16,8,8:float32"], path="attention.so")
    >>> library = attentune.load_library("attention.so")
    >>> q = np.ones((1, 2, 10, 8), np.float32)
    >>> library(q, q, q).shape
    (1, 2, 10, 8)
    """
    check_versions()
    from attentune.library import Library

    return Library(path, threads, on_miss, memory_bytes)


def _as_key(one: AttentionKey | Problem, level: str) -> AttentionKey:
    if isinstance(one, AttentionKey):
        return one
    return AttentionKey.from_problem(as_problem(one), level)


def supported(key: AttentionKey, target: Target) -> list[Variant]:
    """Return the variants that ship and can serve a key on a target."""
    return [v for v in _variants(None).values() if v.supports(key, target) is None]


def cost_model_path(database: Path) -> Path:
    """Return where the cost model of a database's searches is kept: beside it."""
    return database.with_name(f"{database.name}.cost-model.tar")


def _variants(extra: Sequence[Variant] | None) -> dict[str, Variant]:
    """Return the variants that ship and those of the caller, by name, in order."""
    from attentune.schedules import VARIANTS

    known = {variant.name: variant for variant in VARIANTS}
    for variant in extra or ():
        if variant.name in known:
            raise InvalidParameters(
                f"A variant is named {variant.name!r}, as one that ships; give it another name."
            )
        known[variant.name] = variant
    return known


def _names(variants: Sequence[Variant] | None) -> tuple[str, ...]:
    """Return the names that a caller adds to those that the policy knows."""
    return tuple(variant.name for variant in variants or ())


def _forget() -> None:
    """Let calls of this process find a record that was just stored."""
    for dispatcher, *_ in list(_DISPATCHERS.values()):
        dispatcher.forget()


def _staleness(known: Mapping[str, Variant]) -> Callable[[Record], str | None]:
    from attentune.versions import current_versions

    fingerprints = {name: variant.fingerprint() for name, variant in known.items()}
    return lambda record: stale_reason(record, fingerprints, current_versions())


def _open(
    database: Database | str | os.PathLike[str] | None,
) -> tuple[Database | None, bool]:
    """Return a database and whether it was opened here."""
    if database is None or isinstance(database, Database):
        return database, False
    return Database(Path(database)), True


def _dispatcher(target: Any, database: Any, on_miss: str, policy: Any, variants: Any) -> Dispatcher:
    """Return the dispatcher of these arguments, made at their first use."""
    identity = (
        target if isinstance(target, (str, Target)) else id(target),
        str(database) if isinstance(database, (str, os.PathLike)) else id(database),
        on_miss,
        policy if isinstance(policy, str) else id(policy),
        None if variants is None else tuple(id(v) for v in variants),
    )
    found = _DISPATCHERS.get(identity)
    if found is not None:
        return found[0]
    check_versions()
    from attentune.dispatch import Dispatcher

    with _LOCK:
        resolved = Target.parse(target)
        chosen = find_policy(policy)
        store, _ = _open(database)

        def tune_one(problem: AttentionProblem) -> Record:
            return tune(problem, resolved, store, policy=chosen, variants=variants)[0]

        dispatcher = Dispatcher(
            resolved, _variants(variants), chosen, store, on_miss, tune_one, extra=_names(variants)
        )
        # What the identity names by address is kept, so that the address stays theirs.
        _DISPATCHERS[identity] = (dispatcher, target, database, policy, variants)
    return dispatcher
