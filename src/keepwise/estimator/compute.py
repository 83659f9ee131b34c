"""From an architecture and a setup to the answer."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from keepwise._units import show_bytes
from keepwise.cost import DEVICES, device_of
from keepwise.estimator.answer import Estimate, Fit, Rank, Traffic
from keepwise.estimator.costs import Rates, rates
from keepwise.estimator.layout import Layouts, Piece
from keepwise.estimator.pipeline import bubble, in_flight, stages
from keepwise.estimator.precision import precision_of
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture, Experts
from keepwise.estimator.states import count_parameters, states
from keepwise.estimator.timeline import fill_budget, timeline, treat
from keepwise.estimator.traffic import traffic
from keepwise.estimator.units import format_count


class Estimator:
    """Answers for one architecture; remembers what does not change between setups."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self._layouts = Layouts(architecture)

    def run(self, setup: Setup) -> Estimate:
        """The answer for one setup.

        Raises:
            UsageError: when degrees of parallelism do not divide what they should.
        """
        pieces = self._layouts.pieces(setup)
        rate = rates(device_of(setup.device), precision_of(setup.precision), setup.efficiency)
        ranks: list[Rank] = []
        flows: list[tuple[Traffic, ...]] = []
        for stage, part in enumerate(stages(pieces, setup)):
            rank, flow = _rank(stage, part, setup, rate)
            if ranks and _same(ranks[-1], rank):
                ranks[-1] = replace(ranks[-1], stages=(*ranks[-1].stages, stage))
                continue
            ranks.append(rank)
            flows.append(flow)
        named = tuple(replace(rank, name=_name(rank.stages, setup)) for rank in ranks)
        busiest = max(range(len(named)), key=lambda i: sum(t.seconds for t in flows[i]) + named[i].forward_seconds)
        everything, trained = count_parameters(pieces)
        return Estimate(
            model=describe(self.architecture, everything),
            checkpointing=str(setup.checkpointing),
            num_parameters=everything,
            num_trained=trained,
            ranks=named,
            traffic=flows[busiest],
            fits=fits(max(rank.peak_bytes for rank in named)),
            num_devices=setup.num_devices,
            tokens=setup.batch * setup.sequence * setup.accumulation * setup.data_parallel,
            bubble=bubble(setup),
            notes=(*self.architecture.notes, *_notes(self.architecture, setup, named)),
        )


def _rank(stage: int, pieces: list[Piece], setup: Setup, rate: Rates) -> tuple[Rank, tuple[Traffic, ...]]:
    base = states(pieces, setup)
    flight = in_flight(stage, setup)
    if setup.checkpointing.kind == "keepwise":
        budget = setup.checkpointing.budget_bytes or setup.budget_bytes or device_of(setup.device).usable_bytes
        entries = fill_budget(pieces, setup, base, flight, budget, rate.forward_seconds)
    else:
        entries = treat(pieces, setup.checkpointing, rate.forward_seconds)
    line = timeline(entries, setup, base, flight)
    steps = setup.accumulation
    forward_seconds, backward_seconds = _seconds(pieces, rate)
    rank = Rank(
        name="",
        stages=(stage,),
        layers=sum(piece.kind == "block" for piece in pieces),
        in_flight=flight,
        kept_bytes=line.kept_bytes,
        peak=line.peak,
        moments=line.moments,
        host_bytes=base.host + line.host_bytes,
        forward_flops=steps * sum(p.graph.flops for p in pieces),
        backward_flops=steps * sum(p.graph.backward_flops for p in pieces),
        rebuilt_flops=steps * sum(e.treatment.rebuilt_flops for e in entries),
        forward_seconds=steps * forward_seconds,
        backward_seconds=steps * backward_seconds,
        rebuilt_seconds=steps * sum(e.treatment.rebuilt_seconds for e in entries),
    )
    host = round(line.host_bytes / flight) if flight else 0
    return rank, traffic(entries, setup, base, host, rate)


