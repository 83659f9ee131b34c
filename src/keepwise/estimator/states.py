"""What is there in every moment of a step: weights, gradients, optimizer state, and the buffers of sharded training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from keepwise.estimator.graph import Parameter
from keepwise.estimator.layout import Piece, parameters_on
from keepwise.estimator.precision import QUANTISATIONS, Precision, optimizer_bytes, precision_of
from keepwise.estimator.setup import Setup

_ADAPTER = Precision(weight=4, gradient=4, master=0, state=4, compute=4)  # PEFT keeps adapters in fp32 by default


class States(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank."""

    parameters: int
    """weights on the device."""
    gradients: int
    """gradient buffers."""
    optimizer: int
    """optimizer state and master copies on the device."""
    weight_copies: int
    """8-bit copies of weights."""
    communication: int
    """gathered parameters and unreduced gradients."""
    optimizer_workspace: int
    """temporary copies while the optimizer steps."""
    host: int
    """offloaded bytes."""


def states(pieces: Sequence[Piece], setup: Setup) -> States:
    """Bytes of the pieces of one rank under sharding, precision, optimizer and offload."""
    weights = gradients = optimizer = copies = workspace = 0.0
    largest_weights = largest_gradients = 0.0
    precision = precision_of(setup.precision)
    numbers = Counter(piece.graph for piece in pieces)
    for piece, parameters in {p.graph: (p, own) for p, own in zip(pieces, parameters_on(pieces), strict=True)}.values():
        number = numbers[piece.graph]
        piece_weights = piece_gradients = 0.0
        for p in parameters:
            shards = setup.shards // setup.expert_parallel if p.expert else setup.shards
            local = p.numel / p.divisor
            stored, gradient, kept = _copies(p, setup)
            piece_weights += local * (stored if p.quantised else min(stored, precision.compute))
            piece_gradients += local * gradient
            weights += number * local * stored / (shards if setup.zero >= 3 else 1)
            gradients += number * local * gradient / (shards if setup.zero >= 2 else 1)
            optimizer += number * kept / p.divisor / (shards if setup.zero >= 1 else 1)
            if p.trained and setup.optimizer_kernel == "foreach":
                workspace += number * local * max(gradient, 4) / (shards if setup.zero >= 1 else 1)
            if precision.fp8 and p.role == "matrix" and not p.adapter:
                copies += number * 2 * local / (shards if setup.zero >= 3 else 1)
        largest_weights = max(largest_weights, piece_weights)
        largest_gradients = max(largest_gradients, piece_gradients)
    if setup.schedule == "dualpipe" and setup.pipeline_parallel > 1:
        weights, gradients, optimizer = 2 * weights, 2 * gradients, 2 * optimizer
    communication = 0.0
    if setup.shards > 1 and setup.zero >= 3:
        communication += 2 * largest_weights  # the block in hand and the next one
    if setup.shards > 1 and setup.zero >= 2:
        communication += largest_gradients
    host = 0.0
    if "optimizer" in setup.offload:
        host, optimizer = host + optimizer, 0.0
    if "parameters" in setup.offload:
        host, weights = host + weights, 2 * largest_weights
    return States(
        parameters=round(weights),
        gradients=round(gradients),
        optimizer=round(optimizer),
        weight_copies=round(copies),
        communication=round(communication),
        optimizer_workspace=0 if "optimizer" in setup.offload else round(workspace),
        host=round(host),
    )


def _copies(p: Parameter, setup: Setup) -> tuple[float, float, float]:
    """Bytes a weight, bytes a gradient, bytes of optimizer state and master copy of all elements."""
    precision = _ADAPTER if p.adapter else precision_of(setup.precision)
    stored = float(precision.weight)
    if p.quantised and setup.quantised is not None:
        stored = QUANTISATIONS[setup.quantised]
        if setup.quantised == "int8":
            stored += 4 / p.columns  # one scale a row
    if not p.trained:
        return stored, 0.0, 0.0
    kept = optimizer_bytes(p, setup.optimizer, precision.state)
    if setup.optimizer != "none":
        kept += precision.master * p.numel
    return stored, float(precision.gradient), kept


def waiting_bytes(pieces: Sequence[Piece], setup: Setup) -> int:
    """Bytes of a tied table's gradient that waits, from the head's backward on, for the embeddings' part of it."""
    tied = [piece.graph.tied for piece in pieces if piece.graph.tied is not None]
    if not tied or not any(piece.kind == "embeddings" for piece in pieces):
        return 0
    return round(sum(p.numel / p.divisor * _copies(p, setup)[1] for p in tied))


def gradient_bytes(parameters: Sequence[Parameter], setup: Setup) -> float:
    """Bytes of the gradient buffers of some parameters on one rank."""
    total = 0.0
    for p in parameters:
        shards = setup.shards // setup.expert_parallel if p.expert else setup.shards
        total += p.numel / p.divisor * _copies(p, setup)[1] / (shards if setup.zero >= 2 else 1)
    return total


def count_parameters(pieces: Sequence[Piece]) -> tuple[int, int]:
    """(all, trained) parameters of these pieces, undivided."""
    everything = trained = 0
    for graph, number in Counter(piece.graph for piece in pieces).items():
        everything += number * sum(p.numel for p in graph.parameters)
        trained += number * sum(p.numel for p in graph.parameters if p.trained)
    return everything, trained
