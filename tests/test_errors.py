"""One class a cause, and for each a message that says what is wrong, the value and what to do."""

import contextlib
import inspect
import pickle
import sqlite3
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from records import a_record

from attentune import api, database, errors, models, versions
from attentune.database import Database
from attentune.errors import AttentuneError, NoValidCandidate
from attentune.group import Policy
from attentune.key import AttentionKey, anchor
from attentune.manifest import Manifest, append, read
from attentune.problem import AttentionProblem
from attentune.record import Record
from attentune.target import Target, native
from attentune.variant import Variant

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, AttentuneError)
}
KEY = AttentionKey.from_problem(AttentionProblem.parse("1,2,2,3,3,4,4:float32"))
CPU = Target.parse({"kind": "llvm"})
VARIANT = Variant(
    name="mine",
    supports=lambda key, target: None,
    structure=lambda key, target: {"planes": (2, 4)},
    space=lambda key, target, structure: {"unroll": (0, 16)},
    kernel=lambda spec, structure: None,
    schedule=lambda sch, spec, target, parameters: None,
    workspace=lambda problem, target, parameters: 0,
    allows=lambda key, target, parameters: parameters["planes"] == 2 or not parameters["unroll"],
)


def check_other_versions(monkeypatch, path):
    monkeypatch.setattr(versions, "installed", {"apache-tvm": "0.27.0.post1"}.get)
    versions.check_versions.__wrapped__()


def fail(losers):
    raise NoValidCandidate(KEY, losers)


