"""Exported libraries: served without the compiler, checked before any code is loaded."""

import os
import random
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from broken import changed, rename
from conformance import AVX2
from records import a_record

import attentune
from attentune import AttentionKey, AttentionProblem, manifest, threads
from attentune.accuracy import mismatch
from attentune.database import Database
from attentune.errors import (
    CorruptLibrary,
    InvalidParameters,
    InvalidProblem,
    MissingToolchain,
    RecordNotFound,
    UnsupportedArray,
    UnsupportedMachine,
)
from attentune.manifest import Choice, Entry, Manifest
from attentune.search.inputs import random_inputs
from attentune.target import native

TEXTS = (
    "1,4,4,128,128,64,64:float32",
    "1,4,2,128,128,40,48:float16:mask:bias:causal",
    "1,8,2,1,512,64,64:bfloat16",
    "2,4,4,64,64,32,32:float32:softcap=20:window=9/0:mask=padding",
)
OPTIONS = ("is_causal", "causal_alignment", "window", "scale", "softcap", "precision")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "attention.so"
    attentune.export_library(TEXTS, path=path)
    return path


@pytest.fixture(scope="module")
def library(path):
    return attentune.load_library(path)


def call(library, problem, inputs, **more):
    options = {name: getattr(problem, name) for name in OPTIONS}
    rest = {name: inputs.get(name) for name in ("mask", "bias")}
    arrays = [inputs[name] for name in ("query", "key", "value")]
    return library(*arrays, **rest, **options, **more)


def check(library, problem, seed):
    inputs = random_inputs(problem, seed)
    shape = (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim)
    out = np.full(shape, np.nan, inputs["query"].dtype)
    assert call(library, problem, inputs, out=out) is out
    expected = attentune.reference.expected(problem, inputs)
    magnitude = float(np.abs(inputs["value"].astype(np.float32)).max())
    assert mismatch(out, expected, problem.dtype, magnitude) is None


def with_extents(problem, batch, groups, seq_q, seq_kv):
    tail = str(problem).split(",", 5)[5]
    heads = groups * problem.group
    return AttentionProblem.parse(f"{batch},{heads},{groups},{seq_q},{seq_kv},{tail}")


