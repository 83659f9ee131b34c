"""Random programs by number, drawn evenly, and the shortest program that still fails.

Hypothesis makes new examples out of those that it has seen, so that thousands of its programs are alike. Here every instruction, form
and size is drawn by itself: program number n is the same on every machine, and no other program has to do with it.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .fuzz import EFFECTS, FORM_NAMES, SIZES, SKIPPED, Instruction, Spec

WEIGHTS = {"overwriting": 0.25, "state": 1.5}
"""How often instructions of an effect are drawn; what overwrites mostly raises in plain."""
FORM_WEIGHTS = {"twice": 3.0, "chained": 3.0, "accumulated": 2.0, "mode later": 3.0, "buffer written": 3.0}
"""Several passes in one step: what one leaves behind, the next may trip over."""


def random_spec(number: int, most_lines: int = 8) -> Spec:
    """Program number `number`."""
    rng, effects = random.Random(number), sorted(EFFECTS)
    weights = [WEIGHTS.get(effect, 1.0) for effect in effects]
    form_weights = [FORM_WEIGHTS.get(form, 1.0) for form in FORM_NAMES]

    def line() -> Instruction:
        name = rng.choice(EFFECTS[rng.choices(effects, weights)[0]])
        when = rng.randint(1, 3) if rng.random() < 0.15 else 0
        a, b, k = (rng.randrange(8) for _ in range(3))
        return Instruction(name, a, b, k, when)

    blocks = tuple(tuple(line() for _ in range(rng.randint(2, most_lines))) for _ in range(rng.choice((1, 1, 2, 2, 3))))
    return Spec(
        blocks,
        tuple(rng.randrange(len(blocks)) for _ in range(rng.randint(1, 4))),
        rng.choice(SIZES),
        rng.randint(1, 4),
        rng.choices(FORM_NAMES, form_weights)[0] if rng.random() < 0.7 else "",
        rng.random() < 0.25,
        rng.choice(SKIPPED),
        rng.random() < 0.2,
        rng.random() < 0.5,
        rng.random() < 0.6,
        rng.random() < 0.2,
    )


def _with_block(spec: Spec, n: int, block: tuple[Instruction, ...]) -> Spec:
    return replace(spec, blocks=(*spec.blocks[:n], block, *spec.blocks[n + 1 :]))


def _simpler(spec: Spec) -> Iterator[Spec]:
    """Programs that are one step simpler, the largest steps first."""
    if spec.form:
        yield replace(spec, form="")
    if spec.abandoned:
        yield replace(spec, abandoned=False)
    if spec.mixed:
        yield replace(spec, mixed=False)
    if spec.alone:
        yield replace(spec, alone=False)
    if spec.from_args:
        yield replace(spec, from_args=False)
    if spec.in_place:
        yield replace(spec, in_place=False)
    if spec.skipped:
        yield replace(spec, skipped=())
    if len(set(spec.sizes)) > 1:
        yield replace(spec, sizes=spec.sizes[:1] * len(spec.sizes))
    for k in range(len(spec.order)):
        if len(spec.order) > 1:
            yield replace(spec, order=spec.order[:k] + spec.order[k + 1 :])
    for n, block in enumerate(spec.blocks):
        for k in range(len(block)):
            yield _with_block(spec, n, block[:k] + block[k + 1 :])
    if spec.num_outputs > 1:
        yield replace(spec, num_outputs=spec.num_outputs - 1)
    for n, block in enumerate(spec.blocks):
        for k, line in enumerate(block):
            for name in ("when", "a", "b", "k"):
                if getattr(line, name):
                    changed = dataclasses.replace(line, **{name: 0})
                    yield _with_block(spec, n, (*block[:k], changed, *block[k + 1 :]))


def shortened(spec: Spec, fails: Callable[[Spec], bool], most_tries: int = 400, most_seconds: float = 300.0) -> Spec:
    """A program that fails and none of whose simpler forms does, if so many tries and seconds are enough to find it."""
    tries = 0
    end = time.monotonic() + most_seconds
    while True:
        for simpler in _simpler(spec):
            tries += 1
            if tries > most_tries or time.monotonic() > end:
                return spec
            if fails(simpler):
                spec = simpler
                break
        else:
            return spec
