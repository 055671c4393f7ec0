# %% [markdown]
# # 2. The attention key and its buckets
#
# A kernel is tuned once and then serves many calls. Which ones is what the *key* says: it is the problem, with batch
# and lengths rounded up to buckets.

# %%
import matplotlib.pyplot as plt

import attentune

# %%
problem = attentune.AttentionProblem.parse("2,8,8,100,300,64,64:float32:causal")
key = attentune.AttentionKey.from_problem(problem)
print(key)

# %% [markdown]
# `seq_q` went from 100 to 128, `seq_kv` from 300 to 512, and 2 x 8 heads are 16 batches. `head_dim` is exact: it is
# part of the code. The text parses back.

# %%
assert attentune.AttentionKey.parse(str(key)) == key

# %% [markdown]
# How coarse the buckets are is the *level*: powers of 2.5, 2 or 1.5, or none at all.

# %%
fig, ax = plt.subplots(figsize=(6, 3.4))
lengths = range(1, 700)
for level in ("minimal", "balanced", "extensive", "full"):
    anchored = [
        attentune.AttentionKey.from_problem(
            attentune.AttentionProblem(1, 1, 1, length, length, 64, 64, "float32"), level
        ).seq_q
        for length in lengths
    ]
    ax.plot(lengths, anchored, label=f"{level}: {len(set(anchored))} buckets")
ax.set(xlabel="seq_q of the call", ylabel="seq_q of the key")
ax.legend()
plt.show()

# %% [markdown]
# What is tuned is the upper corner of a bucket, whichever call came first.

# %%
print(key.representative())


# %% [markdown]
# Two calls that need other code have other keys, however alike they look.


# %%
def key_of(text):
    return attentune.AttentionKey.from_problem(attentune.AttentionProblem.parse(text))


base = "2,8,8,100,300,64,64:float32"
for option in (":causal", ":mask", ":mask=padding", ":bias", ":softcap=50", ":window=64/0"):
    assert key_of(base + option) != key_of(base)

# %% [markdown]
# And calls of one bucket have one key, so that the second one finds the kernel of the first.

# %%
assert key_of("2,8,8,65,300,64,64:float32") == key_of("1,16,16,128,257,64,64:float32")
