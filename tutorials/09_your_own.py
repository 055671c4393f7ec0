# %% [markdown]
# # 9. Your own variant and your own policy
#
# Both are plain values that a call takes; nothing is registered.

# %%
from dataclasses import replace

import numpy as np

import attentune
from attentune.group import Group, Policy, always
from attentune.schedules.flash_unit import FLASH_UNIT

# %% [markdown]
# ## A variant
#
# A variant is a kernel, a schedule template, and the domains of their parameters. The shortest one of your own is one
# that ships with a part replaced: here flash attention with small blocks of keys only, for caches that are small.


# %%
def small_blocks(key, target):
    """Take as few keys at a time as it can."""
    return {**FLASH_UNIT.structure(key, target), "block_kv": (32, 16)}


def supports(key, target):
    """Serve float32 alone, and say so."""
    if key.query_dtype != "float32":
        return f"it has no schedule for {key.query_dtype}"
    return FLASH_UNIT.supports(key, target)


SMALL = replace(FLASH_UNIT, name="flash_small", structure=small_blocks, supports=supports)

# %% [markdown]
# ## A policy
#
# Variants are in groups. Priorities are functions: of the key, the target, and the memory. This one tries the small
# blocks first where heads are long, and everything else after.


# %%
def long_heads(context):
    return 5 if context.key.head_dim >= 128 else 1


MINE = Policy(
    "mine",
    ("flash_small", "flash_unit", "fallback"),
    (
        Group("small", long_heads, (("flash_small", always(0)),)),
        Group("rest", always(2), (("flash_unit", always(0)), ("fallback", always(0)))),
    ),
)
for text in ("1,4,4,128,128,128,128:float32", "1,4,4,128,128,64,64:float32"):
    print(text, attentune.plan(text, policy=MINE, variants=[SMALL]).batches)

# %% [markdown]
# ## Tuning with both
#
# The search, the correctness gate and the ranking are those of every other variant.

# %%
problem = "1,4,4,128,128,128,128:float32"
(record,) = attentune.tune(problem, trials=8, policy=MINE, variants=[SMALL])
print(record.variant, dict(record.parameters))

# %%
kernel = attentune.build(problem, policy=MINE, variants=[SMALL])
rng = np.random.default_rng(0)
arrays = [rng.standard_normal((1, 4, 100, 128), np.float32) for _ in range(3)]
error = np.abs(kernel(*arrays) - attentune.reference.attention(*arrays)).max()
print(kernel.variant, error)

# %% [markdown]
# A key that it does not support goes to the next batch, with the reason.

# %%
half = "1,4,4,128,128,128,128:float16"
(other,) = attentune.tune(half, trials=4, policy=MINE, variants=[SMALL])
print([(one.variant, one.reason) for one in other.losers if one.outcome == "unsupported"])

# %%
assert record.variant == kernel.variant == "flash_small"
assert error < 1e-5
assert other.variant in ("flash_unit", "fallback")
