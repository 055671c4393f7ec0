"""Records in SQLite: safe for many processes, never overwritten when damaged or foreign.

The file is in write-ahead mode. A writer that is killed loses its own unfinished record and
nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from attentune.errors import (
    CorruptDatabase,
    CorruptRecord,
    DatabaseError,
    ForeignDatabase,
    FullDatabase,
    NewerSchema,
    ReadOnlyDatabase,
)
from attentune.key import AttentionKey
from attentune.record import Record

APPLICATION = 0x41545455  # "ATTU", in the file's header: whose file it is
SCHEMA = 1
BUSY_SECONDS = 60.0

_TABLE = """
CREATE TABLE IF NOT EXISTS records (
    key TEXT NOT NULL,
    target TEXT NOT NULL,
    variant TEXT NOT NULL,
    score REAL NOT NULL,
    created TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (key, target)
)
"""
_OWNER = """
SELECT (SELECT application_id FROM pragma_application_id),
    (SELECT user_version FROM pragma_user_version),
    (SELECT count(*) FROM sqlite_master)
"""
_PUT = """
INSERT INTO records (key, target, variant, score, created, data) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (key, target) DO UPDATE SET
    variant = excluded.variant, score = excluded.score, created = excluded.created,
    data = excluded.data
"""
# Scores compare only where the code that was measured is the same; else the later one is better.
_PUT_IF_BETTER = (
    _PUT
    + """
WHERE CASE
    WHEN json_extract(excluded.data, '$.versions.tvm') IS NOT
            json_extract(records.data, '$.versions.tvm')
        OR json_extract(excluded.data, '$.versions.llvm') IS NOT
            json_extract(records.data, '$.versions.llvm')
        OR (excluded.variant = records.variant
            AND json_extract(excluded.data, '$.fingerprint') IS NOT
                json_extract(records.data, '$.fingerprint'))
    THEN excluded.created > records.created
    ELSE excluded.score < records.score
