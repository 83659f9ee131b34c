"""Programs that the search found a fault with, shortened; each with the plan under which it failed and what was wrong."""

from __future__ import annotations

from .fuzz import Instruction, Spec


def _spec(
    *blocks: str,
    order: tuple[int, ...] = (0,),
    rows: int = 4,
    outputs: int = 1,
    form: str = "",
    from_args: bool = False,
) -> Spec:
    """A program from its text: `"op 1 0 3, op 0 0 0"` is a block of two lines; a fourth number says when it runs."""

    def line(text: str) -> Instruction:
        name, *numbers = text.split()
        return Instruction(name, *map(int, numbers))

    lines = tuple(tuple(line(text) for text in block.split(",") if text) for block in blocks)
    return Spec(lines, order, (rows,) * 3, outputs, form, from_args=from_args)


FOUND: dict[str, tuple[Spec, str]] = {
    "what NumPy wrote was proved under hooks around `fit` with everything kept, and dropped in the second step": (
        _spec("numpy_written 0 0 0", "", form="in hooks"),
        "everything",
    ),
    "batch normalisation of an expanded tensor was replayed into given memory, where its kernel computes something else": (
        _spec(
            "constant 0 0 0, leaky_noise 0 0 0, complex_numbers 0 5 0",
            "expanded 0 0 0, scheduled 1 0 0, resized 0 0 0, touched_up 0 0 1, batch_norm 3 0 0",
            "",
            order=(0, 0, 1),
            outputs=2,
        ),
        "everything",
    ),
    "what was dropped is written under the user's hooks, where plain autograd compares no versions": (
        _spec(
            "exponential 0 0 0, some_steps_only 0 0 0, overlapping 0 0 0, masked 0 0 0, written 4 0 0 1",
            rows=3,
            form="hooks",
            from_args=True,
        ),
        "0.6x",
    ),
    "the write that finishes what was saved before it is none that the user's hooks may miss": (
        _spec("set_elsewhere 0 0 0, leaky_noise 0 0 0", rows=3, form="hooks", from_args=True),
        "min",
    ),
    "a replayed mask had another shape, because NumPy wrote what it hangs on": (
        _spec("numpy_written 0 0 0, rows_by_data 0 0 0", rows=5),
        "everything",
    ),
    "a version moved without an operator: the end of a function that marks its input": (
        _spec("dirty_function 0 0 0, interpolated 0 0 0, numpy_written 0 0 0"),
        "planner full",
    ),
    "the same, where the argument is an expanded tensor's": (
        _spec("chosen 0 0 0, out_slice 7 0 0, dirty_function 0 0 0, scattered 7 0 4", order=(0, 0), outputs=2),
        "0.6x",
    ),
    "autocast's cache made the step that proves another one": (
        _spec("numpy_written 0 0 0, linear 1 0 0", order=(0, 0, 0), rows=3, outputs=2, form="in autocast"),
        "everything",
    ),
    "the user's hooks around let a saved tensor be written": (
        _spec("without_gradients 0 0 0", rows=5, form="in hooks"),
        "everything",
    ),
    "an output that only this step returns was written by the loss": (
        _spec(
            "scattered 0 0 0, read_early 0 0 0, chosen 2 0 0, own_generator_in_place 0 0 0, some_steps_only 7 0 5",
            rows=3,
            outputs=2,
            form="written outputs",
        ),
        "planner selective",
    ),
    "a pass that keeps the graph emptied results whose inputs an inner gradient had given up": (
        _spec(
            "chunks_written 0 0 0, attention 0 0 2 2, rows_by_data 2 7 3, moments 3 2 4, masked 0 4 2, inner_gradient 7 7 5",
            "",
            rows=5,
            form="partly",
        ),
        "everything",
    ),
}