@pytest.mark.parametrize("text", TEXTS)
def test_a_key_serves_its_whole_bucket(path, text, seed):
    library = attentune.load_library(path, on_miss="error")
    corner = AttentionProblem.parse(text)
    groups = corner.batch * corner.kv_heads
    check(library, corner, seed)
    check(library, with_extents(corner, groups, 1, corner.seq_q, corner.seq_kv), seed)
    fewer = (groups // 2 + 1, corner.seq_q // 2 + 1, corner.seq_kv // 2 + 1)
    check(library, with_extents(corner, 1, *fewer), seed)
    assert library.steps == {}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("extents", [(1, 2, 7, 9), (1, 4, 65, 131), (3, 2, 2, 300)])
def test_every_kernel_is_right_beyond_its_bucket(library, text, extents, seed):
    check(library, with_extents(AttentionProblem.parse(text), *extents), seed)


def test_it_maps_keys_to_kernels(library, seed):
    assert set(library) == {
        AttentionKey.from_problem(AttentionProblem.parse(text)) for text in TEXTS
    }
    problem = AttentionProblem.parse(TEXTS[0])
    kernel = library[AttentionKey.from_problem(problem)]
    inputs = random_inputs(problem, seed)
    same = kernel(inputs["query"], inputs["key"], inputs["value"])
    np.testing.assert_array_equal(same, call(library, problem, inputs))
    assert kernel.variant in {code.variant for code in library.manifest.codes}


def test_the_same_keys_give_the_same_bytes(path, tmp_path):
    again = tmp_path / "other-name.so"
    attentune.export_library(reversed(TEXTS), path=again)
    assert again.read_bytes() == path.read_bytes()
    assert again.with_name("other-name.so.json").read_text() == manifest.read(path).dumps()


FRESH = """
import sys
sys.modules["torch"] = None  # TVM's FFI imports it where it is installed
import numpy as np
import attentune
library = attentune.load_library(sys.argv[1])
query = np.random.default_rng(0).standard_normal((1, 4, 100, 64), np.float32)
out = library(query, query, query)
assert np.allclose(out, attentune.reference.attention(query, query, query), atol=1e-5)
names = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/" in line}
(resident,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")]
print("tvm" in sys.modules, "libtvm_compiler.so" in names, "libtvm_runtime.so" in names, resident)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is mapped from /proc")
def test_no_compiler_is_loaded(path):
    run = subprocess.run(
        [sys.executable, "-c", FRESH, str(path)], capture_output=True, text=True, check=True
    )
    python, compiler, runtime, kilobytes = run.stdout.split()
    assert (python, compiler, runtime) == ("False", "False", "True")
    assert int(kilobytes) < 80_000


def test_a_library_may_be_called_from_many_threads(library, seed):
    problems = [AttentionProblem.parse(TEXTS[n % len(TEXTS)]) for n in range(16)]
    failures = []

    def work(number):
        try:
            for turn in range(5):
                check(library, problems[number], seed + turn)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert failures == []


def test_a_kernel_called_from_another_thread_has_the_librarys_threads(path, seed):
    library = attentune.load_library(path, threads=1)
    problem = AttentionProblem.parse(TEXTS[0])
    inputs = random_inputs(problem, seed)
    counts = []

    def work():
        library[AttentionKey.from_problem(problem)](inputs["query"], inputs["key"], inputs["value"])
        counts.append(threads._this_thread.count)

    one = threading.Thread(target=work)
    one.start()
    one.join()
    assert counts == [1]


def test_two_libraries_in_one_process(path, tmp_path, seed):
    other = tmp_path / "other.so"
    attentune.export_library(["1,2,2,64,64,16,16:float32"], path=other)
    first, second = attentune.load_library(path), attentune.load_library(other)
    check(second, AttentionProblem.parse("1,2,2,64,64,16,16:float32"), seed)
    check(first, AttentionProblem.parse(TEXTS[0]), seed)
    del second
    check(first, AttentionProblem.parse(TEXTS[0]), seed)


def test_a_key_that_is_missing(path, library, seed, caplog):
    near = AttentionProblem.parse("1,4,4,700,900,64,64:float32")
    mine = attentune.load_library(path)
    check(mine, near, seed)
    check(mine, near, seed)
    assert mine.steps == {"miss": 1}
    assert sum("stepping down" in record.message for record in caplog.records) == 1
    with pytest.raises(RecordNotFound, match="has no kernel for query_dtype float32"):
        check(attentune.load_library(path, on_miss="error"), near, seed)
    with pytest.raises(RecordNotFound, match="head_dim 65"):
        check(library, AttentionProblem.parse("1,4,4,128,128,65,64:float32"), seed)


def test_a_mask_for_all_queries_is_served_by_a_kernel_for_dense_ones(tmp_path, seed):
    path = tmp_path / "masked.so"
    attentune.export_library(["1,4,4,64,64,16,16:float32:mask"], path=path)
    check(
        attentune.load_library(path),
        AttentionProblem.parse("2,2,2,1,64,16,16:float32:mask=padding"),
        seed,
    )


def test_without_memory_it_steps_down(path, seed):
    key = AttentionKey.from_problem(AttentionProblem.parse(TEXTS[0]))
    library = attentune.load_library(path, memory_bytes=0)
    with pytest.raises(attentune.errors.Unsupported, match="has the memory that"):
        check(library, AttentionProblem.parse(TEXTS[0]), seed)
    assert sum(library.steps.values()) == len(library.manifest.choose(key)[0].choices)


def test_records_decide_and_a_database_is_exported(tmp_path):
    problem = AttentionProblem.parse("1,2,2,64,64,16,16:float32")
    key = AttentionKey.from_problem(problem)
    variant = next(v for v in attentune.api.supported(key, native()) if v.name == "flash_unit")
    parameters = list(variant.points(key, native(), variant.structures(key, native())[0]))[1]
    database = Database(tmp_path / "records.sqlite")
    database.put(
        a_record(
            key=key, target=str(native()), variant="flash_unit", parameters=parameters, losers=(),
            versions=attentune.versions.current_versions(), fingerprint=variant.fingerprint(),
        )
    )  # fmt: skip
    made = attentune.export_library(database, path=tmp_path / "a.so")
    assert [entry.key for entry in made.entries] == [key]
    (code,) = made.codes
    assert (code.variant, dict(code.parameters)) == ("flash_unit", parameters)
    database.put(a_record(key=key, target=str(native()), variant="flash_unit"))
    with pytest.raises(RecordNotFound, match="has no record for"):
        attentune.export_library(tmp_path / "records.sqlite", path=tmp_path / "b.so")


def test_what_cannot_be_exported(tmp_path):
    out = tmp_path / "a.so"
    with pytest.raises(InvalidParameters, match="no key to export"):
        attentune.export_library([], path=out)
    problem = AttentionProblem.parse("1,2,2,65,65,16,16:float32")
    key = AttentionKey.from_problem(problem, "minimal")
    with pytest.raises(InvalidParameters, match="at the level balanced"):
        attentune.export_library(key, path=out)
    with pytest.raises(RecordNotFound, match="The database has no record"):
        attentune.export_library(TEXTS, path=out, on_miss="error")
    with pytest.raises(MissingToolchain, match="cannot be run"):
        attentune.export_library(TEXTS[0], path=out, compiler=["no-such-linker"])
    with pytest.raises(MissingToolchain, match="failed"):
        attentune.export_library(TEXTS[0], path=out, compiler=[sys.executable, "-c", "exit(1)"])
    assert list(tmp_path.iterdir()) == []


ARM = {"kind": "llvm", "mtriple": "aarch64-unknown-linux-gnu", "mcpu": "generic", "num-cores": 4}
CROSS_COMPILER = "aarch64-linux-gnu-gcc"


def links(compiler, folder):
    """Whether a compiler is installed, and the libraries that it links."""
    (folder / "empty.c").write_text("")
    command = [compiler, "-shared", "-o", str(folder / "empty.so"), str(folder / "empty.c")]
    return (
        shutil.which(compiler) is not None and not subprocess.run(command, check=False).returncode
    )


def test_a_library_for_another_instruction_set(tmp_path):
    path = tmp_path / "arm.so"
    if native().arch == "aarch64":
        pytest.skip("this is the other instruction set")
    if not links(CROSS_COMPILER, tmp_path):
        message = f"takes the cross compiler {CROSS_COMPILER}|{CROSS_COMPILER} failed"
        with pytest.raises(MissingToolchain, match=message):
            attentune.export_library(TEXTS[0], ARM, path)
        return
    made = attentune.export_library(TEXTS[0], ARM, path)
    assert (made.arch, made.cpu_flags) == ("aarch64", ("asimd",))
    assert path.read_bytes()[18:20] == b"\xb7\x00"  # ELF's number of AArch64
    with pytest.raises(UnsupportedMachine, match="is for aarch64, and this machine is"):
        attentune.load_library(path)


@pytest.mark.skipif(native().arch != "x86_64", reason="needs an x86 CPU")
def test_a_library_for_a_lesser_cpu(tmp_path, seed):
    made = attentune.export_library(TEXTS[0], AVX2, tmp_path / "avx2.so")
    assert "avx2" in made.cpu_flags
    assert not [flag for flag in made.cpu_flags if flag.startswith("avx512")]
    check(attentune.load_library(tmp_path / "avx2.so"), AttentionProblem.parse(TEXTS[0]), seed)


def test_twenty_keys_are_small(tmp_path):
    texts = [f"1,{heads},{heads},{seq},{seq},64,64:float32{causal}" for heads in (4, 8)
             for seq in (64, 128, 256, 512, 1024) for causal in ("", ":causal")]  # fmt: skip
    made = attentune.export_library(texts, path=tmp_path / "twenty.so")
    assert len(made.entries) == 20
    assert (tmp_path / "twenty.so").stat().st_size < 3_000_000


def test_a_kernel_that_the_code_lacks(path, tmp_path):
    with pytest.raises(CorruptLibrary, match="lacks the kernel"):
        attentune.load_library(changed(path, tmp_path / "changed.so", rename))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["keys"][0].update(key="rubbish"),
        lambda data: data["keys"][0]["kernels"][0].update(symbol="other"),
        lambda data: data.pop("keys"),
        lambda data: data.update(level="fine"),
    ],
)
def test_a_manifest_that_makes_no_sense(path, tmp_path, change):
    with pytest.raises(CorruptLibrary, match="is damaged"):
        attentune.load_library(changed(path, tmp_path / "changed.so", change))


def test_a_file_damaged_anywhere(path, tmp_path, seed):
    content = path.read_bytes()
    rng = random.Random(seed)
    damaged = tmp_path / "damaged.so"
    for _ in range(50):
        place = rng.randrange(len(content) - 8)
        damaged.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        )
        with pytest.raises(attentune.errors.LibraryError):
            attentune.load_library(damaged)
        damaged.write_bytes(content[:place])
        with pytest.raises(attentune.errors.LibraryError):
            attentune.load_library(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "sparc"}, "is for sparc, and this machine is"),
        ({"cpu_flags": ["amx9"]}, "needs the CPU features amx9, which this CPU lacks"),
    ],
)
def test_another_machine(path, tmp_path, change, message):
    with pytest.raises(UnsupportedMachine, match=message):
        attentune.load_library(
            changed(path, tmp_path / "changed.so", lambda data: data.update(change))
        )


def test_output_of_the_callers(library, seed):
    problem = AttentionProblem.parse(TEXTS[0])
    inputs = random_inputs(problem, seed)
    for out, message in (
        (inputs["value"], "out overlaps value in memory"),
        (np.empty((1, 4, 128, 63), np.float32), "out has shape"),
        (np.empty((1, 4, 128, 64), np.float16), "element type float16"),
        (np.empty((1, 4, 128, 128), np.float32)[..., ::2], "innermost axis must be contiguous"),
    ):
        with pytest.raises(InvalidProblem, match=message):
            call(library, problem, inputs, out=out)
    with pytest.raises(UnsupportedArray):
        call(library, problem, inputs, out=[1])


def test_choice_is_the_nearest_key():
    def entry(text):
        key = AttentionKey.from_problem(AttentionProblem.parse(text))
        return Entry(key, 1, (Choice(text, 0, 0),))

    near, far, other = (
        entry("1,4,4,64,64,16,16:float32"),
        entry("1,4,4,4096,4096,16,16:float32"),
        entry("1,4,4,64,64,16,16:float16"),
    )
    made = Manifest("balanced", "t", "x86_64", (), {}, (), (far, near, other))

    def choice(text):
        found = made.choose(AttentionKey.from_problem(AttentionProblem.parse(text)))
        return None if found is None else (found[0], found[1])

    assert choice("1,3,3,60,60,16,16:float32") == (near, True)
    assert choice("1,4,4,128,128,16,16:float32") == (near, False)
    assert choice("1,4,4,2048,2048,16,16:float32") == (far, False)
    assert choice("1,4,4,512,512,16,16:float32") == (far, False)  # as far from both: the first
    assert choice("1,4,4,64,64,16,16:bfloat16") is None
    assert choice("1,4,4,64,64,16,16:float16:relaxed") is None


def test_a_folder_is_no_library(tmp_path):
    with pytest.raises(attentune.errors.LibraryNotFound, match=os.strerror(21)):
        attentune.load_library(tmp_path)
