# %% [markdown]
# # 3. Groups and the plan
#
# A *variant* is one way to compute attention. Which are worth trying depends on the key and the machine, and a
# *policy* says so: it puts variants into groups with priorities. The *plan* is what comes out: batches, of which a
# later one is only tried if everything in the earlier ones failed.

# %%
import matplotlib.pyplot as plt

import attentune

PROBLEMS = {
    "short queries": "1,8,8,64,512,128,128:float16",
    "long queries": "1,8,8,512,512,128,128:float16",
    "one query": "1,8,8,1,4096,128,128:float16",
}
TARGETS = {"a GPU with tensor cores": "cuda:sm_80", "this CPU": "native"}

# %%
plan = attentune.plan(PROBLEMS["long queries"], "cuda:sm_80", policy="seed")
plan.batches


# %% [markdown]
# The policy `seed` looks at two things only: whether the target has a matrix unit (cmma), and whether there are more
# queries than a head has elements. Then materialized scores, which the fallback needs, are larger than the keys.
# `default` mends what that gets wrong, and is what a call gets. Both, drawn: darker is tried earlier, white not at all.


# %%
def draw(policy):
    names = attentune.plan(PROBLEMS["one query"], "native", policy="default").batches
    names = sorted({name for batch in names for name in batch})
    rows = [(problem, target) for problem in PROBLEMS for target in TARGETS]
    fig, ax = plt.subplots(figsize=(7, 3))
    for y, (problem, target) in enumerate(rows):
        batches = attentune.plan(PROBLEMS[problem], TARGETS[target], policy=policy).batches
        for place, batch in enumerate(batches):
            for name in batch:
                shade = plt.cm.Blues(0.9 - 0.3 * place)
                ax.barh(y, 0.92, left=names.index(name), color=shade)
                ink = "black" if place else "white"
                ax.text(names.index(name) + 0.46, y, place + 1, ha="center", va="center", color=ink)
    ax.set_yticks(range(len(rows)), [f"{problem}, {target}" for problem, target in rows])
    ax.set_xticks([i + 0.46 for i in range(len(names))], names, rotation=25, ha="right")
    ax.invert_yaxis()
    ax.set_title(f"policy {policy}: the batch of each variant")
    plt.show()


draw("seed")

# %%
draw("default")

# %% [markdown]
# A plan names what a policy wants, whether or not this version has a kernel of it; a variant that cannot serve a key
# loses with its reason. Planning loads no compiler.

# %%
assert plan.batches[1:] == (("flash_unit",), ("fallback",))
short = attentune.plan(PROBLEMS["short queries"], "cuda:sm_80", policy="seed")
assert "fallback" in short.batches[0]
