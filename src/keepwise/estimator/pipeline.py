"""Which pieces a pipeline stage holds, and how many micro-batches are in flight on it.

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B and the interleaved schedule, section 2.2); Korthikanti et al. 2022,
section 4.2.3 (the first stage of the interleaved schedule holds L*(1 + (p - 1)/(p*m)) layers' activations); Qi et al. 2023 (zero
bubble, ZB-H1 holds as much as 1F1B); DeepSeek-V3 report 2024, section 3.2.1 (DualPipe: p + 1 micro-batches, parameters twice).
"""

from __future__ import annotations

from collections.abc import Sequence

from keepwise._errors import UsageError
from keepwise.estimator.layout import Piece
from keepwise.estimator.setup import Setup


def stages(pieces: Sequence[Piece], setup: Setup) -> list[list[Piece]]:
    """The pieces of each stage: blocks evenly, the first stages take what is left over; embeddings first, head last.

    Raises:
        UsageError: when there are fewer blocks than stages.
    """
    num = setup.pipeline_parallel
    blocks = sum(piece.kind == "block" for piece in pieces)
    chunks = num * (setup.virtual_stages if setup.schedule == "interleaved" and num > 1 else 1)
    if blocks < chunks:
        raise UsageError(f"{blocks} blocks cannot fill {chunks} pipeline stages")
    sizes = [blocks // num + (stage < blocks % num) for stage in range(num)]
    result: list[list[Piece]] = [[] for _ in range(num)]
    stage, used = 0, 0
    for piece in pieces:
        if piece.kind == "block":
            if used == sizes[stage] and stage + 1 < num:
                stage, used = stage + 1, 0
            used += 1
        result[stage].append(piece)
    return result


def in_flight(stage: int, setup: Setup) -> float:
    """Micro-batches whose activations of all its blocks a stage holds at most (a fraction under the interleaved schedule)."""
    num, batches = setup.pipeline_parallel, setup.accumulation
    if num == 1:
        return 1.0
    if setup.schedule == "gpipe":
        return float(batches)
    if setup.schedule == "interleaved":
        chunks = setup.virtual_stages
        held = 2 * (num - stage - 1) + (chunks - 1) * num + 1
        return min(held, batches * chunks) / chunks
    if setup.schedule == "dualpipe":
        return float(min(num + 1, batches))
    return float(min(num - stage, batches))


def bubble(setup: Setup) -> float:
    """Share of a step in which a stage waits for others (Narayanan et al. 2021, section 2.2)."""
    num, batches = setup.pipeline_parallel, setup.accumulation
    if num == 1:
        return 0.0
    waiting = (num - 1) / batches
    if setup.schedule == "interleaved":
        waiting /= setup.virtual_stages
    elif setup.schedule == "zb-h1":
        waiting /= 3
    elif setup.schedule == "dualpipe":
        waiting = (num / 2 - 1) / batches / 2
    return waiting / (1 + waiting)
