# %% [markdown]
# # 6. A database: inspect, merge, ship
#
# What tuning finds is kept in one SQLite file, which many processes may use at once.

# %%
import tempfile
from pathlib import Path

import attentune

folder = Path(tempfile.mkdtemp())
small = "1,4,4,64,64,32,32:float32"
causal = "1,4,4,64,64,32,32:float32:causal"

# %%
with attentune.Database(folder / "here.sqlite") as here:
    attentune.tune(small, database=here, trials=4)
    for one in here.records():
        print(one.key.representative())

# %% [markdown]
# A record has all its times, and every loser with its reason. `attentune report` shows the same as a page.

# %%
with attentune.Database(folder / "here.sqlite", read_only=True) as here:
    record = here.records()[0]
print(record.variant, dict(record.parameters), f"{1e6 * record.seconds:.0f} us")
for loser in record.losers[:4]:
    print(f"  {loser.variant}: {loser.outcome}: {loser.reason}")

# %% [markdown]
# Another machine of the same kind has tuned another problem. Merging takes what is missing here, and of a key and
# target that both have the better record.

# %%
with attentune.Database(folder / "there.sqlite") as there:
    attentune.tune(causal, database=there, trials=4)
with attentune.Database(folder / "here.sqlite") as here:
    taken = here.merge(folder / "there.sqlite")
    merged = here.records()
print(f"{taken} record taken over, {len(merged)} in all:")
for one in merged:
    print(" ", one.key.representative())

# %% [markdown]
# Records ship as lines of JSON: the same records are the same bytes, so that they may be kept under version control.

# %%
with attentune.Database(folder / "here.sqlite") as here:
    here.export_jsonl(folder / "records.jsonl")
with attentune.Database(folder / "shipped.sqlite") as shipped:
    shipped.import_jsonl(folder / "records.jsonl")
    shipped.export_jsonl(folder / "again.jsonl")

# %% [markdown]
# A call finds them, and `on_miss="error"` makes sure of it.

# %%
kernel = attentune.build(small, database=folder / "shipped.sqlite", on_miss="error")
print(kernel.variant, kernel.parameters)

# %%
assert (folder / "records.jsonl").read_bytes() == (folder / "again.jsonl").read_bytes()
assert taken == 1
assert kernel.parameters == dict(record.parameters)
