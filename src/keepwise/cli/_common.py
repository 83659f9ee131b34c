"""What all commands share: the two streams, `--json`, files, and exit codes.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the answer is no: it does not fit, is not identical, does not repeat |
| 2 | wrong use: an argument, a file, a target that is not one |
| 3 | the target failed: an exception from the user's code (or, said as such, from Keepwise itself) |
| 130 | interrupted |
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console

from keepwise._errors import InfeasibleBudget, KeepwiseError, PlanMismatch, UsageError
from keepwise._rank import rank
from keepwise.cli._failures import in_options, is_ours, place_in_user_code
from keepwise.cli._progress import Progress
from keepwise.targets.target import TargetFailed

DONE, NO, WRONG_USE, TARGET_FAILED, INTERRUPTED = 0, 1, 2, 3, 130

_WIDTH = 110
"""Columns where the output is no terminal and `COLUMNS` says nothing."""


@dataclass(slots=True)
class Io:
    """Where a command writes."""

    as_json: bool
    """Whether stdout carries one JSON object and nothing else."""
    out: Console
    """Results for people: stdout, or nowhere with `--json` and on other ranks."""
    err: Console
    """Progress and remarks: stderr, nowhere on other ranks."""
    speaks: bool
    """Whether this process writes results and files: rank 0 does."""
    data: dict[str, Any] = field(default_factory=dict)
    """What `--json` prints at the end."""

    def progress(self) -> Progress:
        """Shows what happens, on a terminal, after a second."""
        return Progress(self.err)

    def write(self, path: str, content: str | bytes) -> None:
        """Write a file that `check_writable` has seen, and say so."""
        if not self.speaks:
            return
        if isinstance(content, str):
            content = content.encode()
        try:
            Path(path).write_bytes(content)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
        self.err.print(f"wrote {path}", style="dim", markup=False, highlight=False)


def check_writable(path: str | None, *, force: bool) -> None:
    """Refuse a path before any work is done for it.

    Raises:
        UsageError: it exists and `force` is off, it is a folder, or its folder does not exist.
    """
    if path is None:
        return
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    if target.exists() and not force:
        raise UsageError(f"{path} exists; add --force to overwrite it")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {target.parent} to write {target.name} into")


def reports(function: Callable[..., int]) -> Callable[..., None]:
    """Make a click callback out of `function(io, **options) -> exit code`.

    It adds `--json` and `--traceback`, keeps stdout for the result, and turns exceptions into one clear line and an exit code.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, all else on stderr.")
    @click.option("--traceback", "show_trace", is_flag=True, help="Show the whole traceback of an error.")
    @functools.wraps(function)
    def command(*, as_json: bool, show_trace: bool, **options: Any) -> None:
        stdout = sys.stdout
        io = _io(as_json, stdout)
        with _kept_for_results(stdout) if as_json else contextlib.nullcontext():
            code = _guarded(functools.partial(function, io, **options), io, show_trace)
        if as_json and io.speaks:
            _write_json(stdout, {"ok": code == DONE, "exit_code": code, **io.data})
        click.get_current_context().exit(code)

    return command


def _io(as_json: bool, stdout: IO[str]) -> Io:
    speaks = rank() == 0

    def console(stream: IO[str], silent: bool) -> Console:
        width = None if stream.isatty() or os.environ.get("COLUMNS") else _WIDTH
        return Console(file=stream, highlight=False, quiet=silent, width=width, emoji=False, markup=False)

    return Io(
        as_json=as_json,
        out=console(stdout, as_json or not speaks),
        err=console(sys.stderr, not speaks),
        speaks=speaks,
    )


def _guarded(work: Callable[[], int], io: Io, show_trace: bool) -> int:
    """Run a command; every way in which it can end becomes an exit code."""
    try:
        return work()
    except (click.ClickException, click.exceptions.Exit):
        raise
    except KeyboardInterrupt:
        _complain("interrupted")
        return _failed(io, INTERRUPTED, "interrupted", "KeyboardInterrupt")
    except TargetFailed as error:
        cause = error.__cause__ or error
        return _target_failed(str(error), cause, io, show_trace)
    except KeepwiseError as error:
        if show_trace:
            traceback.print_exception(error, file=sys.stderr)
        line = in_options(str(error), [p.name or "" for p in click.get_current_context().command.params])
        _complain(line)
        code = _code_of(error)
        io.data = {}
        found = _failed(io, code, line, type(error).__name__)
        if isinstance(error, InfeasibleBudget):
            io.data["error"] |= {"floor_bytes": error.floor_bytes, "binding": error.binding}
        return found
    except Exception as error:
        if is_ours(error):
            line = (
                f"a fault of Keepwise, not of the target ({_line(error)}): please report it with what --traceback shows"
            )
            return _unexpected(line, error, io, show_trace)
        return _target_failed(f"the target failed: {_line(error)}", error, io, show_trace)


def _code_of(error: KeepwiseError) -> int:
    return WRONG_USE if isinstance(error, UsageError | PlanMismatch) else NO


def _target_failed(line: str, error: BaseException, io: Io, show_trace: bool) -> int:
    place = place_in_user_code(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        line += ". Planning runs real steps: try a smaller batch, or free memory first"
    return _unexpected(line, error, io, show_trace, place)


def _unexpected(line: str, error: BaseException, io: Io, show_trace: bool, place: str = "") -> int:
    if show_trace:
        traceback.print_exception(error, file=sys.stderr)
    _complain(line)
    if place:
        click.echo(f"  {place}", err=True)
    if not show_trace:
        click.echo("  --traceback shows the whole stack", err=True)
    code = _failed(io, TARGET_FAILED, line, type(error).__name__)
    if place:
        io.data["error"]["place"] = place
    return code


def _failed(io: Io, code: int, message: str, kind: str) -> int:
    io.data = {"error": {"type": kind, "message": message}}
    return code


def _complain(line: str) -> None:
    who = f"error (rank {rank()})" if rank() else "error"
    click.echo(f"{who}: {' '.join(line.split())}", err=True)


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _write_json(stream: IO[str], data: dict[str, Any]) -> None:
    import msgspec

    stream.write(msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n")
    stream.flush()


@contextlib.contextmanager
def _kept_for_results(stdout: IO[str]) -> Iterator[None]:
    """Send whatever else is printed, by Python or below it, to stderr."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        with contextlib.suppress(OSError, ValueError):
            number, other = stdout.fileno(), sys.stderr.fileno()
            stdout.flush()
            copy = os.dup(number)
            stack.callback(os.close, copy)
            stack.callback(os.dup2, copy, number)
            os.dup2(other, number)
        yield
