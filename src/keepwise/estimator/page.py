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

from keepwise.estimator.answer import Estimate
from keepwise.estimator.compute import Estimator
from keepwise.estimator.devices import device_of
from keepwise.estimator.layout import Layouts
from keepwise.estimator.policy import Policy, segment_length
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture


def write(path: Path, answer: Estimate, architecture: Architecture | None, setup: Setup) -> None:
    """Write the page to `path`."""
    path.write_text(render(answer, architecture, setup), encoding="utf-8")


def render(answer: Estimate, architecture: Architecture | None, setup: Setup) -> str:
    """The page as one string."""
    data = answer.as_dict()
    data["page"] = _rule_model(answer, setup) if architecture is None else _operator_model(answer, architecture, setup)
    data["page"]["device"] = device_of(setup.device).name
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
            "L": layers, "T": int(rule["tokens"]), "d": int(rule["width"]), "k": _segment(setup.checkpointing, layers),
            "A": rule["layer_bytes"],
        },
        "sequence": 0, "quadratic": 0, "input_bytes": rule["input_bytes"], "head_bytes": 0, "head_temporaries": 0,
        "temporary_bytes": 0, "user_bytes": 0, "layer_parameters": answer.num_parameters / layers, "other_parameters": 0,
        "other_bytes": 0, "weight_bytes": categories.parameters / parameters, "gradient_bytes": categories.gradients / parameters,
        "optimizer_bytes": categories.optimizer / parameters,
    }  # fmt: skip


def _operator_model(answer: Estimate, architecture: Architecture, setup: Setup) -> dict[str, Any]:
    """Coefficients of the page from the operator model: one block's bytes, its square part, and what stands around the blocks."""
    layers, width = architecture.num_layers, architecture.width
    pieces = Layouts(architecture).pieces(setup)
    blocks = [piece.graph for piece in pieces if piece.kind == "block"]
    saved = sum(graph.bytes_of(graph.saved()) for graph in blocks) / layers
    tokens = setup.batch * setup.sequence // setup.context_parallel
    quadratic = _quadratic_bytes(architecture, setup, saved)
    keeping = Estimator(architecture).run(
        replace(setup, checkpointing=Policy(), pipeline_parallel=1, offload=frozenset())
    )
    full = Estimator(architecture).run(
        replace(setup, checkpointing=Policy(kind="full"), pipeline_parallel=1, offload=frozenset())
    )
    moments = {m.name: m.categories for m in keeping.worst.moments}
    rebuilt = {m.name: m.categories for m in full.worst.moments}
    block_parameters = sum(p.numel for graph in blocks for p in graph.parameters)
    loss, back = moments.get("loss"), rebuilt["backward of a block"]
    static = keeping.categories
    parameters = max(1, answer.num_parameters)
    return {
        "start": {
            "L": layers, "T": tokens, "d": width, "k": _segment(setup.checkpointing, layers),
            "A": (saved - quadratic) / tokens / width,
        },
        "sequence": setup.sequence,
        "quadratic": quadratic / tokens / setup.sequence,
        "input_bytes": blocks[0].values[blocks[0].entry].num_bytes / tokens / width,
        "head_bytes": loss.logits if loss else 0,
        "head_temporaries": loss.temporaries if loss else 0,
        "temporary_bytes": back.temporaries,
        "user_bytes": back.logits,
        "layer_parameters": block_parameters / layers,
        "other_parameters": answer.num_parameters - block_parameters,
        "other_bytes": static.weight_copies + static.communication + static.inputs,
        "weight_bytes": static.parameters / parameters,
        "gradient_bytes": static.gradients / parameters,
        "optimizer_bytes": static.optimizer / parameters,
    }  # fmt: skip


def _quadratic_bytes(architecture: Architecture, setup: Setup, saved: float) -> float:
    """The part of one block's bytes that grows with the square of the sequence, from a second length."""
    longer = replace(setup, sequence=2 * setup.sequence)
    pieces = [piece.graph for piece in Layouts(architecture).pieces(longer) if piece.kind == "block"]
    twice = sum(graph.bytes_of(graph.saved()) for graph in pieces) / len(pieces)
    # saved = linear + square; twice = 2 * linear + 4 * square.
    return max(0.0, (twice - 2 * saved) / 2)
