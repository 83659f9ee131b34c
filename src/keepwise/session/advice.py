"""What to say when no plan fits: the moment that binds, what is live there, and what would help, in bytes."""

from __future__ import annotations

from keepwise._units import show_bytes
from keepwise.ir import Category, Step
from keepwise.simulate import Timeline


def binding_moment(timeline: Timeline) -> str:
    """The moment of the peak and its largest tensors, in words."""
    step = timeline.step
    t = timeline.peak_moment
    if t < 0:
        return "a step without ops"
    op = step.ops[t]
    where = f"{op.phase} of {op.path or 'the model'} ({op.target})"
    if timeline.peak_window >= 0:
        window = timeline.schedule.windows[timeline.peak_window] if timeline.schedule else None
        where = f"the replay of {window.path if window and window.path else 'a window'} just before {where}"
    largest = []
    for live in timeline.at_peak[:5]:
        name = ""
        if live.category in tuple(Category):
            storage = step.storages[live.id]
            maker = step.ops[storage.birth].path if storage.birth >= 0 else ""
            name = storage.name or maker
        largest.append(f"{live.category}{' of ' + name if name else ''}: {show_bytes(live.nbytes)}")
    return f"{where}; live there: {', '.join(largest)}"


def remedies(timeline: Timeline) -> list[str]:
    """What would lower the floor, with the bytes of each, largest first."""
    step = timeline.step
    found: list[tuple[int, str]] = []
    sums = _by_category(step)
    trainable = sums.get(Category.GRADIENT, 0)
    if trainable:
        found.append(
            (trainable, f"free gradients as they are used (optimizer in backward): up to {show_bytes(trainable)}")
        )
    state = sums.get(Category.OPTIMIZER, 0)
    if state:
        found.append((state * 3 // 4, f"an 8-bit optimizer: about {show_bytes(state * 3 // 4)}"))
    parameters = sums.get(Category.PARAMETER, 0)
    if parameters:
        text = f"LoRA or a quantised base: up to {show_bytes(parameters * 3 // 4 + trainable + state)}"
        found.append((parameters * 3 // 4 + trainable + state, text))
    activations = timeline.peak_bytes - timeline.static_bytes
    if activations > 0:
        found.append((activations // 2, f"half the batch or sequence: about {show_bytes(activations // 2)}"))
    largest = max((s for s in step.storages if not s.category.is_static), key=lambda s: s.nbytes, default=None)
    if largest is not None and activations > 0 and largest.nbytes * 3 > activations:
        maker = step.ops[largest.birth] if largest.birth >= 0 else None
        where = f" ({maker.path or 'model'}: {maker.target})" if maker else ""
        found.append(
            (
                largest.nbytes // 2,
                f"split the largest tensor, {show_bytes(largest.nbytes)}{where}, for example the loss over chunks of the sequence",
            )
        )
    found.sort(key=lambda f: -f[0])
    return [text for _, text in found[:4]]


def infeasible_message(budget: int, timeline: Timeline) -> str:
    """The one-paragraph error for a budget below the floor.

    Args:
        budget: in bytes.
        timeline: the simulated floor plan.
    """
    floor = timeline.peak_bytes
    static = timeline.static_bytes
    head = f"no plan fits {_exactly(budget)}: the smallest peak is {_exactly(floor)}, {show_bytes(floor - budget)} more"
    if static > budget:
        sums = _by_category(timeline.step)
        parts = ", ".join(f"{c} {show_bytes(n)}" for c, n in sorted(sums.items(), key=lambda x: -x[1]))
        head += f". What exists whatever is planned takes {show_bytes(static)} ({parts}): no plan can help below that"
    return (
        f"{head}. It is reached in {binding_moment(timeline)}. Try budget={floor} or budget='min', or "
        f"on_infeasible='floor' to run the smallest plan. What would lower the floor: "
        f"{'; '.join(remedies(timeline)) or 'nothing that is known'}"
    )


def named_message(planner: str, budget: int, timeline: Timeline) -> str:
    """The error for a named planner whose plan does not fit.

    Args:
        planner: its name.
        budget: in bytes.
        timeline: the simulated plan.
    """
    peak = timeline.peak_bytes
    return (
        f"the plan of planner {planner!r} needs {_exactly(peak)}, {show_bytes(peak - budget)} more than the budget of "
        f"{_exactly(budget)}. Its peak is reached in {binding_moment(timeline)}. Try planner='auto', which may need less, or budget={peak}"
    )


def _exactly(n: int) -> str:
    """For people, and to the byte."""
    return f"{show_bytes(n)} ({n} bytes)" if n >= 1024 else show_bytes(n)


def _by_category(step: Step) -> dict[Category, int]:
    sums: dict[Category, int] = {}
    for s in step.storages:
        if s.category.is_static:
            sums[s.category] = sums.get(s.category, 0) + s.nbytes
    return sums
