"""`fit`, `Plan`, `verify` and `frontier`: the only room that knows all the others.

Read in this order: `fit` (the public call), `fitting` (one call of it, from the recorded step to the proved plan), `planning` (budget and
planner to a schedule that the judge accepted), `admit` (real steps that prove it), `plan` (what the user holds), `document` (the same on
disk), `decisions` (what happens to each tensor, and why), `ladder` and `switch` (batches of other sizes and structures), `overheads` (what
a plan costs besides its replays). `verify`, `frontier` and `replan` stand beside `fit`.
"""
