"""The first half of the lesson: at which layers to put checkpoints."""

from __future__ import annotations

import math

from keepwise.lessons import placements, plot
from keepwise.lessons.chapter import RUN_COLUMNS, Cell, Chapter, Table, run_row
from keepwise.lessons.scratch import Drop, Plan, layers
from keepwise.lessons.training import BATCH, HIDDEN, NUM_BLOCKS, WIDTH, SharedMeter, network, train_step

INPUT = BATCH * WIDTH
CACHE = INPUT + 2 * BATCH * HIDDEN
UNEVEN = (16, 16, 16, 16, 96, 96, 96, 96)


def every_k() -> Chapter:
    """Everything kept against one checkpoint every k layers."""
    blocks = network()
    full = train_step(blocks, placements.everything(NUM_BLOCKS))
    runs = {k: train_step(blocks, placements.every(NUM_BLOCKS, k)) for k in (1, 2, 4, 8)}
    labels = {k: f"k = {k}" + (" (one segment)" if k == NUM_BLOCKS else "") for k in runs}
    rows = [run_row("everything kept", full, None), *(run_row(labels[k], run, full) for k, run in runs.items())]
    least = min(runs, key=lambda k: runs[k].peak_floats)
    areas = [
        plot.area(run.timeline, top=full.peak_floats, title=f"{label}: floats kept over time, peak {run.peak_floats:,}")
        for label, run in (("everything kept", full), (f"k = {least}", runs[least]), ("k = 4", runs[4]))
    ]
    return Chapter(
        key="every-k",
        title="Keep one input in k layers, run the rest again",
        text=f"{NUM_BLOCKS} blocks y = x + relu(x W1) W2 on {BATCH} rows of width {WIDTH}, hidden size {HIDDEN}. "
        f"Backward of a block reads x ({INPUT} floats), h and a ({BATCH * HIDDEN} each): {CACHE} floats a layer. "
        "With checkpoints, forward keeps only the input of each segment of k layers; backward runs the segment "
        "again, keeps all of its caches for a moment, uses them and lets them go.",
        question=f"How many floats are kept at the peak with k = {NUM_BLOCKS}, one segment for the whole network?",
        answer=runs[NUM_BLOCKS].peak_floats,
        why="One segment is the worst of all: every cache is made again before the first one is used, so the peak "
        f"is that of keeping everything plus the segment's input ({runs[NUM_BLOCKS].peak_floats - full.peak_floats} "
        f"floats), and every layer has run twice for nothing. The best here is k = {least}, "
        f"{full.peak_floats / runs[least].peak_floats:.1f} times less than everything. Every k runs the same number "
        "of layers again: the choice of k costs memory only. And the gradients are the same to the last bit, "
        "because the same operations ran on the same numbers.",
        table=Table(columns=RUN_COLUMNS, rows=rows),
        plot="\n".join(areas),
    )


def compute() -> Chapter:
    """What recomputation costs, counted in matrix products."""
    blocks = network()
    plans = {
        "everything kept": placements.everything(NUM_BLOCKS),
        "k = 1": placements.every(NUM_BLOCKS, 1),
        "k = 2": placements.every(NUM_BLOCKS, 2),
        "k = 2, last segment left alone": placements.every(NUM_BLOCKS, 2, keep_last=True),
        "k = 4, last segment left alone": placements.every(NUM_BLOCKS, 4, keep_last=True),
    }
    runs = {label: train_step(blocks, plan) for label, plan in plans.items()}
    full = runs["everything kept"]
    extra = {label: f"+{run.products / full.products - 1:.1%}" for label, run in runs.items()}
    alone, dropped = runs["k = 2, last segment left alone"], runs["k = 2"]
    saved = (dropped.products - alone.products) / (dropped.products - full.products)
    unit = runs["k = 1"].products - full.products
    return Chapter(
        key="compute",
        title="What it costs",
        text="A block's forward is two matrix products, its backward four: two for the weights' gradients, two for "
        "the inputs'. So a step is 1 unit of forward and 2 of backward, and running every layer again adds 1 more.",
        question="By how many percent does the number of matrix products grow with k = 1?",
        answer=extra["k = 1"],
        why=f"{runs['k = 1'].products // unit} units in place of {full.products // unit}, whatever k is: plan for a "
        "third more compute in the worst case, and less where some layers are left alone. The last segment is the "
        "first to be read by backward, so dropping it buys nothing: left alone with k = 2 the peak even falls by "
        f"{dropped.peak_floats - alone.peak_floats} floats and k/L = {saved:.0%} of the overhead is gone.",
        table=Table(
            columns=("run", "matrix products", "against everything kept", "floats kept at the peak"),
            rows=[(label, run.products, extra[label], run.peak_floats) for label, run in runs.items()],
        ),
    )


