"""The second half of the lesson: which tensors, where to, and what can go wrong."""

from __future__ import annotations

from keepwise.lessons import placements, plot
from keepwise.lessons.chapter import RUN_COLUMNS, Cell, Chapter, Table, run_row
from keepwise.lessons.scratch import Plan
from keepwise.lessons.training import BATCH, NUM_BLOCKS, WIDTH, Result, network, train_step


def selective() -> Chapter:
    """Which of x, h, a can be rebuilt without a matrix product."""
    blocks = network()
    full = train_step(blocks, placements.everything(NUM_BLOCKS))
    runs = {
        "x, h, a": full,
        "x, h": train_step(blocks, placements.everything(NUM_BLOCKS, "xh")),
        "x, a": train_step(blocks, placements.everything(NUM_BLOCKS, "xa")),
        "x": train_step(blocks, placements.everything(NUM_BLOCKS, "x")),
        "k = 1 (the whole layer again)": train_step(blocks, placements.every(NUM_BLOCKS, 1)),
    }
    rows: list[tuple[Cell, ...]] = [
        (label, run.peak_floats, run.products - full.products, run.difference(full)) for label, run in runs.items()
    ]
    free = [label for label, run in runs.items() if run.products == full.products and run is not full]
    least = min(free, key=lambda label: runs[label].peak_floats)
    return Chapter(
        key="selective",
        title="Recompute tensors, not layers",
        text="Backward reads x, h and a, but they do not cost the same to make again: h = x W1 is a matrix product, "
        "a = relu(h) is one pass over memory, and x is the end of the layer before. So keep some and rebuild the "
        "others.",
        question="What is the smallest peak that needs no matrix product at all to be run again?",
        answer=runs[least].peak_floats,
        why=f"Keep {least}. a is rebuilt from h by one relu; and h need not be rebuilt from a, because backward asks "
        "only where h > 0, which is where a > 0. h from x alone, and x from the layer before, take a matrix "
        f"product. The last two rows rebuild everything: keeping x alone needs {runs['x'].products - full.products} "
        "products where running the layers again needs "
        f"{runs['k = 1 (the whole layer again)'].products - full.products}, because nobody reads the second "
        "product's result: whoever reruns a whole layer pays for it all the same.",
        table=Table(
            columns=("kept", "floats kept at the peak", "matrix products run again", "largest gradient difference"),
            rows=rows,
        ),
    )


def offload() -> Chapter:
    """The host's memory instead of compute."""
    blocks = network()
    full = train_step(blocks, placements.everything(NUM_BLOCKS))
    runs = {
        "everything kept": full,
        "offload": train_step(blocks, placements.offload(NUM_BLOCKS)),
        "k = 1": train_step(blocks, placements.every(NUM_BLOCKS, 1)),
    }
    away = runs["offload"]
    return Chapter(
        key="offload",
        title="Offload: pay in transfers instead of compute",
        text="Each cache is copied to the host as soon as its layer has run, and comes back when backward needs it.",
        question="How many floats cross the bus in one step?",
        answer=away.moved_floats,
        why=f"Every cache goes there and back: 2 times {full.peak_floats:,}. On the device there is never more than "
        f"one cache, {away.peak_floats} floats, and nothing runs again. Whether that is cheaper than k = 1 is a "
        "question of bandwidth: a matrix product reads each float many times, a transfer moves it once. A copy that "
        "should overlap with compute needs room for a second cache on the device, and the host needs room for them "
        "all.",
        table=Table(
            columns=(*RUN_COLUMNS, "floats moved"),
            rows=[
                (*run_row(label, run, None if run is full else full), run.moved_floats) for label, run in runs.items()
            ],
        ),
    )


def dropout() -> Chapter:
    """Randomness has to be replayed too."""
    blocks = network(dropout=0.1)
    full = train_step(blocks, placements.everything(NUM_BLOCKS))
    plans: dict[str, Plan] = {
        "k = 2, random state saved": placements.every(NUM_BLOCKS, 2),
        "halves of halves, random state saved": placements.halves(NUM_BLOCKS),
        "k = 2, random state not saved": placements.every(NUM_BLOCKS, 2, restore_random=False),
    }
    runs = {label: train_step(blocks, plan) for label, plan in plans.items()}
    wrong = runs["k = 2, random state not saved"]
    largest = max(float(abs(gradient).max()) for gradient in full.gradients)
    return Chapter(
        key="dropout",
        title="Dropout: the same numbers have to fall again",
        text="A dropped segment draws its dropout mask a second time. Unless the generator is put back to where it "
        "was, that is another mask than the loss was computed with. (Each cache now holds the mask as well.)",
        question="Without the saved state: does the loss show that something is wrong? (yes or no)",
        answer="no" if wrong.loss == full.loss else "yes",
        why="The loss is computed before anything is run again, so it is the same to the last bit, and training "
        f"goes on with gradients that belong to another network: off by {wrong.difference(full):.1e} where the "
        f"largest entry is {largest:.1e}. Save the generator's state with the checkpoint, replay on a private "
        "generator, and leave the training's own stream where it is.",
        table=Table(
            columns=(*RUN_COLUMNS, "loss"),
            rows=[
                (*run_row("everything kept", full, None), f"{full.loss:.6f}"),
                *((*run_row(label, run, full), f"{run.loss:.6f}") for label, run in runs.items()),
            ],
        ),
    )


