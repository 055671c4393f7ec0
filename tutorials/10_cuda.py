# %% [markdown]
# # 10. A CUDA kernel without a GPU
#
# A target is a description. Naming one that is not here gives its plan, its schedule and its source; only running it
# takes the machine.

# %%
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

import attentune
from attentune.group import Policy

problem = "1,8,8,512,512,64,64:float16:causal"
for target in ("cuda:sm_70", "cuda:sm_80"):
    parsed = attentune.Target.parse(target)
    print(target, "has tensor cores for", ", ".join(parsed.cmma_dtypes))
    print("  plan:", attentune.plan(problem, target).batches)

# %% [markdown]
# Here is one of them, by a policy that knows nothing else: online softmax without tensor cores.

# %%
alone = Policy("alone", ("flash_unit",), ())
kernel = attentune.build(problem, "cuda:sm_80", policy=alone)
print(kernel.variant, dict(kernel.parameters))

# %% [markdown]
# ## The schedule
#
# The kernel is the same TensorIR as a CPU's. A schedule for GPUs binds its loops: one block of threads for 64 queries of a
# head, and each stage inside spread over the same threads.

# %%
bound = re.findall(r'T.thread_binding\((.+), thread="(.+)"\)', kernel.source)
for (extent, name), loops in Counter(bound).items():
    print(f"{name} takes {loops} loops of {extent}")

# %% [markdown]
# ## The source
#
# What TVM makes of it is one function of CUDA C. Here is how it starts, and where it keeps what.

# %%
source = kernel.assembly
body = source[source.rindex('extern "C"') :]
print(re.sub(r", ", ",\n    ", body[: body.index("{") + 1]))
for line in body.splitlines():
    if "__shared__" in line or "alignas" in line:
        print(line)

# %% [markdown]
# Scores, sums and the output are float although the arrays are half, and so nothing overflows. They are in registers;
# what the threads of a block share is in shared memory, and a barrier stands between those who write it and those who read.

# %%
barriers = body.count("__syncthreads()")
print(f"{len(body.splitlines())} lines, {barriers} barriers")

# %% [markdown]
# ## The machine code
#
# With NVIDIA's compiler on the path (it needs no GPU either) the source becomes code for the GPU, and `ptxas` says what a
# thread takes.

# %%
nvcc = shutil.which("nvcc")
if nvcc is None:
    print("nvcc is not on the path")
else:
    folder = Path(tempfile.mkdtemp())
    (folder / "kernel.cu").write_text(source)
    command = [nvcc, "-arch=sm_80", "-cubin", "-Xptxas", "-v", "-o", folder / "kernel.cubin"]
    compiled = subprocess.run(
        [*command, folder / "kernel.cu"], capture_output=True, text=True, check=True
    )
    print(
        *(line for line in compiled.stderr.splitlines() if "registers" in line or "spill" in line)
    )
    print(f"{(folder / 'kernel.cubin').stat().st_size / 1024:.0f} KiB of code")

# %% [markdown]
# A call without the GPU is refused. The package's own tests run this source on the CPU nevertheless, in an emulator that
# reports races and accesses outside of arrays: `tests/emulator`.

# %%
array = np.zeros((1, 8, 512, 64), np.float16)
refused = None
try:
    kernel(array, array, array)
except attentune.errors.AttentuneError as error:
    refused = type(error).__name__
    print(f"{refused}: {error}")

# %%
threads = kernel.parameters["threads"]
assert f"__launch_bounds__({threads})" in source
assert "float product_local_ptr" in body
assert "half product_local_ptr" not in body
assert barriers > 0
assert refused is not None
