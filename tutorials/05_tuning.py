# %% [markdown]
# # 5. Tuning, watched
#
# For each batch of the plan, MetaSchedule proposes candidates, a child process builds and measures them, and after the
# first 16 a cost model guesses which are worth the next turn. The best ten are then built again, checked against the
# float64 reference, and measured side by side. `on_event` is told of all of it.

# %%
import matplotlib.pyplot as plt

import attentune
from attentune.search.peaks import machine_peaks
from attentune.search.roofline import work

problem = attentune.AttentionProblem.parse("1,4,4,256,256,64,64:float32")
events = []
(record,) = attentune.tune(problem, trials=32, on_event=events.append)

# %%
for event in events:
    if event["event"] in ("batch", "final"):
        print(event)

# %% [markdown]
# Every candidate in the order in which it was measured. The line is the best so far.

# %%
measured = [e for e in events if e["event"] == "measured" and e["seconds"]]
fig, ax = plt.subplots(figsize=(6.5, 3.4))
for name in sorted({e["variant"] for e in measured}):
    points = [(i, 1e3 * e["seconds"]) for i, e in enumerate(measured) if e["variant"] == name]
    ax.scatter(*zip(*points, strict=True), label=name, s=18)
times = [1e3 * e["seconds"] for e in measured]
ax.step(range(len(times)), [min(times[: i + 1]) for i in range(len(times))], where="post")
ax.axvline(15.5, linestyle=":", color="gray")
ax.set(xlabel="candidate (the cost model takes part from 16 on)", ylabel="ms", yscale="log")
ax.legend()
plt.show()

# %% [markdown]
# Each event has the cost model's guess from before the candidate was measured: its share of the speed of the fastest.
# If every guess were right, the points would fall from left to right. Which of two good ones is faster it hardly knows,
# having seen a few dozen; that is why candidates are measured.

# %%
guessed = [e for e in measured if e["guess"] is not None]
fig, ax = plt.subplots(figsize=(6.5, 3.4))
for name in sorted({e["variant"] for e in guessed}):
    chosen = [e for e in guessed if e["variant"] == name]
    ax.scatter([e["guess"] for e in chosen], [1e3 * e["seconds"] for e in chosen], label=name, s=18)
ax.set(xlabel="the cost model's guess", ylabel="ms")
ax.legend()
plt.show()

# %% [markdown]
# Measurements taken minutes apart rank badly, so the final measures in turns, round after round. Here is how it
# came out: medians, with a line from the least to the greatest sample.

# %%
ranked = sorted((one for one in record.losers if one.seconds), key=lambda one: one.seconds)
rows = [record, *ranked]
fig, ax = plt.subplots(figsize=(6.5, 3.4))
for place, one in enumerate(rows):
    samples = [1e3 * s for s in one.seconds_all]
    ax.barh(place, 1e3 * one.seconds, color="seagreen" if one is record else "lightsteelblue")
    ax.plot([min(samples), max(samples)], [place, place], color="black", linewidth=1)
ax.set_yticks(range(len(rows)), [f"{one.variant} {one.parameters['block_q']}" for one in rows])
ax.invert_yaxis()
ax.set_xlabel("ms; the name's number is block_q")
plt.show()

# %% [markdown]
# How good is that? A roofline says what the machine allows: operations cannot come faster than its peak, nor than
# memory brings what they work on. The peaks are measured once and kept; `attentune report` draws the same.

# %%
peaks = machine_peaks(attentune.Target.parse("native"))
needed = work(record.key.representative())
intensity = needed.flops / needed.bytes
best = {one.variant: needed.flops / one.seconds / 1e9 for one in reversed(rows)}

across = [2.0**e for e in range(-2, 11)]
roof = [min(peaks.flops_per_second, x * peaks.bytes_per_second) / 1e9 for x in across]
fig, ax = plt.subplots(figsize=(6.5, 3.4))
ax.loglog(across, roof, color="black")
for name, rate in best.items():
    ax.plot(intensity, rate, "o", label=f"{name}: {rate:.0f} GFLOP/s")
ax.set(xlabel="FLOP a byte", ylabel="GFLOP/s")
ax.legend(loc="lower right")
plt.show()

# %%
assert len(measured) >= 16
assert len(guessed) >= 8
assert {one.outcome for one in ranked} <= {"slower", "wrong"}
assert record.variant in record.batch
