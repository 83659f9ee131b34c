"""The estimate as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keepwise._units import show_bytes
from keepwise.estimator.units import format_count

if TYPE_CHECKING:
    from keepwise.estimator.answer import Estimate
    from keepwise.estimator.emit import Setting
    from keepwise.estimator.search import Choice

_CATEGORIES = {
    "parameters": ("parameters", False),
    "gradients": ("gradients", False),
    "optimizer": ("optimizer state and master copies", False),
    "weight_copies": ("copies of weights", False),
    "communication": ("communication buffers", False),
    "inputs": ("inputs", False),
    "kept_activations": ("activations held", True),
    "rebuilt_activations": ("activations rebuilt", True),
    "logits": ("logits and loss", True),
    "temporaries": ("gradients of activations, workspaces", True),
}
"""Category -> (words, whether checkpointing changes it)."""

_BAR = 24


def text(
    answer: Estimate,
    choices: Sequence[Choice],
    extra: dict[str, Any],
    settings: Sequence[Setting],
    *,
    budget: int,
    device: str,
) -> str:
    """Everything, as one string."""
    parts = [_head(answer), _memory(answer)]
    if answer.rule:
        parts.append(_rule(answer))
    else:
        parts += [_cost(answer), _traffic(answer), _choices(choices, budget)]
    parts += [_fits(answer), _limits(extra, budget, device)]
    parts += [_setting(setting) for setting in settings]
    parts.append("\n".join(f"note: {note}" for note in answer.notes))
    return "\n\n".join(part for part in parts if part)


def _head(answer: Estimate) -> str:
    peak = f"peak {show_bytes(answer.peak_bytes)} on {answer.worst.name}, at: {answer.worst.peak.name}"
    trained = "" if answer.num_trained == answer.num_parameters else f", {format_count(answer.num_trained)} trained"
    return f"{answer.model}{trained}\ncheckpointing {answer.checkpointing}; {answer.num_devices} device(s)\n{peak}"


def _memory(answer: Estimate) -> str:
    ranks = answer.ranks
    shown = [name for name in _CATEGORIES if any(r.peak.categories.as_dict()[name] for r in ranks)]
    widths = [max(14, len(rank.name) + 2) for rank in ranks]
    lines = []
    if len(ranks) > 1:
        lines.append(" " * 40 + "".join(rank.name.rjust(w) for rank, w in zip(ranks, widths, strict=True)))
    for name in shown:
        words, changes = _CATEGORIES[name]
        cells = "".join(
            show_bytes(rank.peak.categories.as_dict()[name]).rjust(w) for rank, w in zip(ranks, widths, strict=True)
        )
        share = answer.categories.as_dict()[name] / max(1, answer.peak_bytes)
        bar = "#" * round(share * _BAR) if len(ranks) == 1 else ""
        lines.append(f"{'* ' if changes else '  '}{words:<38}{cells}  {bar}".rstrip())
    total = "".join(show_bytes(rank.peak_bytes).rjust(w) for rank, w in zip(ranks, widths, strict=True))
    lines.append(f"  {'peak':<38}{total}")
    if any(rank.host_bytes for rank in ranks):
        host = "".join(show_bytes(rank.host_bytes).rjust(w) for rank, w in zip(ranks, widths, strict=True))
        lines.append(f"  {'in host memory':<38}{host}")
    if answer.ranks[0].in_flight > 1:
        flight = "".join(f"{rank.in_flight:g}".rjust(w) for rank, w in zip(ranks, widths, strict=True))
        lines.append(f"  {'micro-batches in flight':<38}{flight}")
    lines.append("  (* checkpointing changes these; parameters, gradients and optimizer state stay as they are)")
    return "\n".join(lines)


def _rule(answer: Estimate) -> str:
    rule = answer.rule
    best = f"{rule['best_segment']:.0f}"
    if rule["best_segment_last"] != rule["best_segment"]:
        best += f" to {rule['best_segment_last']:.0f}"
    return "\n".join(
        [
            f"activations {rule['total_bytes']:,.0f} B = {rule['total_bytes'] / 1e9:.4g} GB"
            f" ({rule['units']:g} x tokens x width); without checkpointing {rule['none_bytes'] / 1e9:.4g} GB",
            f"stored inputs {rule['stored_inputs_bytes']:,.0f} B, one segment {rule['segment_bytes']:,.0f} B",
            f"best segment: {best} layers; compute {rule['compute_units']:g} units of one forward pass"
            f" ({rule['compute_units'] / 3 - 1:+.1%}; {rule['compute_units_skipping_last']:.3g} if the last segment is left alone)",
        ]
    )


def _cost(answer: Estimate) -> str:
    waiting = f", pipeline idle {answer.bubble:.1%}" if answer.bubble else ""
    return (
        f"compute {answer.compute_units:.3f} units of one forward pass; recomputation {answer.recompute_overhead:+.1%} operations, "
        f"{answer.time_overhead:+.1%} time; a step of {answer.tokens:,} tokens takes about {answer.step_seconds:.3g} s{waiting}"
    )


def _traffic(answer: Estimate) -> str:
    lines = [
        f"  {t.reason:<56}{show_bytes(t.num_bytes).rjust(12)}{f'{t.count} times' if t.count else '':>12}{t.seconds:>10.3g} s"
        for t in answer.traffic
    ]
    return "\n".join(["sent by one device in a step (no overlap assumed)", *lines]) if lines else ""


def _choices(choices: Sequence[Choice], budget: int) -> str:
    if not choices:
        return ""
    sends = any(choice.sent_bytes for choice in choices)
    head = f"{'checkpointing side by side':<28}{'peak':>10}{'operations':>13}{'time':>9}"
    if sends:
        head += f"{'sent a step':>15}{'of it again':>14}"
    lines = [f"{head}  for {show_bytes(budget)}"]
    for choice in choices:
        name = choice.changes[0].removeprefix("checkpointing ")
        line = f"  {name:<24}{show_bytes(choice.peak_bytes).rjust(12)}{choice.recompute_overhead:>+13.1%}{choice.time_overhead:>+9.1%}"
        if sends:
            line += f"{show_bytes(choice.sent_bytes).rjust(15)}{show_bytes(choice.sent_again_bytes).rjust(14)}"
        lines.append(f"{line}  {'fits' if choice.fits else ''}".rstrip())
    return "\n".join(lines)


def _fits(answer: Estimate) -> str:
    fitting = [f.device for f in answer.fits if f.fits]
    if not fitting:
        return f"fits none of {', '.join(f.device for f in answer.fits)}"
    missing = [f.device for f in answer.fits if not f.fits]
    text_ = f"fits {', '.join(fitting)}"
    return f"{text_}\nnot  {', '.join(missing)}" if missing else text_


def _limits(extra: dict[str, Any], budget: int, device: str) -> str:
    if not extra:
        return ""
    lines = [f"within {show_bytes(budget)} ({device})"]
    if "largest_tokens" in extra:
        return f"{lines[0]}\n  most tokens on it: {extra['largest_tokens'] or 'none'}"
    lines.append(f"  largest batch at this sequence: {extra['largest_batch'] or 'none'}")
    longest, positions = extra["longest_sequence"], extra["max_positions"]
    if longest is None:
        lines.append("  longest sequence at this batch: the model fixes its length")
    else:
        beyond = (
            f" (the configuration has {positions} positions)" if positions is not None and longest > positions else ""
        )
        lines.append(f"  longest sequence at this batch: {longest or 'none'}{beyond}")
    found = extra["cheapest"]
    if found is None:
        lines.append("  cheapest setting that fits: none without more devices, adapters, or a smaller model")
    else:
        changes = ", ".join(found["changes"])
        lines.append(
            f"  cheapest setting that fits: {changes}"
            f" ({show_bytes(found['peak_bytes'])}, about {found['step_seconds']:.3g} s a step)"
        )
    return "\n".join(lines)


def _setting(setting: Setting) -> str:
    verdict = "" if setting.fits else ", over the wanted peak"
    lines = [
        f"== {setting.system}: {show_bytes(setting.peak_bytes)}, {setting.time_overhead:+.1%} time{verdict}"
        f" (ours {show_bytes(setting.ours_peak_bytes)}, {setting.ours_time_overhead:+.1%})",
        setting.text,
    ]
    lines += [f"  lost: {line}" for line in setting.lost]
    lines += [f"  note: {line}" for line in setting.notes]
    return "\n".join(lines)
