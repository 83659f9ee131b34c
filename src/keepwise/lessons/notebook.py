"""The lesson as a notebook: plain Python with `# %%` cells."""

# %% [markdown]
# # Activation checkpointing from scratch
#
# Each cell asks, then runs. Write your guess down before you run the cell. Editors that know `# %%` show this file as a
# notebook; `python -m keepwise.lessons.notebook` runs it from top to bottom.

# %%
from __future__ import annotations

import keepwise
from keepwise.lessons import placements, plot
from keepwise.lessons.scratch import Drop, Keep, Offload
from keepwise.lessons.training import SharedMeter, network, train_step

blocks = network()  # eight blocks y = x + relu(x W1) W2; x has 64 floats, h and a have 256
full = train_step(blocks, placements.everything(8))
print(f"everything kept: {full.peak_floats:,} floats, {full.products} matrix products")

# %% [markdown]
# ## A plan by hand
#
# `Drop(inner)` keeps the input of a part and runs the part again in backward, under the plan `inner`.
# Guess: what is the peak if the first four layers are dropped as one segment and the last four are kept?

# %%
plan = (Drop(tuple(Keep(layer) for layer in range(4))), *(Keep(layer) for layer in range(4, 8)))
half = train_step(blocks, plan)
print(f"peak {half.peak_floats:,} floats, {half.forwards_again} layers again, difference {half.difference(full)}")
print(plot.area(half.timeline, top=full.peak_floats, title="kept floats over time"))

# %% [markdown]
# ## Every k layers
#
# Guess: which k is best? And which is worse than keeping everything?

# %%
for k in (1, 2, 4, 8):
    result = train_step(blocks, placements.every(8, k))
    print(f"k = {k}: {result.peak_floats:5,} floats, {result.forwards_again} again, {result.difference(full)}")

# %% [markdown]
# ## A checkpoint and a cache can be one array
#
# k = 8 kept 64 floats more than everything, because the segment's input was counted twice. Guess: what is left of the
# excess if an array that is held twice is charged once?

# %%
result = train_step(blocks, placements.every(8, 8), meter=SharedMeter())
print(f"k = 8, shared storage: {result.peak_floats:,} floats")

# %% [markdown]
# ## Tensors instead of layers
#
# Keep only x and a. Guess: how many matrix products have to run again?

# %%
result = train_step(blocks, placements.everything(8, "xa"))
print(f"x and a: {result.peak_floats:,} floats, {result.products - full.products} products again")

# %% [markdown]
# ## Mixed
#
# The first layers on the host, some dropped, the last ones kept. Guess: are the gradients still the same to the last
# bit?

# %%
mixed = (Offload(0), Offload(1), Drop((Drop((Keep(2), Keep(3))), Keep(4, "xa"))), Keep(5, "x"), Keep(6), Keep(7))
result = train_step(blocks, mixed)
print(f"mixed: {result.peak_floats:,} floats, {result.moved_floats:,} moved, difference {result.difference(full)}")

# %% [markdown]
# ## Dropout
#
# Guess: how large is the error if the random state is not put back?

# %%
noisy = network(dropout=0.1)
reference = train_step(noisy, placements.everything(8))
for restore in (True, False):
    result = train_step(noisy, placements.every(8, 2, restore_random=restore))
    print(f"random state {'saved' if restore else 'not saved'}: difference {result.difference(reference):.1e}")

# %% [markdown]
# ## A budget
#
# Guess: with 2,000 floats, how many layers have to run again?

# %%
chosen = placements.best([4 * 16] * 8, [4 * 16 + 2 * 4 * 64] * 8, 2_000)
result = train_step(blocks, chosen)
print(f"{result.peak_floats:,} floats, {result.forwards_again} layers again")
for part in chosen:
    print("   ", part)

# %% [markdown]
# ## In PyTorch
#
# The same blocks as modules, under `keepwise.checkpoint`. Guess: does PyTorch keep x, h and a of a block, or fewer?

# %%
from keepwise.lessons import torch_lesson  # noqa: E402 - torch is loaded only here

plain = torch_lesson.run()
one = torch_lesson.run(1, keepwise.checkpoint)
print(f"plain: {plain.kept_floats:,} floats kept when forward ends, {plain.products} matrix products")
print(f"k = 1: {one.kept_floats:,} floats, {one.products} products, difference {one.difference(plain)}")
