"""What a trace found, put into the step and into words."""

from __future__ import annotations

import msgspec

from keepwise.ir import Phase, Step
from keepwise.trace import Traced

OUTSIDE = "saved outside of model.forward, where the plan does not reach (pass the whole step as step=, and run later ones in `with plan:`)"


def only_inside_forward(step: Step, inside: tuple[range, ...]) -> Step:
    """Mark what is saved outside of the model's forward as kept: there the runtime watches nothing.

    Args:
        step: the recorded step.
        inside: `Recording.inside`.
    """
    outside = {step.values[save.value].storage for save in step.saves if not any(save.index in call for call in inside)}
    if not outside:
        return step
    storages = tuple(
        msgspec.structs.replace(s, keep_reason=OUTSIDE)
        if s.id in outside and not s.keep_reason and not s.category.is_static
        else s
        for s in step.storages
    )
    return msgspec.structs.replace(step, storages=storages)


_FACTORIZATIONS = {
    "aten._linalg_svd.default": (0, 2),
    "aten._linalg_eigh.default": (1,),
    "aten.linalg_eig.default": (1,),
}
"""What computes singular values or eigenvalues, and which of its results are vectors."""


def computed_otherwise(step: Step) -> str:
    """Where forward computes vectors that nothing reads, in words; empty if nowhere.

    `torch.linalg.svdvals`, `eigvalsh` and `eigvals` of what needs no gradient compute none in a plain step, and other bits than with
    them. Wherever a dispatch mode is on they do, so that a step that is watched is another one, whether or not the bits show it.
    """
    read = {step.values[v].storage for op in step.ops for v in op.inputs} | step.saved_storages.keys()
    for op in step.ops:
        found = _FACTORIZATIONS.get(op.target)
        if found is None or op.phase != Phase.FORWARD:
            continue
        vectors = [step.values[op.outputs[i]].storage for i in found if i < len(op.outputs) and op.outputs[i] >= 0]
        if any(step.storages[s].nbytes for s in vectors) and read.isdisjoint(vectors):
            return (op.path or "the model") + (f" ({op.source})" if op.source else "")
    return ""


def notes_of(traced: Traced) -> list[str]:
    """What a user should know about the step, one sentence each."""
    recording = traced.recording
    notes = list(recording.step.notes)

    def listed(paths: tuple[str, ...]) -> str:
        shown = sorted({p or "the model" for p in paths})
        return ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")

    if recording.functorch_paths:
        notes.append(
            f"torch.func transforms run in {listed(recording.functorch_paths)}: "
            "no hooks on saved tensors are possible there, so nothing is dropped"
        )
    if recording.compiled:
        notes.append(f"compiled, so one opaque op whose saved tensors are kept: {listed(recording.compiled)}")
    if recording.checkpoints:
        notes.append(
            f"torch.utils.checkpoint is active in {listed(recording.checkpoints)}: left alone; what it saves is not planned"
        )
    if recording.foreign_hooks:
        notes.append(
            f"the user's own saved-tensor hooks are active in {listed(recording.foreign_hooks)}: "
            "kept tensors pass through them, dropped ones do not"
            + (
                ""
                if all(same for _, same in recording.step.hooks)
                else ", and they change values, so nothing is dropped under them"
            )
        )
    if traced.left:
        shown = ", ".join(traced.left[:4]) + (", ..." if len(traced.left) > 4 else "")
        notes.append(f"iterators cannot be put back: the recorded steps may have moved on {shown}")
    if traced.hooked:
        notes.append(
            f"hooks of {listed(traced.hooked)} ran in the recorded steps: what they hold is put back, "
            "what they write to globals or files is not"
        )
    return notes
