"""The database: many processes, killed writers, files that are damaged, foreign or read-only."""

import io
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from records import a_record

from attentune import Database
from attentune.database import APPLICATION, SCHEMA, default_path
from attentune.errors import (
    CorruptDatabase,
    CorruptRecord,
    DatabaseError,
    ForeignDatabase,
    FullDatabase,
    NewerSchema,
    ReadOnlyDatabase,
)

TARGET = a_record().target
HERE = Path(__file__).parent


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.sqlite"


@pytest.fixture
def database(path):
    with Database(path) as opened:
        yield opened


def run(code, *arguments):
    """Start a process with some code, in which tests' modules can be imported."""
    lines = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{textwrap.dedent(code)}"
    return subprocess.Popen([sys.executable, "-c", lines, *map(str, arguments)])


def test_what_is_put_is_got(database):
    record = a_record()
    database.put(record)
    assert database.get(record.key, TARGET) == record
    assert database.keys() == [record.key]
    assert len(database) == 1


def test_another_target_has_its_own_record(database):
    here, there = a_record(), a_record(target='{"kind":"cuda"}', variant="fallback")
    database.put(here)
    database.put(there)
    assert database.get(here.key, TARGET) == here
    assert database.get(here.key, there.target) == there
    assert database.records(TARGET) == [here]
    assert database.get(a_record(1).key, TARGET) is None


def test_a_later_record_takes_the_place_of_an_earlier(database):
    database.put(a_record())
    database.put(a_record(score=9.0))
    assert len(database) == 1
    assert database.get(a_record().key, TARGET).score == 9.0


def test_records_outlive_the_database_object(path):
    with Database(path) as first:
        first.put(a_record())
    with Database(path) as second:
        assert second.records() == [a_record()]


def test_a_stale_record_is_listed_but_not_served_until_pruned(database):
    database.put(a_record())
    database.put(a_record(1))

    def stale(record):
        return "it is old" if record.key == a_record().key else None

    assert database.get(a_record().key, TARGET, stale) is None
    assert database.get(a_record(1).key, TARGET, stale) == a_record(1)
    assert database.stale(stale) == [(a_record(), "it is old")]
    assert database.prune(stale) == 1
    assert database.records() == [a_record(1)]


def test_merging_takes_the_better_of_each_key_and_target(database, tmp_path):
    other = tmp_path / "other.sqlite"
    database.put(a_record(0, score=1.0))
    database.put(a_record(1, score=1.0))
    with Database(other) as source:
        source.put(a_record(0, score=2.0))
        source.put(a_record(1, score=0.5))
        source.put(a_record(2, score=3.0))
    assert database.merge(other) == 2
    scores = {record.key.head_dim: record.score for record in database.records()}
    assert scores == {1: 1.0, 2: 0.5, 3: 3.0}
    assert database.merge(other) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "later"},
        {"versions": {"tvm": "9", "llvm": "22"}},
        {"versions": {"tvm": "0.27.0.post1", "llvm": "23"}},
    ],
)
def test_merging_takes_the_later_where_the_code_has_changed(path, tmp_path, changes):
    early = a_record(score=1.0)
    late = a_record(score=2.0, created="2026-01-02T00:00:00Z", **changes)
    for mine, theirs in ((early, late), (late, early)):
        with Database(tmp_path / "other.sqlite") as other, Database(path) as database:
            other.put(theirs)
            database.put(mine)
            assert database.merge(other) == (theirs is late)
            assert database.records() == [late]


def test_json_lines_go_round_byte_for_byte(database, tmp_path):
    for number in (2, 0, 1):
        database.put(a_record(number))
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert database.export_jsonl(first) == 3
    with Database(tmp_path / "other.sqlite") as other:
        assert other.import_jsonl(first) == 3
        other.export_jsonl(second)
        assert other.import_jsonl(io.StringIO(first.read_text())) == 0
    assert first.read_bytes() == second.read_bytes()


