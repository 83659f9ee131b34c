"""The moments of a step on one rank, and the `keepwise` policy that fills a budget.

Moments: forward of each piece; the loss; backward of each piece, when what it rebuilds and the gradients in hand are added to what
earlier pieces still hold; the optimizer's step. The peak is the largest of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from keepwise.estimator.answer import Categories, Moment
from keepwise.estimator.graph import Walk
from keepwise.estimator.layout import Piece, parameters_on
from keepwise.estimator.policy import Policy
from keepwise.estimator.setup import Setup
from keepwise.estimator.states import States, gradient_bytes, waiting_bytes
from keepwise.estimator.treatment import Cost, Treatment, keep_all, menu, treatments


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One piece, or one segment of blocks, with its treatment."""

    pieces: tuple[Piece, ...]
    """the pieces."""
    treatment: Treatment
    """what is done to them."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Moments of one rank."""

    moments: tuple[Moment, ...]
    """the highest moment of each kind."""
    kept_bytes: int
    """activations held after forward, micro-batches in flight included."""
    host_bytes: int
    """offloaded activations."""

    @property
    def peak(self) -> Moment:
        """The highest moment."""
        return max(self.moments, key=lambda m: m.categories.total)


def treat(pieces: Sequence[Piece], policy: Policy, cost: Cost) -> list[Entry]:
    """Apply a policy that needs no budget; embeddings, ends and head are never rebuilt."""
    walks: dict[int, Walk] = {id(piece.graph): piece.graph.walk() for piece in pieces}
    entries: list[Entry] = []
    run: list[Piece] = []

    def flush() -> None:
        start = 0
        for length, treatment in treatments([p.graph for p in run], walks, policy, cost):
            entries.append(Entry(pieces=tuple(run[start : start + length]), treatment=treatment))
            start += length
        run.clear()

    for piece in pieces:
        if piece.kind == "block" and (not run or run[-1].stack == piece.stack):
            run.append(piece)
            continue
        flush()
        if piece.kind == "block":
            run.append(piece)
        else:
            entries.append(Entry(pieces=(piece,), treatment=keep_all(piece.graph, walks[id(piece.graph)])))
    flush()
    return entries


def fill_budget(
    pieces: Sequence[Piece], setup: Setup, base: States, in_flight: float, budget: int, cost: Cost
) -> list[Entry]:
    """The `keepwise` policy: least seconds at or under `budget`; the smallest peak where nothing fits."""
    start = treat(pieces, Policy(), cost)
    menus: dict[int, list[Treatment]] = {}
    for entry in start:
        graph = entry.pieces[0].graph
        if entry.pieces[0].kind == "block" and id(graph) not in menus:
            menus[id(graph)] = menu(graph, graph.walk(), cost)
    steps: list[tuple[float, int, int]] = []  # price of a byte, entry, point taken
    for number, entry in enumerate(start):
        points = menus.get(id(entry.pieces[0].graph), []) if entry.pieces[0].kind == "block" else []
        for point in range(1, len(points)):
            saved = points[point - 1].kept_bytes - points[point].kept_bytes
            price = (points[point].rebuilt_seconds - points[point - 1].rebuilt_seconds) / saved
            steps.append((price, number, point))
    steps.sort()

    def taken(count: int) -> list[Entry]:
        chosen = {number: point for _, number, point in steps[:count]}
        return [
            Entry(pieces=e.pieces, treatment=menus[id(e.pieces[0].graph)][chosen[i]]) if i in chosen else e
            for i, e in enumerate(start)
        ]

    def peak(count: int) -> int:
        return timeline(taken(count), setup, base, in_flight).peak.categories.total

    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        if peak(middle) <= budget:
            high = middle
        else:
            low = middle + 1
    return taken(low)


