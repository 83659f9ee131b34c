"""What the judge says when a schedule cannot run."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule that reads what is not there, or breaks a rule of `Schedule`. The message names window, op and value.

    Attributes:
        window: window in question, or -1.
        op: op in question, or -1.
        value: value in question, or -1.
        storage: storage in question, or -1.
    """

    def __init__(self, message: str, *, window: int = -1, op: int = -1, value: int = -1, storage: int = -1) -> None:
        places = {"window": window, "op": op, "value": value, "storage": storage}
        where = ", ".join(f"{name} {i}" for name, i in places.items() if i >= 0)
        super().__init__(f"{where}: {message}" if where else message)
        self.window = window
        self.op = op
        self.value = value
        self.storage = storage
