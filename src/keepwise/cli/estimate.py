"""`keepwise estimate`: memory and cost of a training step from a configuration or plain shapes.

Formatted by hand, without `rich`: the answer has to be there before a person has noticed the wait.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from keepwise.estimator.answer import Estimate
    from keepwise.estimator.emit import Setting
    from keepwise.estimator.search import Choice
    from keepwise.estimator.setup import Setup
    from keepwise.estimator.spec import Architecture

_MODEL = (
    click.option("--config", type=click.Path(), metavar="FILE", help="A Hugging Face config.json, or its folder."),
    click.option("--layers", type=int, metavar="L", help="Layers."),
    click.option("--width", "--hidden", "width", type=int, metavar="D", help="Hidden size."),
    click.option("--heads", type=int, help="Attention heads; with them plain shapes get the operator model."),
    click.option("--kv-heads", type=int, help="Key and value heads (grouped-query attention)."),
    click.option("--inner", "--intermediate", "inner", type=int, help="Feed-forward width."),
    click.option("--vocab", type=int, help="Vocabulary."),
    click.option("--family", default="llama", show_default=True, help="Architecture of plain shapes."),
    click.option("--tokens", metavar="T", help="Micro-batch times sequence, for the rule of thumb."),
    click.option(
        "--layer-bytes", type=float, default=34, show_default=True, metavar="A", help="Rule: bytes a token and unit."
    ),
    click.option(
        "--input-bytes",
        type=float,
        default=2,
        show_default=True,
        metavar="B",
        help="Rule: bytes of a stored input's value.",
    ),
    click.option("--segment", type=int, metavar="K", help="Layers in a segment; the same as --checkpointing every:K."),
    click.option("--parameters", metavar="N", help='Rule: parameters, "7B" too.'),
)
_RUN = (
    click.option("--batch", default="1", show_default=True, help="Sequences in a micro-batch."),
    click.option("--seq", "--sequence", "sequence", default="2048", show_default=True, help="Tokens in a sequence."),
    click.option("--source-seq", "source_sequence", type=int, help="Tokens in a source sequence."),
    click.option("--checkpointing", default="none", show_default=True, metavar="POLICY",
                 help="none, full, every:K, nth:K, first:N, sqrt, selective[:PART,...], sac, sac:2, save:..., keepwise[:BYTES]."),
    click.option("--precision", default="bf16", show_default=True,
                 help="fp32, bf16, bf16-pure, bf16-fp32-grads, bf16-autocast, fp16, fp8."),
    click.option("--attention", default="sdpa", show_default=True, help="eager, sdpa or flash."),
    click.option("--kernels", default="eager", show_default=True, help="eager, or fused norms, activations and rotations."),
    click.option("--loss", default="eager", show_default=True, help="eager, chunked or fused logits and loss."),
    click.option("--optimizer", default="adamw", show_default=True, help="adamw, adamw8bit, adafactor, sgd, muon, lion, none, ..."),
    click.option("--optimizer-kernel", default="fused", show_default=True, help="fused or foreach."),
    click.option("--gradients", default="held", show_default=True, help="held or fresh gradient buffers."),
    click.option("--accumulation", type=int, default=1, show_default=True, help="Micro-batches a step."),
    click.option("--lora", "lora_rank", type=int, default=0, metavar="RANK", help="Train adapters of this rank only."),
    click.option("--lora-targets", default="q,v", show_default=True, help="q,k,v,o,gate,up,down, attention, mlp, all-linear."),
    click.option("--lora-dropout", type=float, default=0.0, help="Dropout before the adapters."),
    click.option("--quantised", "--quantized", "quantised", help="Base in few bits: nf4 or int8."),
)  # fmt: skip
_PARALLEL = (
    click.option("--tp", "tensor_parallel", type=int, default=1, help="Tensor-parallel degree."),
    click.option("--sp", "sequence_parallel", is_flag=True, help="Sequence parallelism beside it."),
    click.option("--cp", "context_parallel", type=int, default=1, help="Context-parallel degree."),
    click.option("--pp", "pipeline_parallel", type=int, default=1, help="Pipeline stages."),
    click.option("--schedule", default="1f1b", show_default=True, help="gpipe, 1f1b, interleaved, zb-h1 or dualpipe."),
    click.option(
        "--virtual-stages", type=int, default=2, show_default=True, help="Chunks a rank of the interleaved schedule."
    ),
    click.option("--dp", "data_parallel", type=int, default=1, help="Data-parallel degree."),
    click.option("--ep", "expert_parallel", type=int, default=1, help="Expert-parallel degree."),
    click.option("--zero", type=int, default=0, help="ZeRO stage; 3 is FSDP."),
    click.option(
        "--offload", default="", metavar="WHAT", help="optimizer, parameters, activations, with commas between."
    ),
)
_ASK = (
    click.option("--device", help='Does it fit this one: h100, a100, rtx4090, ..., or a size such as "24GiB".'),
    click.option("--budget", help="Bytes on one device that are asked for, instead of the device's."),
    click.option("--emit", "systems", metavar="SYSTEM,...",
                 help="Settings for all, transformers, accelerate, deepspeed, megatron, torchtitan, maxtext, jax, keras."),
    click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
    click.option("--report", type=click.Path(dir_okay=False), metavar="FILE.html",
                 help="Write an interactive page that works offline."),
    click.option("--force", is_flag=True, help="Overwrite the report."),
)  # fmt: skip


def _options(function: Callable[..., None]) -> Callable[..., None]:
    decorators = (*_MODEL, *_RUN, *_PARALLEL, *_ASK)
    return functools.reduce(lambda f, decorate: decorate(f), reversed(decorators), function)


@click.command("estimate")
@_options
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Memory of a training step by category, for each rank that differs; runs no model and needs no torch.

    \b
    keepwise estimate --config config.json --batch 1 --seq 8192 --checkpointing full
    keepwise estimate --layers 32 --width 4096 --tokens 2048 --segment 1
    keepwise estimate --layers 32 --width 4096 --heads 32 --seq 4096 --tp 8 --sp
    """  # noqa: D301 - click wants the control character itself
    from keepwise._errors import UsageError

    try:
        fits = _answer(options)
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    if fits is False:
        ctx.exit(1)


