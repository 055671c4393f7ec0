# %% [markdown]
# # 8. An exported library, from Python and from C++
#
# What was tuned ships as one shared library. Whoever loads it needs neither the compiler nor the database: a 3 MB runtime
# of TVM's and, in C++, a few files of ours.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import attentune

folder = Path(tempfile.mkdtemp())
problems = ["1,4,4,128,128,64,64:float32", "1,4,4,128,128,64,64:float32:causal"]
attentune.export_library(problems, path=folder / "attention.so")
for file in sorted(folder.iterdir()):
    print(f"{file.name}: {file.stat().st_size / 1024:.0f} KiB")

# %% [markdown]
# ## From Python
#
# A library is a mapping from keys to kernels. Nothing was tuned here, so they are those that a call would take untuned;
# with `database=` they are the tuned ones.

# %%
library = attentune.load_library(folder / "attention.so")
for key, kernel in library.items():
    print(key.representative(), kernel.variant, dict(kernel.parameters))

# %% [markdown]
# And it is called as `attentune.attention` is. One kernel serves its whole bucket, here every length from 65 to 128.

# %%
rng = np.random.default_rng(0)
errors = []
for length in (65, 100, 128):
    query, key, value = rng.standard_normal((3, 1, 4, length, 64), np.float32)
    out = library(query, key, value, is_causal=True)
    exact = attentune.reference.attention(query, key, value, is_causal=True)
    errors.append(float(np.abs(out - exact).max()))
errors

# %% [markdown]
# The compiler is not even loaded. A process of its own shows it:

# %%
program = f"""
import sys, numpy, attentune
library = attentune.load_library({str(folder / "attention.so")!r})
query = numpy.ones((1, 4, 100, 64), numpy.float32)
library(query, query, query)
print("the compiler is loaded:", "tvm" in sys.modules)
"""
alone = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
print(alone.stdout)

# %% [markdown]
# A call that no kernel of the library can serve is refused, by name.

# %%
try:
    library(*(array.astype(np.float16) for array in (query, key, value)))
except attentune.errors.AttentuneError as error:
    refused = type(error).__name__
    print(f"{refused}: {error}".replace(f"{folder}/", ""))

# %% [markdown]
# ## From C++
#
# The runtime builds from the repository with CMake and installs as a package; `tutorials/cpp` is an application that finds
# it, opens a library, and checks one call against the formula. It takes a C++ compiler, CMake and Ninja.

# %%
repository = Path.cwd().parent
app = repository / "tutorials" / "cpp"
source = (app / "main.cc").read_text()
begin = source.index("    const auto library")
print((app / "CMakeLists.txt").read_text())
print(source[begin : source.index("    std::mt19937")], "...")
begin = source.index("    const auto out")
print(source[begin : source.index("    const auto* result")])


# %%
def run(*command):
    # CMake and Ninja may be this environment's, and it need not be activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "Python_EXECUTABLE": sys.executable}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source, *more):
    python = f"-DPython_EXECUTABLE={sys.executable}"
    target = folder / source.name
    run("cmake", "-G", "Ninja", "-S", source, "-B", target, "-DBUILD_TESTING=OFF", python, *more)
    run("cmake", "--build", target)
    return target


runtime = build(repository)
run("cmake", "--install", runtime, "--prefix", folder / "prefix")
application = build(app, f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}") / "attention_app"
printed = run(application, folder / "attention.so")
print(printed)

# %%
assert max(errors) < 1e-5
assert alone.stdout == "the compiler is loaded: False\n"
assert refused == "RecordNotFound"
assert float(printed.split("greatest error ")[1]) < 1e-5