def timeline(entries: Sequence[Entry], setup: Setup, base: States, in_flight: float) -> Timeline:
    """All moments of one rank."""
    offloaded = "activations" in setup.offload
    pieces = [piece for entry in entries for piece in entry.pieces]
    held = [entry.treatment.kept_bytes for entry in entries]
    host = 0.0
    beside = _shared_bytes(entries)
    if offloaded:
        blocks = [bytes_ for entry, bytes_ in zip(entries, held, strict=True) if entry.pieces[0].kind == "block"]
        host = in_flight * sum(blocks)
        held = [0 if entry.pieces[0].kind == "block" else bytes_ for entry, bytes_ in zip(entries, held, strict=True)]
        beside += 2 * max(blocks, default=0)  # one on its way out or in use, one on its way in
    whole_head = setup.schedule == "gpipe" and setup.pipeline_parallel > 1
    repeated = sum(b for entry, b in zip(entries, held, strict=True) if whole_head or entry.pieces[0].kind != "head")
    others = round(max(0.0, in_flight - 1) * repeated) + beside
    output = sum(piece.graph.user_held for piece in pieces) if setup.output_held else 0
    fresh = setup.gradients == "fresh" and setup.accumulation == 1
    appearing = _appearing(entries, setup) if fresh else [0.0] * len(entries)
    waiting, owner = waiting_bytes(pieces, setup), _table_owner(entries)
    fixed = Categories(
        parameters=base.parameters,
        optimizer=base.optimizer,
        weight_copies=base.weight_copies,
        communication=base.communication,
        inputs=sum(piece.graph.input_bytes for piece in pieces),
    )
    best: dict[str, tuple[int, tuple[int, ...]]] = {}

    def note(name: str, gradients: float, *activations: int) -> None:
        """`activations`: kept, rebuilt, logits, temporaries. Only the highest moment of each name is built in the end."""
        parts = (round(gradients), *activations)
        total = sum(parts)
        if name not in best or best[name][0] < total:
            best[name] = total, parts

    before, cached = others, 0
    start_gradients = 0.0 if fresh else float(base.gradients)
    later = sum(appearing) if fresh else float(base.gradients)
    ends = _run_ends(entries, both=fresh)
    for number, (entry, bytes_) in enumerate(zip(entries, held, strict=True)):
        later -= appearing[number]
        if number not in ends:
            before, cached = before + bytes_, cached + entry.treatment.cached_bytes
            continue
        piece, t = entry.pieces[-1], entry.treatment
        is_head = piece.kind == "head"
        note("forward", start_gradients, before + (0 if is_head else bytes_), 0, t.forward_peak if is_head else 0,
             cached + (0 if is_head else max(0, t.forward_peak - bytes_)))  # fmt: skip
        if is_head:
            note("loss", later, before, 0, t.saved_in_peak + output, t.backward_peak - t.saved_in_peak)
        else:
            kept_here = min(bytes_, t.saved_in_peak)
            memory = _memory_gradient(piece)
            # A tensor on its way back from the host is counted in `beside` already.
            rebuilt = t.saved_in_peak - (
                entry.treatment.kept_bytes if offloaded and piece.kind == "block" else kept_here
            )
            note(
                f"backward of {piece.kind if piece.kind != 'block' else 'a block'}",
                later, before + kept_here, max(0, rebuilt), output,
                t.backward_peak - t.saved_in_peak + memory + (waiting if number >= owner else 0),
            )  # fmt: skip
        before, cached = before + bytes_, cached + t.cached_bytes
    if base.optimizer_workspace:
        note("optimizer step", sum(appearing) if fresh else float(base.gradients), 0, 0, 0, base.optimizer_workspace)
    if fresh:
        note("after backward", sum(appearing), beside, 0, output, 0)
    moments = tuple(
        Moment(
            name=name,
            categories=replace(
                fixed,
                gradients=parts[0],
                kept_activations=parts[1],
                rebuilt_activations=parts[2],
                logits=parts[3],
                temporaries=parts[4],
            ),
        )
        for name, (_, parts) in best.items()
    )
    return Timeline(moments=moments, kept_bytes=before, host_bytes=round(host))


def _run_ends(entries: Sequence[Entry], *, both: bool) -> set[int]:
    """Entries at which a moment can be highest: the last, and with `both` the first, of each run of entries that are alike.

    Along a run what earlier pieces hold grows by equal steps, and gradients yet to come shrink by equal steps.
    """

    def alike(a: Entry, b: Entry) -> bool:
        return a.treatment is b.treatment and a.pieces[-1].graph is b.pieces[-1].graph

    last = len(entries) - 1
    ends = {i for i in range(last + 1) if i == last or not alike(entries[i], entries[i + 1])}
    if both:
        ends |= {i for i in range(last + 1) if i == 0 or not alike(entries[i - 1], entries[i])}
    return ends


def _table_owner(entries: Sequence[Entry]) -> int:
    """The entry that owns the token table: once its backward is done, no gradient waits for another part (Whisper's encoder)."""
    for number, entry in enumerate(entries):
        if any(p.role == "table" and p.name == "embeddings.tokens" for p in entry.pieces[0].graph.parameters):
            return number
    return 0


def _appearing(entries: Sequence[Entry], setup: Setup) -> list[float]:
    """Gradient buffers that each entry's backward makes."""
    pieces = [piece for entry in entries for piece in entry.pieces]
    known: dict[int, float] = {}
    for piece, parameters in zip(pieces, parameters_on(pieces), strict=True):
        if id(piece.graph) not in known:
            known[id(piece.graph)] = gradient_bytes(parameters, setup)
    return [sum(known[id(piece.graph)] for piece in entry.pieces) for entry in entries]


def _shared_bytes(entries: Sequence[Entry]) -> int:
    """Bytes that all blocks of a stack share: position angles, the encoder's output, masks. Each once.

    Constants count where autograd saves them or blocks that run again read them.
    """
    once: dict[tuple[str, str], int] = {}
    seen: set[tuple[int, bool]] = set()
    for entry in entries:
        rebuilt = entry.treatment.rebuilt_seconds > 0
        for piece in entry.pieces:
            graph = piece.graph
            if (id(graph), rebuilt) in seen:
                continue
            seen.add((id(graph), rebuilt))
            for value in graph.shared_values:
                if rebuilt or value.kind != "constant" or value.index in graph.saved():
                    once[piece.stack, value.name] = value.num_bytes
    return sum(once.values())


def _memory_gradient(piece: Piece) -> int:
    """Bytes of the gradient of the encoder's output, which grows while the decoder's backward runs."""
    return sum(v.num_bytes for v in piece.graph.shared_values if v.has_gradient)