def _seconds(pieces: Sequence[Piece], rate: Rates) -> tuple[float, float]:
    known: dict[int, tuple[float, float]] = {}
    forward = backward = 0.0
    for piece in pieces:
        graph = piece.graph
        if id(graph) not in known:
            known[id(graph)] = (
                sum(rate.forward_seconds(graph, op) for op in graph.ops),
                sum(rate.backward_seconds(graph, op) for op in graph.ops),
            )
        forward += known[id(graph)][0]
        backward += known[id(graph)][1]
    return forward, backward


def _same(a: Rank, b: Rank) -> bool:
    return (a.peak_bytes, a.kept_bytes, a.layers, a.forward_flops) == (
        b.peak_bytes,
        b.kept_bytes,
        b.layers,
        b.forward_flops,
    )


def _name(numbers: tuple[int, ...], setup: Setup) -> str:
    if setup.pipeline_parallel == 1:
        return "every rank"
    first, last = numbers[0] + 1, numbers[-1] + 1
    which = f"stage {first}" if first == last else f"stages {first} to {last}"
    return f"{which} of {setup.pipeline_parallel}"


def fits(peak_bytes: int) -> tuple[Fit, ...]:
    """Whether a peak fits on each known accelerator, from small to large."""
    chosen = sorted((d for d in DEVICES.values() if not d.is_host), key=lambda d: (d.memory_bytes, d.name))
    return tuple(
        Fit(
            device=d.name,
            usable_bytes=d.usable_bytes,
            fits=peak_bytes <= d.usable_bytes,
            headroom_bytes=d.usable_bytes - peak_bytes,
        )
        for d in chosen
    )


def describe(architecture: Architecture, parameters: int) -> str:
    """One line for people."""
    block = architecture.stacks[-1].blocks[0]
    mixture = next(
        (b.feed_forward for s in architecture.stacks for b in s.blocks if isinstance(b.feed_forward, Experts)), None
    )
    layers = " + ".join(str(len(stack.blocks)) for stack in architecture.stacks)
    text = f"{architecture.family}, {layers} layers, width {architecture.width}, {block.attention.heads} heads"
    if block.attention.kv_heads != block.attention.heads:
        text += f" on {block.attention.kv_heads} key heads"
    if mixture is not None:
        text += f", {mixture.active} of {mixture.num} experts"
    return f"{text}, {format_count(parameters)} parameters"


def _notes(architecture: Architecture, setup: Setup, ranks: Sequence[Rank]) -> list[str]:
    notes: list[str] = []
    limit = architecture.max_positions
    if limit is not None and setup.sequence > limit:
        notes.append(f"sequence {setup.sequence} is longer than the configuration's {limit} positions")
    policy = setup.checkpointing
    rebuilt = sum(rank.rebuilt_seconds for rank in ranks)
    if policy.kind == "selective" and "attention.core" in policy.modules and setup.attention != "eager":
        notes.append(
            "a fused attention kernel keeps almost nothing inside itself: running it again costs time and saves little"
        )
    if policy.kind == "keepwise":
        budget = policy.budget_bytes or setup.budget_bytes or device_of(setup.device).usable_bytes
        peak = max(rank.peak_bytes for rank in ranks)
        if peak > budget:
            notes.append(f"no plan fits {show_bytes(budget)}: the smallest peak is {show_bytes(peak)}")
    if setup.tensor_parallel > 1 and rebuilt:
        notes.append("recomputation repeats the collectives of what it runs again")
    if setup.context_parallel > 1 and setup.attention == "eager":
        notes.append(
            "context parallelism needs a fused attention kernel: the scores are counted as if it ran without one"
        )
    if setup.zero >= 1 and setup.shards == 1:
        notes.append("zero has no effect with one replica")
    if setup.data_parallel > 1 and setup.zero == 0:
        notes.append("gradients are taken to be views of the reduction buckets (gradient_as_bucket_view=True)")
    if setup.lora_rank and setup.checkpointing.kind in ("full", "every", "sqrt", "first", "nth"):
        notes.append(
            "with a frozen base reentrant checkpoints need inputs that require gradients (enable_input_require_grads)"
        )
    return notes
