# %% [markdown]
# # 4. A flash kernel and its schedule, step by step
#
# Flash attention goes through the keys block by block and keeps, for each query, the greatest score, the sum of
# exponentials and the output so far. The kernel is TensorIR that says *what* is computed, in named stages; a schedule
# says *how*. Here is the kernel, and then one step of the schedule after another, with its time.

# %%
import re
import time

import matplotlib.pyplot as plt
import numpy as np

import attentune
from attentune.group import Group, Policy, always
from attentune.kernels.flash import flash
from attentune.kernels.spec import KernelSpec
from attentune.schedules import common
from attentune.variant import Variant

problem = attentune.AttentionProblem.parse("1,4,4,256,256,64,64:float32")
key = attentune.AttentionKey.from_problem(problem)

# %% [markdown]
# The kernel is symbolic in batch, heads and lengths. Its stages, in order; those from `product` to `commit_out` run
# once a block of 64 keys. Queries are the last axis of each, so that a vector holds one value of several queries.

# %%
source = flash(KernelSpec.from_key(key), block_q=64, block_kv=64).script()
for line in source.splitlines():
    if re.search(r"with T.sblock|in T.grid|in range", line) and '"root"' not in line:
        print(line.removeprefix("    ").replace("    ", "  "))

# %% [markdown]
# ## The steps
#
# Each is a function of a schedule, made of one primitive of `attentune.schedules.common`, whose docstring has its own
# loop nest before and after. They are most of what `flash_unit` does on a CPU.


# %%
def tile_scores(sch, width):
    """Compute the scores in register tiles, four keys by a vector of queries."""
    common.tile_product(sch, "product", "score", 4, 1, width)


def tile_output(sch, width):
    """Compute weights times values likewise, and add each tile to the output as it is stored."""
    common.tile_product(sch, "block_out", "new_out", 4, 1, width)


def softmax_in_registers(sch, width):
    """Take the maximum over keys in a register, and sum each weight as it is computed."""
    common.reduce_in_registers(sch, "block_max", 1, width)
    common.reduce_in_registers(sch, "block_sum", 1, width, producer="weight")


def parallelize(sch, width):
    """Give each core blocks of queries."""
    common.parallelize_tasks(sch, "task")


STEPS = (tile_scores, tile_output, softmax_in_registers, parallelize)


# %% [markdown]
# A variant is a kernel with a schedule; one that stops after some of the steps is a variant as well. A policy with
# nothing else in it makes `build` take it.


# %%
def stopped_after(count):
    def schedule(sch, spec, target, parameters):
        for step in STEPS[:count]:
            step(sch, common.lanes(target))

    name = f"after_{count}"
    variant = Variant(
        name=name,
        supports=lambda key, target: None,
        structure=lambda key, target: {},
        space=lambda key, target, structure: {},
        kernel=lambda spec, parameters: flash(spec, block_q=64, block_kv=64),
        schedule=schedule,
        workspace=lambda problem, target, parameters: 1 << 20,
    )
    policy = Policy(name, (name,), (Group(name, always(0), ((name, always(0)),)),))
    return attentune.build(problem, policy=policy, variants=[variant])


kernels = [stopped_after(count) for count in range(len(STEPS) + 1)]

# %% [markdown]
# ## Before and after each
#
# The TVMScript around the stage that a step changes.


# %%
def around(kernel, block):
    """Return a stage with the loops around it, without what it reads and writes."""
    lines = [line for line in kernel.source.splitlines() if "T.reads" not in line]
    at = next(i for i, line in enumerate(lines) if f'T.sblock("{block}' in line)
    first = next(i for i in range(at, 0, -1) if " for " not in lines[i - 1])
    shown = [line for line in lines[first : at + 15] if "T.writes" not in line]
    indent = len(shown[0]) - len(shown[0].lstrip())
    return "\n".join(line[indent:][:110] for line in shown if line.strip())


CHANGED = ("product", "block_out", "block_sum", "task")
for count, (step, block) in enumerate(zip(STEPS, CHANGED, strict=True)):
    print(f"======== {step.__name__}: {step.__doc__}")
    print(f"-------- before\n{around(kernels[count], block)}")
    print(f"-------- after\n{around(kernels[count + 1], block)}\n")

# %% [markdown]
# ## The speed after each

# %%
rng = np.random.default_rng(0)
arrays = [rng.standard_normal((1, 4, 256, 64), np.float32) for _ in range(3)]


def seconds(kernel):
    samples = []
    kernel(*arrays)
    for _ in range(9):
        begin = time.perf_counter()
        kernel(*arrays)
        samples.append(time.perf_counter() - begin)
    return min(samples)


times = [seconds(kernel) for kernel in kernels]
names = ["no schedule", *(step.__name__ for step in STEPS)]
fig, ax = plt.subplots(figsize=(6.5, 2.8))
bars = ax.barh(names, [1e3 * one for one in times], color="lightsteelblue")
ax.bar_label(bars, [f"{1e3 * one:.2f} ms" for one in times], padding=4)
ax.invert_yaxis()
ax.set(xlabel="ms", xlim=(0, 1.2e3 * max(times)), title="after each step, with those before it")
plt.show()
for name, one in zip(names, times, strict=True):
    print(f"{name:22} {1e3 * one:7.3f} ms, {times[0] / one:5.1f} times as fast")

# %% [markdown]
# No step changed what is computed, at this or at another length of the bucket.

# %%
for length in (256, 131):
    cut = [array[:, :, :length] for array in arrays]
    exact = attentune.reference.attention(*cut)
    for kernel in kernels:
        assert np.abs(kernel(*cut) - exact).max() < 1e-5