class _Answered(NamedTuple):
    """What there is to say."""

    answer: Estimate
    setup: Setup
    architecture: Architecture | None
    """None where the rule of thumb answered."""
    choices: list[Choice]
    """Policies, with what each would take."""
    settings: list[Setting]
    """For the systems that were asked for."""
    extra: dict[str, Any]
    """The largest batch and the like, by name."""


def _answer(options: dict[str, Any]) -> bool | None:
    """Write the answer; False where a device or budget was named and the step does not fit it."""
    from keepwise._units import parse_bytes
    from keepwise.cost import device_of
    from keepwise.estimator.api import make_setup

    shapes = {name: options.pop(name) for name in ("layers", "width", "heads", "kv_heads", "inner", "vocab", "family")}
    rule = {name: options.pop(name) for name in ("tokens", "layer_bytes", "input_bytes", "parameters")}
    config, systems = options.pop("config"), options.pop("systems")
    as_json, report, force = options.pop("as_json"), options.pop("report"), options.pop("force")
    named_device, budget_text = options.pop("device"), options.pop("budget")
    segment, policy = options.pop("segment"), options.pop("checkpointing")
    device = device_of(named_device or "h100")
    budget = parse_bytes(budget_text) if budget_text else device.usable_bytes
    if report is not None and Path(report).exists() and not force:
        raise click.UsageError(f"{report} exists: give --force to overwrite it")
    given = {**options, "device": named_device or "h100"}
    if policy == "keepwise" or budget_text:
        given["budget"] = budget
    setup = make_setup(checkpointing=policy, segment=segment, **given)
    if config is not None and rule["parameters"] is not None:
        raise click.UsageError("--parameters is for the rule of thumb: a configuration says how many there are")
    if config is None and shapes["heads"] is None:
        found = _answered_by_rule(shapes, rule, setup, budget, systems)
    else:
        found = _answered_by_operators(config, shapes, rule["tokens"], setup, budget, systems)
    if report is not None:
        from keepwise.estimator.page import write

        write(Path(report), found.answer, found.architecture, found.setup)
        click.echo(f"wrote {report}", err=True)
    _print(found, budget, device.name, as_json=as_json)
    asked = named_device is not None or bool(budget_text)
    return found.answer.peak_bytes <= budget if asked else None


