# %% [markdown]
# # 1. Attention, once
#
# From the formula to a compiled kernel, and PyTorch as a witness.
#
# Attention compares each query with every key, turns the scores into weights, and mixes the values by them:
#
# $$O = \operatorname{softmax}\left(\frac{Q K^T}{\sqrt{D}}\right) V$$

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import attentune

# %% [markdown]
# Arrays are `[batch, heads, seq, dim]`. Here are 2 heads, 48 queries, 64 keys of 32 elements, and a causal mask:
# with more keys than queries the last query sees all of them.

# %%
rng = np.random.default_rng(0)
query = rng.standard_normal((1, 2, 48, 32), np.float32)
key = rng.standard_normal((1, 2, 64, 32), np.float32)
value = rng.standard_normal((1, 2, 64, 32), np.float32)

# %% [markdown]
# The formula in NumPy, step by step.

# %%
scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(32)
visible = np.arange(64) <= np.arange(48)[:, None] + 64 - 48
scores = np.where(visible, scores, -np.inf)
weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
weights /= weights.sum(axis=-1, keepdims=True)
by_hand = weights @ value

# %%
fig, ax = plt.subplots(figsize=(5, 3.4))
ax.imshow(weights[0, 0], cmap="viridis")
ax.set(xlabel="key", ylabel="query", title="weights of head 0")
plt.show()

# %% [markdown]
# The same in one call. It compiles a kernel for this CPU at the first call of a kind and reads the arrays in place.

# %%
out = attentune.attention(query, key, value, is_causal=True)
out.shape, out.dtype

# %% [markdown]
# PyTorch counts the causal diagonal from the top left, so it is given the mask instead.

# %%
tensors = [torch.from_numpy(a) for a in (query, key, value)]
from_torch = torch.nn.functional.scaled_dot_product_attention(
    *tensors, attn_mask=torch.from_numpy(visible)
).numpy()
exact = attentune.reference.attention(query, key, value, is_causal=True)  # in float64

# %%
errors = {
    name: float(np.abs(result - exact).max())
    for name, result in (("by hand", by_hand), ("PyTorch", from_torch), ("attentune", out))
}
errors

# %%
assert all(error < 1e-5 for error in errors.values())