def accumulation() -> Chapter:
    """Micro-batches reduce activations too, and combine with checkpoints."""
    blocks = network()
    whole = train_step(blocks, placements.everything(NUM_BLOCKS))
    rows: list[tuple[Cell, ...]] = []
    for parts in (1, 2, 4):
        kept = train_step(blocks, placements.everything(NUM_BLOCKS), micro_batches=parts)
        dropped = train_step(blocks, placements.every(NUM_BLOCKS, 1), micro_batches=parts)
        rows.append(
            (parts, kept.peak_floats, dropped.peak_floats, dropped.difference(kept), kept.difference(whole)),
        )
    return Chapter(
        key="accumulation",
        title="Gradient accumulation",
        text=f"The {BATCH} rows can go through in parts, each with its own forward and backward, while the gradients "
        "add up. Activations shrink with the part; parameters, gradients and optimizer state do not.",
        question=f"How many floats does k = 1 keep at the peak with {BATCH} parts of one row?",
        answer=rows[-1][2],
        why="Both peaks shrink in proportion, so the two techniques multiply. Against its own plain run the "
        "checkpointed one is still equal to the last bit; against the whole batch the gradients differ in the last "
        "digits, because a sum in another order rounds differently. Small parts also make small matrix products, "
        "which a large device computes less efficiently: cut the batch first as far as that costs nothing, then "
        "drop.",
        table=Table(
            columns=("parts", "everything kept", "k = 1", "k = 1 against everything kept", "against the whole batch"),
            rows=rows,
        ),
    )


def not_reduced() -> Chapter:
    """The other memory of a training step."""
    blocks = network()
    weights = sum(block.w1.size + block.w2.size for block in blocks)

    def categories(result: Result) -> tuple[int, ...]:
        gradients = sum(gradient.size for gradient in result.gradients)
        return result.peak_floats, weights, gradients, 2 * weights

    full = categories(train_step(blocks, placements.everything(NUM_BLOCKS)))
    dropped = categories(train_step(blocks, placements.every(NUM_BLOCKS, 1)))
    names = (
        "activations kept for backward",
        "parameters",
        "parameter gradients",
        "optimizer state (Adam, two moments)",
    )
    rows: list[tuple[Cell, ...]] = [
        (name, a, b, "yes" if b < a else "no") for name, a, b in zip(names, full, dropped, strict=True)
    ]
    rows.append(("together", sum(full), sum(dropped), f"-{1 - sum(dropped) / sum(full):.0%}"))
    return Chapter(
        key="categories",
        title="What it does not reduce",
        text=f"Rows of the batch: {BATCH}, width {WIDTH}. That is a tiny batch for these weights, and so the whole "
        "step looks quite different from the activations alone.",
        question=f"Activations fall by a factor of {full[0] / dropped[0]:.1f}. By how many percent does the whole "
        "step?",
        answer=rows[-1][3],
        why="Only activations depend on the batch, and only they are dropped. Where parameters and optimizer state "
        "fill the device, checkpointing is the wrong tool: shard them, quantise them, train adapters, or use an "
        "optimizer with less state. Temporary workspaces of single kernels are not reduced directly either.",
        table=Table(columns=("floats", "everything kept", "k = 1", "reduced"), rows=rows),
    )


def summary() -> Chapter:
    """Everything in one plane."""
    blocks = network()
    full = train_step(blocks, placements.everything(NUM_BLOCKS))
    plans: list[tuple[str, str, Plan]] = [
        ("A", "everything kept", placements.everything(NUM_BLOCKS)),
        ("1", "k = 1", placements.every(NUM_BLOCKS, 1)),
        ("2", "k = 2", placements.every(NUM_BLOCKS, 2)),
        ("4", "k = 4", placements.every(NUM_BLOCKS, 4)),
        ("8", "k = 8", placements.every(NUM_BLOCKS, 8)),
        ("r", "square root", placements.square_root(NUM_BLOCKS)),
        ("h", "halves of halves", placements.halves(NUM_BLOCKS)),
        ("b", "binomial, 2 inputs", placements.binomial(NUM_BLOCKS, 2)),
        ("s", "keep x and a", placements.everything(NUM_BLOCKS, "xa")),
        ("x", "keep x", placements.everything(NUM_BLOCKS, "x")),
    ]
    runs = [(mark, label, train_step(blocks, plan)) for mark, label, plan in plans]
    costs = {label: (run.products - full.products, run.peak_floats) for _, label, run in runs}
    beaten = {
        label
        for label, (products, floats) in costs.items()
        if any(p <= products and f <= floats and (p, f) != (products, floats) for p, f in costs.values())
    }
    return Chapter(
        key="summary",
        title="All plans in one plane",
        text="Every plan is a point: floats at the peak, and matrix products run again. A plan is beaten if another "
        "one is no worse in both and better in one.",
        question=f"How many of these {len(plans)} plans are beaten by another?",
        answer=len(beaten),
        why=f"Not beaten: {', '.join(label for label in costs if label not in beaten)}. The winners choose tensors "
        "or nest; the plans with a single dial lose. What a planner does is walk along the lower left edge of this "
        "picture until the budget holds.",
        table=Table(
            columns=("mark", "plan", "floats kept at the peak", "matrix products run again", "beaten"),
            rows=[
                (mark, label, run.peak_floats, run.products - full.products, "yes" if label in beaten else "no")
                for mark, label, run in runs
            ],
        ),
        plot=plot.plane(
            [(run.products - full.products, run.peak_floats, mark) for mark, _, run in runs],
            x_title="matrix products run again",
            y_title="floats",
        ),
    )