def square_root() -> Chapter:
    """The square root rule and its condition."""
    rows: list[tuple[Cell, ...]] = []
    for num_layers, ratio in ((36, 1), (64, 1), (NUM_BLOCKS, CACHE // INPUT), (32, 17)):
        peaks = {k: math.ceil(num_layers / k) + min(k, num_layers) * ratio for k in range(1, num_layers + 1)}
        least = min(peaks, key=lambda k: (peaks[k], abs(k - math.sqrt(num_layers))))
        root = round(math.sqrt(num_layers))
        rows.append((f"{num_layers} layers", ratio, root, peaks[root], least, peaks[least]))
    blocks = network()
    measured = train_step(blocks, placements.square_root(NUM_BLOCKS))
    one = train_step(blocks, placements.every(NUM_BLOCKS, 1))
    return Chapter(
        key="sqrt",
        title="The square root rule, and when it is wrong",
        text="Segments of k layers keep L/k inputs and, one segment at a time, k caches: ceil(L/k) b + k A for an "
        "input of b floats and a cache of A. If a layer's cache is as large as its input, the sum is least at k = "
        "sqrt(L).",
        question=f"Our caches are {CACHE // INPUT} times as large as the inputs. Which k is best for our "
        f"{NUM_BLOCKS} layers?",
        answer=rows[2][4],
        why="The larger A is against b, the shorter the best segment: k = sqrt(L b / A). A transformer layer keeps "
        "about 34 bytes per token and unit against 2 for its input, a ratio of 17, and one layer a segment is best. "
        f"Run for real on our blocks, sqrt keeps {measured.peak_floats:,} floats and k = 1 keeps "
        f"{one.peak_floats:,}. (With ceilings several k can tie; the table shows the one nearest to the root.)",
        table=Table(
            columns=("network", "A / b", "k = sqrt(L)", "peak there (in b)", "best k", "peak there (in b)"), rows=rows
        ),
    )


def under_a_budget() -> Chapter:
    """Turn the question round: given the floats, the fewest forwards."""
    blocks = network()
    full = train_step(blocks, placements.everything(NUM_BLOCKS))
    points = placements.frontier([INPUT] * NUM_BLOCKS, [CACHE] * NUM_BLOCKS)
    rows = [run_row(_shape(plan), train_step(blocks, plan), full) for _, _, plan in points]
    marks = [(again, peak, "●") for again, peak, _ in points]
    for k in (1, 2, 4, 8):
        peak, again = placements.predict(placements.every(NUM_BLOCKS, k), [INPUT] * NUM_BLOCKS, [CACHE] * NUM_BLOCKS)
        marks.append((again, peak, "×"))
    budget = 2_000
    chosen = train_step(blocks, placements.best([INPUT] * NUM_BLOCKS, [CACHE] * NUM_BLOCKS, budget))
    return Chapter(
        key="budget",
        title="A budget instead of a k",
        text="Nobody wants k. What people have is a budget: so many floats and no more. Cut the chain into "
        f"segments, keep some whole, drop others: {sum(1 for _ in placements.all_placements(NUM_BLOCKS)):,} plans "
        f"for {NUM_BLOCKS} layers. A small machine that knows only the sizes predicts the peak of each without "
        "running it, and we take the one with the fewest forwards that fits.",
        question=f"k = 2 needs {train_step(blocks, placements.every(NUM_BLOCKS, 2)).peak_floats:,} floats and "
        f"{NUM_BLOCKS} forwards again. With a budget of {budget:,} floats, how few can it be?",
        answer=chosen.forwards_again,
        why="Layers near the end are the best to keep: backward frees them first, before the dropped ones are made "
        "again. A single dial k cannot say that. Each row was predicted, then run: the frontier. Keepwise "
        "does this for tensors instead of layers, with seconds instead of counts, and with a solver instead of "
        "trying everything.",
        table=Table(columns=("plan (K kept, D dropped)", *RUN_COLUMNS[1:]), rows=rows),
        plot=plot.plane(marks, x_title="layer forwards run again", y_title="floats")
        + "\n● the frontier   × one checkpoint every k layers",
    )


def recursive() -> Chapter:
    """Checkpoints within checkpoints."""
    blocks = network()
    full = train_step(blocks, placements.everything(NUM_BLOCKS))
    plans = {
        "k = 1": placements.every(NUM_BLOCKS, 1),
        "halves of halves": placements.halves(NUM_BLOCKS),
        **{f"binomial, {slots} inputs": placements.binomial(NUM_BLOCKS, slots) for slots in (4, 3, 2, 1)},
    }
    rows: list[tuple[Cell, ...]] = []
    for label, plan in plans.items():
        run = train_step(blocks, plan)
        shared = train_step(blocks, plan, meter=SharedMeter())
        rows.append((*run_row(label, run, full), shared.peak_floats))
    return Chapter(
        key="recursive",
        title="Checkpoints within checkpoints",
        text="A dropped segment is a small network of its own, so it can be run again with checkpoints too. Halving "
        "again and again keeps about log2(L) inputs and runs about L/2 log2(L) layers again. Griewank and Walther's "
        "binomial placement is the best for each number of inputs held at once. The last column charges an array "
        "that is both a checkpoint and part of a cache only once.",
        question="With a single checkpoint at hand (the network's input), how many layers run again?",
        answer=rows[-1][2],
        why=f"Each layer's input has to be made from the very beginning: {NUM_BLOCKS - 1} + {NUM_BLOCKS - 2} + ... + "
        f"1. That is the floor of memory and the ceiling of work. For {NUM_BLOCKS} layers recursion gains little, "
        f"because one cache ({CACHE}) is already most of the peak; for a thousand time steps of a recurrent network "
        "it is the difference between possible and not.",
        table=Table(columns=(*RUN_COLUMNS, "peak with shared storage"), rows=rows),
    )


def uneven() -> Chapter:
    """Layers of different sizes."""
    blocks = network(UNEVEN)
    inputs, caches = [INPUT] * NUM_BLOCKS, [INPUT + 2 * BATCH * hidden for hidden in UNEVEN]
    full = train_step(blocks, placements.everything(NUM_BLOCKS))
    budget = 1_800
    plans = {f"k = {k}": placements.every(NUM_BLOCKS, k, keep_last=True) for k in (1, 2, 4)}
    fitting = [run for run in (train_step(blocks, plan) for plan in plans.values()) if run.peak_floats <= budget]
    plans[f"best under {budget:,} floats"] = chosen = placements.best(inputs, caches, budget)
    rows = [run_row(label, train_step(blocks, plan), full) for label, plan in plans.items()]
    return Chapter(
        key="uneven",
        title="Layers that are not alike",
        text=f"Hidden sizes {', '.join(map(str, UNEVEN))}: the later layers keep {caches[-1] / caches[0]:.1f} times "
        "as much as the early ones. The last segment of each k is left alone.",
        question=f"Under {budget:,} floats the best k runs {min(run.forwards_again for run in fitting)} layers "
        "again. How many does the best placement?",
        answer=rows[-1][2],
        why=f"The best placement is {_shape(chosen)}: it drops where a forward buys the most floats and keeps what "
        "is cheap to keep. Even spacing is a habit, not an optimum: embeddings, long skips, attention and the loss "
        "make real networks uneven.",
        table=Table(columns=RUN_COLUMNS, rows=rows),
    )


def _shape(plan: Plan) -> str:
    """KK DD D: which layers are kept, and the dropped segments."""
    text = ""
    for part in plan:
        size = len(list(layers(part.inner))) if isinstance(part, Drop) else 1
        text += f" {'D' * size} " if isinstance(part, Drop) else "K" * size
    return " ".join(text.split())
