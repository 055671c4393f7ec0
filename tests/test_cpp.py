"""The C++ runtime: built, tested by ctest, installed, and found by an application."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attentune

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent
# Where the extra `test` installs them; a virtual environment need not be activated.
PATH = os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])
NEEDED = ("cmake", "ctest", "ninja", "c++")
MISSING = [name for name in NEEDED if shutil.which(name, path=PATH) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} to build C++"),
]


def run(*command, folder=ROOT):
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": PATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def configure(source, build, *more):
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Release", *more)  # fmt: skip
    run("cmake", "--build", build)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpp") / "build"
    configure(ROOT, folder)
    return folder


def test_its_own_tests(build):
    print(run("ctest", "--test-dir", build, "--output-on-failure", "--verbose"))


def test_an_application_finds_the_package(build, tmp_path):
    prefix, app, library = tmp_path / "prefix", tmp_path / "app", tmp_path / "attention.so"
    run("cmake", "--install", build, "--prefix", prefix)
    configure(ROOT / "tutorials" / "cpp", app, f"-DCMAKE_PREFIX_PATH={prefix}")
    attentune.export_library("1,4,4,128,128,64,64:float32", path=library)
    out = run(app / "attention_app", library)
    assert "greatest error" in out
    failed = subprocess.run(
        [app / "attention_app", ROOT / "README.md"], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    assert "is not a library that attentune exported" in failed.stderr


# TVM's own pool is not instrumented, so that what it does between its threads looks like races.
SUPPRESSIONS = """
called_from_lib:libtvm_runtime.so
called_from_lib:libtvm_ffi.so
race:libtvm_runtime.so
"""


def test_no_race_in_our_code(build, tmp_path):
    source, program = tmp_path / "empty.cc", tmp_path / "empty"
    source.write_text("int main() {}")
    flags = ["-fsanitize=thread"]
    probe = subprocess.run(["c++", *flags, source, "-o", program], capture_output=True, check=False)
    if probe.returncode != 0 or subprocess.run([program], check=False).returncode != 0:
        pytest.skip("the compiler has no thread sanitizer, or the system does not let it run")
    suppressions = tmp_path / "suppressions"
    suppressions.write_text(SUPPRESSIONS)
    run("cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja",
        f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DCMAKE_CXX_FLAGS={flags[0]}")  # fmt: skip
    run("cmake", "--build", tmp_path / "build", "--target", "test_threads")
    fixture = build / "tests" / "cpp" / "fixture"
    if not fixture.exists():
        run("ctest", "--test-dir", build, "--tests-regex", "export")
    done = subprocess.run(
        [tmp_path / "build" / "tests" / "cpp" / "test_threads", fixture, "1"],
        env={**os.environ, "TSAN_OPTIONS": f"suppressions={suppressions}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "ThreadSanitizer" in done.stderr) == (0, False), done.stderr[:4000]
