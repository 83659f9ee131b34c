"""The interactive report: one offline page whose sliders redraw memory and compute.

The page carries the estimate itself and a small model of it in layers, tokens, width and segment: bytes of one block that grow
with tokens and width, a part that grows with the square of the sequence, and what stands around the blocks. At the sizes of
the estimate the two agree; away from it the page extrapolates.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from keepwise.cost import device_of
from keepwise.estimator.answer import Estimate, Rank
from keepwise.estimator.compute import Estimator
from keepwise.estimator.layout import Layouts
from keepwise.estimator.pipeline import stages
from keepwise.estimator.policy import Policy, segment_length
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture
from keepwise.estimator.states import count_parameters

_ONLY_OPERATORS = (
    "sequence", "quadratic", "head_bytes", "head_rest", "keeping_rest", "rebuilding_rest", "user_bytes", "other_parameters",
    "other_bytes",
)  # fmt: skip
"""Coefficients that the rule of thumb does not have."""


def write(path: Path, answer: Estimate, architecture: Architecture | None, setup: Setup) -> None:
    """Write the page to `path`."""
    path.write_text(render(answer, architecture, setup), encoding="utf-8")


def render(answer: Estimate, architecture: Architecture | None, setup: Setup) -> str:
    """The page as one string."""
    data = answer.as_dict()
    data["page"] = _rule_model(answer, setup) if architecture is None else _operator_model(answer, architecture, setup)
    data["page"]["device"] = device_of(setup.device).name
    data["page"]["whole_blocks"] = setup.checkpointing.kind in ("none", "full", "every", "sqrt")
    text = json.dumps(data).replace("</", "<\\/")
    template = files("keepwise.estimator").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", text)


def _segment(policy: Policy, layers: int) -> int:
    """The slider's place: 0 where everything is kept; other policies are shown as what they resemble, whole blocks."""
    if policy.kind in ("none", "selective", "sac", "save"):
        return 0
    return segment_length(policy, layers)


def _rule_model(answer: Estimate, setup: Setup) -> dict[str, Any]:
    rule, categories = answer.rule, answer.categories
    layers, parameters = int(rule["layers"]), max(1, answer.num_parameters)
    return {
        "start": {
            "L": layers,
            "T": int(rule["tokens"]),
            "d": int(rule["width"]),
            "k": _segment(setup.checkpointing, layers),
            "A": rule["layer_bytes"],
        },
        "rank": "",
        "in_flight": 1,
        "input_bytes": rule["input_bytes"],
        "layer_parameters": answer.num_parameters / layers,
        "weight_bytes": categories.parameters / parameters,
        "gradient_bytes": categories.gradients / parameters,
        "optimizer_bytes": categories.optimizer / parameters,
        **dict.fromkeys(_ONLY_OPERATORS, 0),
    }


def _operator_model(answer: Estimate, architecture: Architecture, setup: Setup) -> dict[str, Any]:
    """Coefficients of the page for the fullest rank: one block's bytes, their square part, and what stands around the blocks.

    What is left of a moment's activations beside the blocks' own is taken from the estimates that keep everything and that
    rebuild each block, so that the page agrees with both.
    """
    stage, width = answer.worst.stages[0], architecture.width
    pieces = stages(Layouts(architecture).pieces(setup), setup)[stage]
    blocks = [piece.graph for piece in pieces if piece.kind == "block"]
    layers = len(blocks)
    saved = sum(graph.bytes_of(graph.saved()) for graph in blocks) / layers
    tokens = setup.batch * setup.sequence // setup.context_parallel
    quadratic = _quadratic_bytes(architecture, setup, stage, saved)
    estimator = Estimator(architecture)
    keeping = _rank(estimator.run(replace(setup, checkpointing=Policy(), offload=frozenset())), stage)
    full = _rank(estimator.run(replace(setup, checkpointing=Policy(kind="full"), offload=frozenset())), stage)
    loss = next((m.categories for m in keeping.moments if m.name == "loss"), None)
    back = next(m.categories for m in full.moments if m.name == "backward of a block")
    back_keeping = next(m.categories for m in keeping.moments if m.name == "backward of a block")
    flight = answer.worst.in_flight
    input_bytes = blocks[0].values[blocks[0].entry].num_bytes
    block_parameters = sum(p.numel for graph in blocks for p in graph.parameters)
    parameters = max(1, count_parameters(pieces)[0])
    static = keeping.peak.categories
    return {
        "start": {
            "L": layers, "T": tokens, "d": width, "k": _segment(setup.checkpointing, layers),
            "A": (saved - quadratic) / tokens / width,
        },
        "rank": answer.worst.name,
        "in_flight": flight,
        "sequence": setup.sequence,
        "quadratic": quadratic / tokens / setup.sequence,
        "input_bytes": input_bytes / tokens / width,
        "head_bytes": loss.logits if loss else 0,
        "head_rest": loss.activations - loss.logits - flight * layers * saved if loss else 0,
        "keeping_rest": back_keeping.activations - back_keeping.logits - flight * layers * saved,
        "rebuilding_rest": back.activations - back.logits - flight * layers * input_bytes - saved,
        "user_bytes": back.logits,
        "layer_parameters": block_parameters / layers,
        "other_parameters": parameters - block_parameters,
        "other_bytes": static.weight_copies + static.communication + static.inputs,
        "weight_bytes": static.parameters / parameters,
        "gradient_bytes": static.gradients / parameters,
        "optimizer_bytes": static.optimizer / parameters,
    }  # fmt: skip


def _rank(answer: Estimate, stage: int) -> Rank:
    return next(rank for rank in answer.ranks if stage in rank.stages)


def _quadratic_bytes(architecture: Architecture, setup: Setup, stage: int, saved: float) -> float:
    """The part of one block's bytes that grows with the square of the sequence, from a second length."""
    longer = replace(setup, sequence=2 * setup.sequence)
    pieces = stages(Layouts(architecture).pieces(longer), longer)[stage]
    graphs = [piece.graph for piece in pieces if piece.kind == "block"]
    twice = sum(graph.bytes_of(graph.saved()) for graph in graphs) / len(graphs)
    # saved = linear + square; twice = 2 * linear + 4 * square.
    return max(0.0, (twice - 2 * saved) / 2)