def test_a_broken_line_is_named_and_nothing_is_taken_over(database, tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_text(a_record().dumps() + "\n" + a_record(1).dumps()[:-9] + "\n")
    with pytest.raises(CorruptRecord, match=r"broken\.jsonl, line 2"):
        database.import_jsonl(file)
    assert len(database) == 0


def untouched(path, error, match):
    """Check that a file is refused, and left as it was."""
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(error, match=match) as caught:
            Database(path, read_only=read_only)
        assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_a_text_file_is_foreign(path):
    path.write_text("these are my notes\n" * 100)
    untouched(path, ForeignDatabase, "not a database")


def test_a_database_of_another_program_is_foreign(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    untouched(path, ForeignDatabase, "another program")


def test_a_later_schema_is_refused(path):
    Database(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.commit()
    connection.close()
    untouched(path, NewerSchema, f"schema {SCHEMA + 1}")


def test_a_damaged_file_is_named(path):
    with Database(path) as database:
        for number in range(50):
            database.put(a_record(number))
    damaged = bytearray(path.read_bytes())
    damaged[4096:] = b"\xff" * (len(damaged) - 4096)
    path.write_bytes(damaged)
    with Database(path) as database, pytest.raises(CorruptDatabase, match="damaged"):
        database.records()
    assert path.read_bytes() == bytes(damaged)


def test_a_row_that_is_no_record_is_corrupt(path):
    with Database(path) as database:
        database.put(a_record())
    connection = sqlite3.connect(path)
    connection.execute("UPDATE records SET data = '{}'")
    connection.commit()
    connection.close()
    with Database(path) as database, pytest.raises(CorruptDatabase, match="cannot be read"):
        database.records()


def test_a_folder_is_no_database(tmp_path):
    with pytest.raises(ForeignDatabase, match="folder"):
        Database(tmp_path)


def test_a_file_below_a_file_cannot_be_created(path):
    path.write_text("")
    with pytest.raises(ReadOnlyDatabase, match="cannot be created"):
        Database(path / "records.sqlite")


def test_read_only_reads_and_does_not_write(path):
    with Database(path) as database:
        database.put(a_record())
    with Database(path, read_only=True) as database:
        assert database.records() == [a_record()]
        with pytest.raises(ReadOnlyDatabase, match="cannot be written"):
            database.put(a_record(1))


def test_read_only_creates_nothing(path):
    with pytest.raises(ReadOnlyDatabase, match="does not exist"):
        Database(path, read_only=True)
    assert not path.exists()


def test_a_file_on_a_medium_that_cannot_be_written_is_read(path, monkeypatch):
    with Database(path) as database:
        database.put(a_record())
    connect = sqlite3.connect

    class Medium(sqlite3.Connection):
        """Refuses what needs a file beside the database, as a read-only medium does."""

        def execute(self, statement, *arguments):
            if "sqlite_master" in statement and not self.immutable:
                raise sqlite3.OperationalError("unable to open database file")
            return super().execute(statement, *arguments)

    def open_on_medium(name, **options):
        connection = connect(name, factory=Medium, **options)
        connection.immutable = "immutable=1" in name
        return connection

    monkeypatch.setattr(sqlite3, "connect", open_on_medium)
    with Database(path, read_only=True) as database:
        assert database.records() == [a_record()]


def test_a_full_disk_is_said_and_loses_nothing(path):
    with Database(path) as database:
        database.put(a_record())
        connection = database._connection()
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(FullDatabase, match="no room"):
            database.put(a_record(1, machine="x" * 500_000))
    with Database(path) as database:
        assert database.get(a_record().key, TARGET) == a_record()


def test_threads_share_a_database(database):
    errors = []

    def put(number):
        try:
            database.put(a_record(number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=put, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(database) == 8


WRITER = """
    from attentune import Database
    from records import a_record
    first, count = int(sys.argv[2]), int(sys.argv[3])
    with Database(sys.argv[1]) as database:
        for number in range(first, first + count):
            database.put(a_record(number))
"""


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_that_start_from_nothing_lose_and_double_nothing(path, count):
    processes = [run(WRITER, path, 20 * index, 20) for index in range(count)]
    assert [process.wait() for process in processes] == [0] * count
    with Database(path) as database:
        dims = [record.key.head_dim for record in database.records()]
    assert sorted(dims) == list(range(1, 20 * count + 1))


ENDLESS = """
    import itertools
    from attentune import Database
    from records import a_record
    with Database(sys.argv[1]) as database:
        for number in itertools.count(int(sys.argv[2])):
            database.put(a_record(number, machine="x" * 20000))
            print(number, flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_loses_at_most_its_own_record(path):
    Database(path).close()
    written = 0
    for round_ in range(50):
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import sys; sys.path.insert(0, {str(HERE)!r})\n{textwrap.dedent(ENDLESS)}",
                str(path),
                str(written),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        first = process.stdout.readline()
        time.sleep(0.003 * (round_ % 7))
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in (first + process.stdout.read()).split()]
        process.wait()
        with Database(path) as database:
            records = {record.key.head_dim - 1 for record in database.records()}
            check = database._connection().execute("PRAGMA integrity_check").fetchone()[0]
        assert check == "ok"
        assert set(said) <= records
        assert len(records - set(range(written)) - set(said)) <= 1
        written = max(records) + 1
    assert written > 50


def test_a_file_that_another_is_creating_is_not_foreign(path, monkeypatch):
    # The other one commits between this one's first look at the file and its transaction.
    looked = Database._is_ours

    def late(self, connection):
        first = looked(self, connection)
        monkeypatch.setattr(Database, "_is_ours", looked)
        Database(path).put(a_record())
        return first

    monkeypatch.setattr(Database, "_is_ours", late)
    assert Database(path).records() == [a_record()]


def test_a_key_is_in_the_database_or_not(database):
    database.put(a_record(1))
    assert a_record(1).key in database
    assert a_record(2).key not in database
    assert str(a_record(1).key) not in database


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    database = Database("records.sqlite")
    database.put(a_record())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    database.close()
    assert database.records() == [a_record()]


def test_pruning_leaves_a_record_that_was_replaced_in_the_meantime(database, path):
    database.put(a_record(fingerprint="old"))

    def stale(record):
        Database(path).put(a_record(fingerprint="new"))
        return "old" if record.fingerprint == "old" else None

    assert database.prune(stale) == 0
    assert database.records() == [a_record(fingerprint="new")]


def test_a_file_to_import_that_cannot_be_read_is_named(database, tmp_path):
    with pytest.raises(DatabaseError, match=r"missing\.jsonl cannot be read .*check the path"):
        database.import_jsonl(tmp_path / "missing.jsonl")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes("\xe9".encode("latin-1"))
    with pytest.raises(CorruptRecord, match=r"latin\.jsonl is not UTF-8 text"):
        database.import_jsonl(latin)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_opens_its_own_connection(database):
    database.put(a_record())
    child = os.fork()
    if child == 0:
        try:
            database.put(a_record(1))
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(database) == 2


def test_the_file_says_whose_it_is(path):
    Database(path).close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION
    connection.close()


def test_where_records_are_kept_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("ATTENTUNE_DATABASE", raising=False)
    assert default_path() == tmp_path / "attentune" / "records.sqlite"
    monkeypatch.setenv("ATTENTUNE_DATABASE", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine"
