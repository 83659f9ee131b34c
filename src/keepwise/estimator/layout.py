"""The model as a line of pieces in the order in which forward runs them, one graph for each distinct piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from keepwise._errors import UsageError
from keepwise.estimator.context import Context
from keepwise.estimator.ends import end_graph, head_graph, prelude_graph
from keepwise.estimator.graph import Graph, Parameter
from keepwise.estimator.layers import block_graph
from keepwise.estimator.precision import precision_of
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture, Block, Stack


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of the model."""

    kind: Literal["embeddings", "block", "end", "head"]
    """what it is."""
    graph: Graph
    """its operators; equal blocks share one object."""
    stack: str
    """name of the stack it belongs to."""


class Layouts:
    """Makes lines of pieces for one architecture, and remembers those that differ only in what the graphs do not depend on."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self._known: dict[object, tuple[Piece, ...]] = {}

    def pieces(self, setup: Setup) -> tuple[Piece, ...]:
        """All pieces, in forward order.

        Raises:
            UsageError: when the degrees of parallelism do not divide what they should.
        """
        contexts: list[Context] = []
        previous = (0, 0)
        for stack in self.architecture.stacks:
            contexts.append(_context(stack, setup, previous))
            previous = (contexts[-1].rows, contexts[-1].length)
        key = (tuple(contexts), setup.loss)
        if key not in self._known:
            if len(self._known) > 64:
                self._known.clear()
            self._known[key] = tuple(self._build(contexts, setup))
        return self._known[key]

    def _build(self, contexts: list[Context], setup: Setup) -> list[Piece]:
        architecture = self.architecture
        pieces: list[Piece] = []
        tables_made = False
        for number, (stack, context) in enumerate(zip(architecture.stacks, contexts, strict=True)):
            embeddings = prelude_graph(architecture, stack, context, first=not tables_made)
            tables_made = tables_made or stack.prelude == "tokens"
            pieces.append(Piece(kind="embeddings", graph=embeddings, stack=stack.name))
            graphs: dict[Block, Graph] = {}
            for block in stack.blocks:
                if block not in graphs:
                    _check_degrees(block, setup)
                    graphs[block] = block_graph(block, architecture.width, context, f"{stack.name}.block")
                pieces.append(Piece(kind="block", graph=graphs[block], stack=stack.name))
            if number + 1 < len(architecture.stacks):
                end = end_graph(architecture, stack, context)
                if end is not None:
                    pieces.append(Piece(kind="end", graph=end, stack=stack.name))
            else:
                head = head_graph(architecture, stack, context, setup.loss)
                pieces.append(Piece(kind="head", graph=head, stack=stack.name))
        return pieces


def parameters_on(pieces: Sequence[Piece]) -> list[list[Parameter]]:
    """Parameters of each piece on one rank; a tied table whose owner is on another rank has a copy of its own here."""
    owned = any(piece.kind == "embeddings" for piece in pieces)
    return [
        [*piece.graph.parameters, *([piece.graph.tied] if piece.graph.tied is not None and not owned else [])]
        for piece in pieces
    ]


def _check_degrees(block: Block, setup: Setup) -> None:
    heads = block.attention.heads
    if heads % setup.tensor_parallel:
        raise UsageError(f"{heads} attention heads are not divisible by tensor_parallel {setup.tensor_parallel}")
    num = getattr(block.feed_forward, "num", None)
    if num is not None and num % setup.expert_parallel:
        raise UsageError(f"{num} experts are not divisible by expert_parallel {setup.expert_parallel}")


def stack_length(stack: Stack, setup: Setup) -> int:
    """Tokens in one sequence of a stack."""
    if stack.length == "fixed":
        return stack.fixed_length
    if stack.length == "source":
        return setup.source_sequence or setup.sequence
    return setup.sequence


def _context(stack: Stack, setup: Setup, source: tuple[int, int]) -> Context:
    precision = precision_of(setup.precision)
    length = stack_length(stack, setup)
    # Only text is divided by context parallelism; patches and audio frames are short.
    divided = setup.context_parallel if stack.length != "fixed" else 1
    return Context(
        batch=setup.batch,
        rows=setup.batch * length // divided,
        length=length,
        source_rows=source[0],
        source_length=source[1],
        itemsize=precision.compute,
        weight_itemsize=precision.weight,
        autocast=precision.autocast,
        fp8=precision.fp8,
        fused_kernels=setup.kernels == "fused",
        attention=setup.attention,
        cpu=setup.device == "cpu",
        tensor_parallel=setup.tensor_parallel,
        sequence_parallel=setup.sequence_parallel and setup.tensor_parallel > 1,
        context_parallel=divided,
        expert_parallel=setup.expert_parallel,
        train_base=setup.lora_rank == 0,
        lora_rank=setup.lora_rank,
        lora_targets=setup.lora_targets,
        lora_dropout=setup.lora_dropout,
        quantised=setup.quantised is not None,
        checkpointed=setup.checkpointing.kind != "none",
        held_gradients=setup.gradients == "held" or setup.accumulation > 1,
    )
