"""What a command is doing, on a terminal, for waits over a second."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

DELAY_SECONDS = 1.0


class Progress:
    """`with Progress(console) as say: say("recording two steps")`.

    Nothing appears before a second has passed, nor where the console is no terminal; what appeared is wiped at the end.
    """

    def __init__(self, console: Console) -> None:
        """`console`: stderr."""
        self._console = console
        self._text = ""
        self._done: float | None = None
        self._lock = threading.Lock()
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._timer: threading.Timer | None = None
        self._closed = False

    def __call__(self, text: str, done: float | None = None) -> None:
        """Say what happens now.

        Args:
            text: a short phrase.
            done: share of the whole that is done, 0 to 1, where known.
        """
        with self._lock:
            self._text, self._done = text, done
            self._update()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._timer = threading.Timer(DELAY_SECONDS, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            if self._bars is not None:
                self._bars.stop()

    def _show(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._bars = Bars(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bars.add_task("", total=None)
            self._update()
            self._bars.start()

    def _update(self) -> None:
        if self._bars is not None and self._task is not None:
            share = "" if self._done is None else f" {100 * self._done:.0f} %"
            self._bars.update(self._task, description=self._text + share)