def database_with(path, statement):
    Database(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()
    return Database(path)


def open_text(monkeypatch, path):
    path.write_text("no database, but long enough to have what might be a header\n" * 9)
    Database(path)


def use_locked(monkeypatch, path):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0)
    Database(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        Database(path).records()


def fill_up(monkeypatch, path):
    database = Database(path)
    connection = database._connection()
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    database.put(a_record(machine="x" * 500_000))


def read_cut_short(monkeypatch, path):
    Database(path).close()
    path.write_bytes(path.read_bytes()[:5000])
    Database(path).records()


LIBRARY = Manifest("balanced", "{}", "x86_64", (), {}, (), ())


def write_library(path, manifest=LIBRARY):
    path.write_bytes(b"code")
    append(path, manifest)
    return path


def read_changed(monkeypatch, path):
    content = write_library(path).read_bytes()
    path.write_bytes(b"edoc" + content[4:])
    read(path)


def read_newer(monkeypatch, path):
    monkeypatch.setattr("attentune.manifest.SCHEMA", 7)
    write_library(path)
    monkeypatch.undo()
    read(path)


def find_no_linker(monkeypatch, path):
    from attentune.export import find_linker

    monkeypatch.setenv("PATH", str(path))
    find_linker(Target.parse({"kind": "llvm", "mtriple": "riscv64-unknown-linux-gnu"}))


def load_elsewhere(monkeypatch, path):
    from attentune.library import check_machine

    check_machine(replace(LIBRARY, arch="sparc"), path)


# What only TVM provokes is tested with it. The messages of InvalidProblem, InvalidKey,
# InvalidTarget and InvalidPolicy are tested at length with their modules.
ELSEWHERE = {"UnsupportedArray", "Unsupported", "RecordNotFound"}
CASES = [
    (
        "InvalidProblem",
        lambda monkeypatch, path: AttentionProblem.parse("1,2,2,3,3,4,0:float32"),
        "value_dim is 0; it must be a whole number of at least 1.",
    ),
    (
        "InvalidKey",
        lambda monkeypatch, path: anchor(3, "fine"),
        "The level of anchoring is 'fine'; choose from minimal, balanced, extensive, full.",
    ),
    (
        "InvalidTarget",
        lambda monkeypatch, path: Target.parse("cuda"),
        "The CUDA target's arch is ''; name one, as in 'cuda:sm_80'.",
    ),
    (
        "InvalidPolicy",
        lambda monkeypatch, path: Policy("mine", ("a", "a"), ()),
        "The policy 'mine' names the variant 'a' twice; name it once.",
    ),
    (
        "InvalidParameters",
        lambda monkeypatch, path: VARIANT.check(KEY, CPU, {"planes": 3, "unroll": 0}),
        "mine's parameter planes is 3; it must be one of [2, 4].",
    ),
    (
        "InvalidParameters",
        lambda monkeypatch, path: VARIANT.check(KEY, CPU, {"planes": 2}),
        "mine needs the parameter unroll, one of [0, 16].",
    ),
    (
        "InvalidParameters",
        lambda monkeypatch, path: VARIANT.check(KEY, CPU, {"planes": 2, "unroll": 0, "tile": 1}),
        "mine has no parameter 'tile'; it has planes, unroll.",
    ),
    (
        "InvalidParameters",
        lambda monkeypatch, path: VARIANT.check(KEY, CPU, {"planes": 4, "unroll": 16}),
        "mine does not allow {'planes': 4, 'unroll': 16} together; tune the key anew.",
    ),
    (
        "UnknownName",
        lambda monkeypatch, path: api.find_policy("seeds"),
        "There is no policy 'seeds'; did you mean 'seed'?",
    ),
    (
        "UnknownName",
        lambda monkeypatch, path: api.find_policy("best"),
        "There is no policy 'best'; choose from seed, default.",
    ),
    (
        "UnknownName",
        lambda monkeypatch, path: models.get("vit-b-16"),
        "There is no model 'vit-b-16'; did you mean 'vit-b16'?",
    ),
    (
        "IncompatibleVersions",
        check_other_versions,
        "attentune needs apache-tvm==0.27.0.post1 with apache-tvm-ffi==0.1.14.post1, but found "
        "apache-tvm 0.27.0.post1, apache-tvm-ffi missing; run: pip install "
        "apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1",
    ),
    (
        "NoValidCandidate",
        lambda monkeypatch, path: fail(
            [
                SimpleNamespace(variant="a", outcome="build", reason="no room"),
                SimpleNamespace(variant="b", outcome="wrong", reason="off by 3"),
            ]
        ),
        f"No candidate for {KEY} is valid; mend one of these or add a variant: a build: no room; "
        "b wrong: off by 3",
    ),
    (
        "DatabaseError",
        use_locked,
        "PATH cannot be used (database is locked); try again.",
    ),
    (
        "FullDatabase",
        fill_up,
        "PATH has no room for another record (database or disk is full); free some space and tune "
        "again, earlier records are safe.",
    ),
    (
        "CorruptDatabase",
        read_cut_short,
        "PATH is damaged (database disk image is malformed); restore it from a copy, or move it "
        "away.",
    ),
    (
        "CorruptDatabase",
        lambda monkeypatch, path: database_with(
            path, "INSERT INTO records VALUES ('k', 't', 'v', 1, 'now', '[]')"
        ).records(),
        "PATH holds a record that cannot be read: A record is list; it must be a JSON object. "
        "Restore the file from a copy, or move it away.",
    ),
    (
        "CorruptRecord",
        lambda monkeypatch, path: Record.loads("{}"),
        "A record has the schema None, and this version reads 1; export it with the version that "
        "wrote it.",
    ),
    (
        "ForeignDatabase",
        open_text,
        "PATH is not a database; move it away, or name another file.",
    ),
    (
        "ForeignDatabase",
        lambda monkeypatch, path: database_with(path, "PRAGMA application_id = 5"),
        "PATH is a database of another program; name another file.",
    ),
    (
        "NewerSchema",
        lambda monkeypatch, path: database_with(path, "PRAGMA user_version = 99"),
        "PATH has the schema 99, and this version reads up to 1; upgrade attentune.",
    ),
    (
        "ReadOnlyDatabase",
        lambda monkeypatch, path: Database(path, read_only=True),
        "PATH does not exist, and was to be read only; check the path.",
    ),
    (
        "LibraryNotFound",
        lambda monkeypatch, path: read(path),
        "The library PATH cannot be read (No such file or directory); check the path.",
    ),
    (
        "ForeignLibrary",
        lambda monkeypatch, path: (path.write_text("text"), read(path)),
        "PATH is not a library that attentune exported, or its end was cut off; export it anew "
        "and copy it whole, without stripping it.",
    ),
    (
        "CorruptLibrary",
        read_changed,
        "The library PATH is damaged: its checksum is not that of its contents; export it anew, "
        "or copy it again.",
    ),
    (
        "CorruptLibrary",
        lambda monkeypatch, path: (
            write_library(path),
            path.with_name("file.json").write_text("{}"),
            read(path),
        ),
        "PATH.json is not the manifest of PATH; delete it, or export the library anew.",
    ),
    (
        "NewerLibrary",
        read_newer,
        "The manifest of PATH has the schema 7, and this version reads 1; export the library with "
        "the version that loads it.",
    ),
    (
        "UnsupportedMachine",
        load_elsewhere,
        f"The library PATH is for sparc, and this machine is {native().arch}; export one for this "
        "machine.",
    ),
    (
        "MissingToolchain",
        find_no_linker,
        "Linking a library for riscv64 takes the cross compiler riscv64-linux-gnu-gcc, which is "
        "not to be found; install it, or name the command with compiler=.",
    ),
    (
        "NoValidCandidate",
        lambda monkeypatch, path: fail([]),
        f"No candidate for {KEY} is valid; mend one of these or add a variant: the plan has no "
        "batch",
    ),
]


@pytest.mark.parametrize(("name", "provoke", "message"), CASES)
def test_message(name, provoke, message, monkeypatch, tmp_path):
    path = tmp_path / "file"
    with pytest.raises(AttentuneError) as caught:
        provoke(monkeypatch, path)
    assert type(caught.value) is CLASSES[name]
    assert str(caught.value) == message.replace("PATH", str(path))
    assert "\n" not in message


def test_every_class_has_a_test_of_its_message():
    tested = {name for name, _, _ in CASES}
    assert tested | ELSEWHERE | {"AttentuneError", "LibraryError"} == set(CLASSES)
    text = Path(__file__).with_name("test_errors_tvm.py").read_text()
    assert [name for name in ELSEWHERE if f"pytest.raises({name})" not in text] == []


def test_losers_are_kept():
    losers = [SimpleNamespace(variant="a", outcome="build", reason="no room")]
    error = NoValidCandidate(KEY, losers)
    assert (error.key, error.losers) == (KEY, tuple(losers))


@pytest.mark.parametrize("name", CLASSES)
def test_errors_pass_between_processes(name):
    error = NoValidCandidate(KEY, []) if name == "NoValidCandidate" else CLASSES[name]("why")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


# Callers that catch Python's own classes catch these as well.
@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InvalidProblem", ValueError),
        ("InvalidKey", ValueError),
        ("InvalidTarget", ValueError),
        ("InvalidParameters", ValueError),
        ("InvalidPolicy", ValueError),
        ("UnknownName", LookupError),
        ("RecordNotFound", LookupError),
        ("UnsupportedArray", TypeError),
        ("IncompatibleVersions", ImportError),
        ("CorruptDatabase", errors.DatabaseError),
        ("CorruptRecord", errors.DatabaseError),
        ("ForeignDatabase", errors.DatabaseError),
        ("FullDatabase", errors.DatabaseError),
        ("NewerSchema", errors.DatabaseError),
        ("ReadOnlyDatabase", errors.DatabaseError),
        ("LibraryNotFound", errors.LibraryError),
        ("ForeignLibrary", errors.LibraryError),
        ("CorruptLibrary", errors.LibraryError),
        ("NewerLibrary", errors.LibraryError),
        ("UnsupportedMachine", errors.LibraryError),
    ],
)
def test_base(name, builtin):
    assert issubclass(CLASSES[name], builtin)
    assert CLASSES[name].__doc__