END
"""
)

Stale = Callable[[Record], "str | None"]


class Database:
    """The best record of each key and target.

    Parameters
    ----------
    path : str or Path
        The file. It is created if it does not exist, unless it is opened read-only.
    read_only : bool
        Whether to open it for reading alone, which works where it cannot be written.

    Raises
    ------
    CorruptDatabase
        If the file is damaged.
    ForeignDatabase
        If it is something else.
    NewerSchema
        If a later version wrote it.
    ReadOnlyDatabase
        If it cannot be created or opened.

    Examples
    --------
    >>> import attentune
    >>> problem = attentune.AttentionProblem.parse("1,2,2,64,64,32,32:float32")
    >>> with attentune.Database("records.sqlite") as database:
    ...     attentune.AttentionKey.from_problem(problem) in database
    False
    """

    def __init__(self, path: str | os.PathLike[str], read_only: bool = False) -> None:
        # Connections are opened later too, whatever folder the process is in by then.
        self.path = Path(os.path.abspath(path))
        self.read_only = read_only
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        with self._errors():
            self._connection()

    def get(self, key: AttentionKey, target: str, stale: Stale | None = None) -> Record | None:
        """Return the record of a key on a target, None if there is none that is not stale.

        Parameters
        ----------
        key : AttentionKey
            What is to be served.
        target : str
            Canonical text of the target.
        stale : Callable, optional
            Says why a record must not be served, or None.
        """
        query = "SELECT data FROM records WHERE key = ? AND target = ?"
        with self._errors():
            row = self._connection().execute(query, (str(key), target)).fetchone()
        if row is None:
            return None
        record = self._load(row[0])
        return None if stale is not None and stale(record) is not None else record

    def put(self, record: Record) -> None:
        """Store a record, in place of the one of its key and target."""
        with self._errors(), self._connection() as connection:
            connection.execute(_PUT, _row(record))

    def keys(self, target: str | None = None) -> list[AttentionKey]:
        """Return the keys that have a record, on one target or on any."""
        return list(dict.fromkeys(record.key for record in self.records(target)))

    def records(self, target: str | None = None) -> list[Record]:
        """Return all records, ordered by key and target."""
        query = "SELECT data FROM records WHERE ?1 IS NULL OR target = ?1 ORDER BY key, target"
        with self._errors():
            rows = self._connection().execute(query, (target,)).fetchall()
        return [self._load(row[0]) for row in rows]

    def stale(self, stale: Stale) -> list[tuple[Record, str]]:
        """Return the records that are stale, each with the reason."""
        found = ((record, stale(record)) for record in self.records())
        return [(record, reason) for record, reason in found if reason is not None]

    def merge(self, other: Database | str | os.PathLike[str]) -> int:
        """Take over another database's records, the better one of each key and target.

        The better one is the faster; where the two were measured with other versions, or with
        other sources of one variant, it is the later.

        Returns
        -------
        int
            How many were taken over.
        """
        if isinstance(other, Database):
            return self._take(other.records())
        with Database(other, read_only=True) as source:
            return self._take(source.records())

    def prune(self, stale: Stale) -> int:
        """Remove stale records and return how many there were.

        A record that another process has replaced in the meantime stays.
        """
        with self._errors():
            rows = self._connection().execute("SELECT key, target, data FROM records").fetchall()
        gone = [row for row in rows if stale(self._load(row[2])) is not None]
        query = "DELETE FROM records WHERE key = ? AND target = ? AND data = ?"
        with self._errors(), self._connection() as connection:
            return connection.executemany(query, gone).rowcount if gone else 0

    def export_jsonl(self, file: str | os.PathLike[str] | TextIO) -> int:
        """Write all records, one line of JSON each, and return how many.

        The same records give the same bytes.
        """
        records = self.records()
        text = "".join(record.dumps() + "\n" for record in records)
        if isinstance(file, (str, os.PathLike)):
            Path(file).write_text(text, encoding="utf-8", newline="\n")
        else:
            file.write(text)
        return len(records)

    def import_jsonl(self, file: str | os.PathLike[str] | TextIO) -> int:
        """Take over the records of a file that `export_jsonl` wrote.

        All or none: a line that cannot be read is named, and nothing is stored.

        Returns
        -------
        int
            How many were better than what was there.

        Raises
        ------
        CorruptRecord
            Naming file and line.
        DatabaseError
            If the file cannot be read.
        """
        if isinstance(file, (str, os.PathLike)):
            name = str(file)
            try:
                text = Path(file).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise CorruptRecord(
                    f"{name} is not UTF-8 text ({error.reason} at byte {error.start}); name a file "
                    "that was exported."
                ) from None
            except OSError as error:
                raise DatabaseError(
                    f"{name} cannot be read ({error.strerror or error}); check the path."
                ) from error
        else:
            name, text = getattr(file, "name", "the file"), file.read()
        records = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    records.append(Record.loads(line))
                except (CorruptRecord, ValueError) as error:
                    raise CorruptRecord(f"{name}, line {number}: {error}") from None
        return self._take(records)

    def close(self) -> None:
        """Close every connection of this process."""
        with self._lock:
            for connection in self._opened:
                connection.close()
            self._opened.clear()
        self._local = threading.local()

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __contains__(self, key: object) -> bool:
        """Return whether a key has a record on any target."""
        with self._errors():
            found = self._connection().execute(
                "SELECT 1 FROM records WHERE key = ? LIMIT 1", (str(key),)
            )
            return isinstance(key, AttentionKey) and found.fetchone() is not None

    def __len__(self) -> int:
        with self._errors():
            return int(self._connection().execute("SELECT count(*) FROM records").fetchone()[0])

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Database({str(self.path)!r})"

    def _take(self, records: list[Record]) -> int:
        with self._errors(), self._connection() as connection:
            before = connection.total_changes
            connection.executemany(_PUT_IF_BETTER, [_row(record) for record in records])
            return connection.total_changes - before

    def _load(self, text: str) -> Record:
        try:
            return Record.loads(text)
        except ValueError as error:
            raise CorruptDatabase(
                f"{self.path} holds a record that cannot be read: {error} Restore the file from a "
                "copy, or move it away."
            ) from None

    def _connection(self) -> sqlite3.Connection:
        """Return this thread's connection. A forked child opens its own."""
        found = getattr(self._local, "connection", None)
        if found is None or self._local.process != os.getpid():
            found = self._open()
            self._local.connection, self._local.process = found, os.getpid()
            with self._lock:
                self._opened.append(found)
        return found

    def _open(self) -> sqlite3.Connection:
        if self.path.is_dir():
            raise ForeignDatabase(f"{self.path} is a folder; name a file in it.")
        if self.read_only:
            if not self.path.exists():
                raise ReadOnlyDatabase(
                    f"{self.path} does not exist, and was to be read only; check the path."
                )
            connection = self._connect("ro")
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = self._connect("rwc")
        try:
            self._check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"{self.path.resolve().as_uri()}?mode={mode}"
        connection = sqlite3.connect(uri, timeout=BUSY_SECONDS, uri=True, check_same_thread=False)
        if mode == "ro":
            try:
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            except sqlite3.OperationalError:
                # Write-ahead mode wants a file beside the database, which a read-only medium
                # refuses. Nobody else can be writing there either.
                connection.close()
                connection = sqlite3.connect(
                    f"{uri}&immutable=1", uri=True, check_same_thread=False
                )
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        """Make sure of whose file it is before anything is written; a new one becomes ours."""
        if self._is_ours(connection):
            if not self.read_only:
                _write_ahead(connection)
            return
        if self.read_only:
            raise ForeignDatabase(f"{self.path} is empty; name a database that was tuned into.")
        # One transaction: whoever comes second waits, and finds the file as the first made it.
        connection.execute("BEGIN IMMEDIATE")
        if not self._is_ours(connection):
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.commit()
        _write_ahead(connection)

    def _is_ours(self, connection: sqlite3.Connection) -> bool:
        """Return whether the file is a database of this package, False if it is still empty."""
        # One statement, so that all three are of one moment.
        application, version, tables = connection.execute(_OWNER).fetchone()
        if application == APPLICATION:
            if version > SCHEMA:
                raise NewerSchema(
                    f"{self.path} has the schema {version}, and this version reads up to {SCHEMA}; "
                    "upgrade attentune."
                )
            return True
        if application != 0 or version != 0 or tables != 0:
            raise ForeignDatabase(
                f"{self.path} is a database of another program; name another file."
            )
        return False

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Give SQLite's errors a class of ours, and say what to do."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._explained(error) from error
        except OSError as error:
            raise ReadOnlyDatabase(
                f"{self.path} cannot be created: {error.strerror or error}; choose another place."
            ) from error

    def _explained(self, error: sqlite3.Error) -> DatabaseError:
        text = str(error)
        if "not a database" in text:
            return ForeignDatabase(
                f"{self.path} is not a database; move it away, or name another file."
            )
        if "malformed" in text or "corrupt" in text:
            return CorruptDatabase(
                f"{self.path} is damaged ({text}); restore it from a copy, or move it away."
            )
        if "readonly" in text or "unable to open" in text:
            return ReadOnlyDatabase(
                f"{self.path} cannot be written ({text}); open it with read_only=True, or choose "
                "another place."
            )
        if "full" in text:
            return FullDatabase(
                f"{self.path} has no room for another record ({text}); free some space and tune "
                "again, earlier records are safe."
            )
        return DatabaseError(f"{self.path} cannot be used ({text}); try again.")


def default_path() -> Path:
    """Return where records are kept when no path is given.

    ``$ATTENTUNE_DATABASE``, or ``attentune/records.sqlite`` below the user's data folder.
    """
    named = os.environ.get("ATTENTUNE_DATABASE")
    if named:
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME")
    root = Path(data) if data else Path.home() / ".local" / "share"
    return root / "attentune" / "records.sqlite"


def _row(record: Record) -> tuple[Any, ...]:
    return (
        str(record.key),
        record.target,
        record.variant,
        record.score,
        record.created,
        record.dumps(),
    )


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead mode, for which SQLite does not wait while others use the file."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return