def _answered_by_rule(
    shapes: dict[str, Any], rule: dict[str, Any], setup: Setup, budget: int, systems: str | None
) -> _Answered:
    answer = _by_rule(shapes, rule, setup)
    if systems:
        raise click.UsageError("--emit needs the operator model: give --heads too, or --config")
    room = budget - (answer.peak_bytes - answer.activation_bytes)
    a_token = answer.rule["total_bytes"] / answer.rule["tokens"]  # activations are proportional to the tokens
    extra = {"largest_tokens": max(0, int(room / a_token))}
    return _Answered(answer=answer, setup=setup, architecture=None, choices=[], settings=[], extra=extra)


def _answered_by_operators(
    config: str | None, shapes: dict[str, Any], tokens: str | None, setup: Setup, budget: int, systems: str | None
) -> _Answered:
    from msgspec.structs import replace

    from keepwise.estimator.api import architecture_of
    from keepwise.estimator.compute import Estimator
    from keepwise.estimator.search import cheapest, largest_batch, longest_sequence, policies
    from keepwise.estimator.units import parse_count

    if tokens is not None:
        count = parse_count(tokens)
        if count % setup.batch:
            raise click.UsageError(f"--tokens {count} is not divisible by --batch {setup.batch}")
        setup = replace(setup, sequence=count // setup.batch)
    architecture = architecture_of(config, **shapes)
    estimator = Estimator(architecture)
    best = cheapest(estimator, setup, budget)
    settings: list[Setting] = []
    if systems:
        from keepwise.estimator.emit import emit

        settings = emit(estimator, setup, budget, tuple(s.strip() for s in systems.split(",")))
    return _Answered(
        answer=estimator.run(setup),
        setup=setup,
        architecture=architecture,
        choices=policies(estimator, setup, budget),
        settings=settings,
        extra={
            "largest_batch": largest_batch(estimator, setup, budget),
            "longest_sequence": longest_sequence(estimator, setup, budget),
            "max_positions": architecture.max_positions,
            "cheapest": None if best is None else _choice_dict(best),
        },
    )


def _print(found: _Answered, budget: int, device: str, *, as_json: bool) -> None:
    answer, choices, settings, extra = found.answer, found.choices, found.settings, found.extra
    if not as_json:
        from keepwise.cli._estimate_text import text

        click.echo(text(answer, choices, extra, settings, budget=budget, device=device))
        return
    data = {
        **answer.as_dict(),
        "budget": {"bytes": budget, "fits": answer.peak_bytes <= budget, "device": device},
        "policies": [_choice_dict(c) for c in choices],
        **extra,
        **({"settings": [s.as_dict() for s in settings]} if settings else {}),
    }
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def _by_rule(shapes: dict[str, Any], rule: dict[str, Any], setup: Any) -> Estimate:
    from keepwise._errors import UsageError
    from keepwise.estimator.shapes import by_rule
    from keepwise.estimator.units import parse_count

    if shapes["layers"] is None or shapes["width"] is None:
        raise UsageError("give --config, or --layers, --width and --tokens (and --heads for the operator model)")
    return by_rule(
        layers=shapes["layers"],
        width=shapes["width"],
        tokens=setup.batch * setup.sequence if rule["tokens"] is None else parse_count(rule["tokens"]),
        layer_bytes=rule["layer_bytes"],
        input_bytes=rule["input_bytes"],
        parameters=None if rule["parameters"] is None else parse_count(rule["parameters"]),
        setup=setup,
    )


def _choice_dict(choice: Choice) -> dict[str, Any]:
    return {
        "changes": list(choice.changes),
        "peak_bytes": choice.peak_bytes,
        "step_seconds": choice.step_seconds,
        "time_overhead": choice.time_overhead,
        "recompute_overhead": choice.recompute_overhead,
        "sent_bytes": choice.sent_bytes,
        "sent_again_bytes": choice.sent_again_bytes,
        "fits": choice.fits,
    }
